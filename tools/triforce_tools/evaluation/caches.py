"""The caches under evaluation: how each gives the logits of a stretch, after a text that the target has read.

A cut cache is a snapshot of the full cache, cut where the stretch begins. The retrieval tier drafts with one; methods
that compress the cache after the prompt decode with one. The other caches are filled without the full one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from triforce_core.errors import require
from triforce_core.kv.heavy_hitter import HeavyHitterKV, HeavyHitterSettings
from triforce_core.kv.retrieval import RetrievalKV
from triforce_core.kv.selectors import SELECTORS, Selector
from triforce_core.kv.streaming import StreamingKV, WindowSettings
from triforce_tools.evaluation.plan import Budget, EvalPlan
from triforce_tools.evaluation.reading import Reader, Reading
from triforce_tools.evaluation.texts import Input, Stretch

FULL, TRIFORCE = "full", "triforce"
SINKS = 4  # tokens
# Tokens by which `streaming_llm` and `heavy_hitter` grow beyond their budget before they evict: by default, the
# retrieval tier's cache grows by as many between two snapshots.
EVICT_EVERY = 64

LogitsOf = Callable[[Stretch], Tensor]  # the logits of a stretch, [tokens, vocab] float32
OpenCache = Callable[[Reading, Input, int], LogitsOf]  # over a text, with a budget in tokens


@dataclass(frozen=True, slots=True)
class Case:
    """One cache at one budget: a row of the tables."""

    cache: str
    budget: Budget | None  # None: it keeps everything

    def open(self, reading: Reading, text: Input) -> LogitsOf:
        """The cache over the text. A budget in percent is a share of the tokens before the first stretch."""
        if self.budget is None:
            return reading.logits  # once more over the KV that is held
        budget = self.budget.tokens(text.stretches[0].start, reading.chunk)
        return CACHES[self.cache](reading, text, budget)


def selector_named(name: str) -> Selector:
    return SELECTORS[name]()


def selectors_of(plan: EvalPlan) -> list[str]:
    """The names of the plan's selectors; all selectors if the plan names no cache."""
    return [name for name in plan.caches or CUT if name in CUT]


def cut_by(name: str) -> OpenCache:
    """Snapshots by a selector, as the retrieval tier has them."""

    def open_cache(reading: Reading, text: Input, budget: int) -> LogitsOf:
        selector, model = selector_named(name), reading.sparse

        def logits(stretch: Stretch) -> Tensor:
            sparse = RetrievalKV(model.geometry, 1, budget, stretch.stop - stretch.start, model.kernel)
            taken = sparse.take(reading.cut(stretch, budget, selector))
            assert taken, "the snapshot has at most the budget"
            return model.over(sparse, text.tokens).logits(stretch)

        return logits

    return open_cache


def streaming_llm(reading: Reading, text: Input, budget: int) -> LogitsOf:
    """Sinks and a window of the last tokens, at the positions of a small cache, as StreamingLLM (Xiao et al. 2023) has
    them. The window is filled anew for a stretch that begins `EVICT_EVERY` tokens or more after the last filling.
    """
    model, longest = reading.target, max(stretch.stop - stretch.start for stretch in text.stretches)
    window = WindowSettings(SINKS, budget - SINKS, slack=EVICT_EVERY + longest)

    def filled(start: int) -> tuple[Reader, int]:
        reader = model.over(StreamingKV(model.geometry, 1, window, model.kernel), text.tokens)
        reader.skip_to(start)
        return reader, start

    latest: list[tuple[Reader, int]] = []

    def logits(stretch: Stretch) -> Tensor:
        if not latest or stretch.start >= latest[0][1] + EVICT_EVERY:
            latest[:] = [filled(stretch.start)]
        return latest[0][0].logits(stretch)

    return logits


def heavy_hitter(reading: Reading, text: Input, budget: int) -> LogitsOf:
    """Heavy hitters and the last tokens, half of the budget each, as H2O (Zhang et al. 2023) has them. The cache reads
    the text by itself, stretch after stretch, and forgets as it goes.
    """
    model = reading.target
    settings = HeavyHitterSettings(budget, heavy=budget // 2, slack=EVICT_EVERY)
    heads = model.model.config.num_attention_heads
    reader = model.over(HeavyHitterKV(model.geometry, 1, settings, model.kernel, heads), text.tokens)

    def logits(stretch: Stretch) -> Tensor:
        reader.read(stretch.start)
        return reader.logits(stretch)

    return logits


CUT: Mapping[str, OpenCache] = {name: cut_by(name) for name in SELECTORS}
EVICTING: Mapping[str, OpenCache] = {"streaming_llm": streaming_llm, "heavy_hitter": heavy_hitter}
CACHES: Mapping[str, OpenCache] = {**CUT, **EVICTING}


def cases_of(plan: EvalPlan) -> list[Case]:
    """The full cache, then each cache of the plan at each budget.

    Raises:
        InvalidValueError: a name is that of no cache.
    """
    known = (FULL, TRIFORCE, *CACHES)
    for name in plan.caches:
        require(name in known, "selectors", name, f"must be one of {', '.join(known)}")
    named = [name for name in plan.caches or CACHES if name in CACHES]
    return [Case(FULL, None), *(Case(name, budget) for name in named for budget in plan.budgets)]
