"""How one request is drafted: the plan of its rounds."""

from __future__ import annotations

from typing import NamedTuple

from triforce_core.messages import Drafting


class Plan(NamedTuple):
    """The lookaheads of a request's rounds, and who drafts at the lowest tier."""

    retrieval: int  # tokens that the retrieval tier drafts for the target; 0: it is left out
    draft: int  # tokens that the lowest tier drafts for the tier above it; 0: it is left out
    drafting: Drafting = Drafting.MODEL

    @property
    def lookaheads(self) -> tuple[int, int]:
        return self.retrieval, self.draft

    @property
    def speculates(self) -> bool:
        return any(self.lookaheads)

    @property
    def name(self) -> str:
        """Such as `8,3 model`, or `plain`."""
        drafter = f" {self.drafting.name.lower()}" if self.draft else ""
        return f"{self.retrieval},{self.draft}{drafter}" if self.speculates else "plain"


PLAIN = Plan(0, 0)
