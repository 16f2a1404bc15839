"""The caches under evaluation: how each gives the logits of a stretch, after a text that the target has read.

A cut cache is a snapshot of the full cache, cut where the stretch begins. The retrieval tier drafts with one; methods
that compress the cache after the prompt decode with one. The other caches are filled without the full one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from torch import Tensor

from triforce_core.config import Settings
from triforce_core.engine.assembly import heavy_hitter_kv, streaming_kv
from triforce_core.engine.drafters import drafter_weights
from triforce_core.errors import require
from triforce_core.kv.base import KVCache
from triforce_core.kv.heavy_hitter import HeavyHitterKV, HeavyHitterSettings
from triforce_core.kv.retrieval import RetrievalKV
from triforce_core.kv.selectors import SELECTORS
from triforce_core.kv.streaming import StreamingKV, WindowSettings
from triforce_core.messages import Tier
from triforce_tools.evaluation.plan import EvalPlan
from triforce_tools.evaluation.reading import Model, Reader, Reading
from triforce_tools.evaluation.texts import Input, Stretch

FULL, DRAFT, TRIFORCE = "full", "draft", "triforce"
SINKS = 4  # tokens
# Tokens by which `streaming_llm` and `heavy_hitter` grow beyond their budget before they evict: by default, the
# retrieval tier's cache grows by as many between two snapshots.
EVICT_EVERY = 64

LogitsOf = Callable[[Stretch], Tensor]  # the logits of a stretch, [tokens, vocab] float32


class Case(NamedTuple):
    """One cache at one budget: a row of the tables."""

    cache: str
    budget: int | None = None  # tokens; None where the plan's budgets do not apply


def open_case(case: Case, reading: Reading, text: Input, settings: Settings) -> LogitsOf:
    """The cache over the text."""
    if case.cache == FULL:
        return reading.logits  # once more over the KV that is held
    if case.cache == DRAFT:
        drafter = reading.models[Tier.DRAFT]
        make = heavy_hitter_kv if settings.draft.cache == "heavy_hitter" else streaming_kv
        return reads_on(drafter, make(drafter.model, settings), text)
    assert case.budget is not None
    return CACHES[case.cache](reading, text, case.budget)


def cut_by(name: str, reading: Reading, text: Input, budget: int) -> LogitsOf:
    """Snapshots by a selector, as the retrieval tier has them."""
    selector, model = SELECTORS[name](), reading.models.get(Tier.RETRIEVAL, reading.target)

    def logits(stretch: Stretch) -> Tensor:
        sparse = RetrievalKV(model.geometry, 1, budget, stretch.stop - stretch.start, model.kernel)
        taken = sparse.take(reading.cut(stretch, budget, selector))
        assert taken, "the snapshot has at most the budget"
        return model.over(sparse, text.tokens).logits(stretch)

    return logits


def streaming_llm(reading: Reading, text: Input, budget: int) -> LogitsOf:
    """Sinks and a window of the last tokens, at the positions of a small cache, as StreamingLLM (Xiao et al. 2023) has
    them. The window is filled anew for a stretch that begins `EVICT_EVERY` tokens or more after the last filling.
    """
    model, longest = reading.target, max(stretch.stop - stretch.start for stretch in text.stretches)
    window = WindowSettings(SINKS, budget - SINKS, slack=EVICT_EVERY + longest)

    def filled(start: int) -> tuple[Reader, int]:
        reader = model.over(StreamingKV(model.geometry, 1, window, model.kernel), text.tokens)
        reader.forward(start, 1)
        return reader, start

    reader, since = filled(text.stretches[0].start)

    def logits(stretch: Stretch) -> Tensor:
        nonlocal reader, since
        if stretch.start >= since + EVICT_EVERY:
            reader, since = filled(stretch.start)
        return reader.logits(stretch)

    return logits


def heavy_hitter(reading: Reading, text: Input, budget: int) -> LogitsOf:
    """Heavy hitters and the last tokens, half of the budget each, as H2O (Zhang et al. 2023) has them."""
    model = reading.target
    settings = HeavyHitterSettings(budget, heavy=budget // 2, slack=EVICT_EVERY)
    heads = model.model.config.num_attention_heads
    return reads_on(model, HeavyHitterKV(model.geometry, 1, settings, model.kernel, heads), text)


def reads_on(model: Model, kv: KVCache, text: Input) -> LogitsOf:
    """A cache that reads the text by itself, stretch after stretch, and forgets as it goes."""
    reader = model.over(kv, text.tokens)

    def logits(stretch: Stretch) -> Tensor:
        reader.read(stretch.start)
        return reader.logits(stretch)

    return logits


CUT: Mapping[str, Callable[[Reading, Input, int], LogitsOf]] = {name: partial(cut_by, name) for name in SELECTORS}
CACHES = {**CUT, "streaming_llm": streaming_llm, "heavy_hitter": heavy_hitter}


def cases_of(plan: EvalPlan, settings: Settings) -> list[Case]:
    """The full cache, then each cache of the plan at each budget, and the draft tier's own cache.

    Raises:
        InvalidValueError: a name is that of no cache, or the draft tier has no model.
    """
    known, has_drafter = (FULL, TRIFORCE, DRAFT, *CACHES), drafter_weights(settings) is not None
    for name in plan.caches:
        require(name in known, "caches", name, f"must be one of {', '.join(known)}")
    require(has_drafter or DRAFT not in plan.caches, "caches", DRAFT, "needs a draft.model with weights")
    named = plan.caches or (known if has_drafter else (*CACHES, TRIFORCE))
    sparse = [Case(name, budget) for name in named if name in CACHES for budget in plan.budgets]
    return [Case(FULL), *sparse, *([Case(DRAFT)] if DRAFT in named else [])]
