"""The drafter at the bottom of the chain. The setting `draft.model` names an entry of `DRAFTERS`, or else a model.

To add a drafter that needs no weights, write its class in a new file and add it to `DRAFTERS`; docs/extending.md has an
example.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from triforce_core.config import Settings
from triforce_core.messages import Proposer, Tier
from triforce_core.speculation.leaf import Leaf

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from triforce_core.models.runner import ModelRunner


@runtime_checkable
class Drafter(Proposer, Protocol):
    """The lowest tier of the chain, as the code that assembles the chain and reports on it sees it."""

    @property
    def tier(self) -> Tier: ...

    @property
    def held(self) -> Sized:
        """The sequences that the drafter holds at present."""
        ...

    @property
    def runner(self) -> ModelRunner | None:
        """The runner of the drafter's model; None for a drafter without a model."""
        ...


DRAFTERS: dict[str, Callable[[], Drafter]] = {"ngram": Leaf}


def drafter_weights(settings: Settings) -> str | None:
    """The model to load for the draft tier; None where the drafter needs no model."""
    return None if settings.draft.model in DRAFTERS else settings.draft.model


def most_nodes(settings: Settings) -> int:
    """The most tokens of a tree that the draft tier proposes; 0 if it proposes none."""
    model = drafter_weights(settings) is not None and settings.draft.cache != "heavy_hitter"
    return settings.speculation.nodes if model and settings.controlled and settings.speculation.effective[1] else 0


def drafter_for(settings: Settings, model: PreTrainedModel | None) -> Drafter:
    """The draft tier. `model`: of `drafter_weights`; without it, drafts come from prompt lookup alone."""
    if make := DRAFTERS.get(settings.draft.model):
        return make()
    if model is None:
        return Leaf()
    from triforce_core.building.draft_model import draft_proposer  # imported late, because it loads transformers

    return draft_proposer(model, settings)
