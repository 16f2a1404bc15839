"""What drafts at the bottom of the chain, by the setting `draft.model`: an entry of `DRAFTERS`, or else a model.

To add a drafter that needs no weights, write its class in a file of its own and name it here; docs/extending.md has an
example.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from triforce_core.config import Settings
from triforce_core.messages import Proposer, Tier
from triforce_core.ngram import NgramProposer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from triforce_core.models.runner import ModelRunner


@runtime_checkable
class Drafter(Proposer, Protocol):
    """The leaf of the chain, as those see it who put the chain together and report on it."""

    @property
    def tier(self) -> Tier: ...

    @property
    def held(self) -> Sized:
        """The sequences that it knows at present."""
        ...

    @property
    def runner(self) -> ModelRunner | None:
        """What runs its model; None: it has none."""
        ...


DRAFTERS: dict[str, Callable[[], Drafter]] = {"ngram": NgramProposer}


def drafter_weights(settings: Settings) -> str | None:
    """The model to load for the draft tier; None: its drafter needs none."""
    return None if settings.draft.model in DRAFTERS else settings.draft.model


def drafter_for(settings: Settings, model: PreTrainedModel | None) -> Drafter:
    """The draft tier; `model` is what `drafter_weights` names. None in place of a named model: nothing is drafted."""
    if make := DRAFTERS.get(settings.draft.model):
        return make()
    # Imported here: what builds models imports this module, and where no drafter needs one it loads no transformers.
    from triforce_core.drafting import NoProposer
    from triforce_core.engine.assembly import draft_proposer

    return NoProposer() if model is None else draft_proposer(model, settings)
