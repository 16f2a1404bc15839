"""The caches under evaluation: how each gives the logits of a stretch, after a text that the target has read once.

A cut cache is a snapshot of the full cache, cut where the stretch begins. The retrieval tier drafts with one; methods
that compress the cache after the prompt decode with one. The other caches read the text by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import Tensor

from triforce_core.attention import kernel_for
from triforce_core.building.draft_model import heavy_hitter_kv, streaming_kv
from triforce_core.building.drafters import drafter_weights
from triforce_core.config import Settings
from triforce_core.errors import require
from triforce_core.kv.base import Forward, KVCache
from triforce_core.kv.full import FullKV
from triforce_core.kv.heavy_hitter import HeavyHitterKV, HeavyHitterSettings
from triforce_core.kv.retrieval import RetrievalKV
from triforce_core.kv.selectors import SELECTORS, Selector
from triforce_core.kv.snapshot import ChunkSettings, Snapshot
from triforce_core.kv.streaming import StreamingKV, WindowSettings
from triforce_core.machine.threads import Threads
from triforce_core.messages import SamplingParams, SequenceSpec, Span, Tier
from triforce_core.models.runner import ModelRunner
from triforce_tools.evaluation.plan import EvalPlan
from triforce_tools.evaluation.texts import Input, Stretch

FULL, DRAFT, TRIFORCE = "full", "draft", "triforce"
SEQUENCE = 0  # the only sequence of each cache here
PREFILL_CHUNK = 2048  # tokens
SINKS = 4  # tokens
# Tokens by which `streaming_llm` and `heavy_hitter` grow beyond their budget before they evict: by default, the
# retrieval tier's cache grows by as many between two snapshots.
EVICT_EVERY = 64

LogitsOf = Callable[[Stretch], Tensor]  # the logits of a stretch, [tokens, vocab] float32
OpenCache = Callable[["Reading", Input, int], LogitsOf]  # over a text, with a budget in tokens


class Reader:
    """Reads one text into one cache."""

    queries = 0  # how many of the last tokens are read in one pass, so that their queries are kept

    def __init__(self, runner: ModelRunner, kv: KVCache, tokens: tuple[int, ...]) -> None:
        """`runner`: whose model reads, with all of its threads."""
        threads = runner.threads and Threads(runner.threads.most, chosen=False)
        self.runner, self.tokens = ModelRunner(runner.model, kv, threads), tokens
        self.spec = SequenceSpec(SamplingParams(), seed=0, prompt_length=len(tokens), max_length=len(tokens))
        self.at = 0  # tokens read

    def read(self, stop: int) -> None:
        """Read the text up to `stop`, so that the cache holds it."""
        if self.at == stop:
            return
        for end in range(self.at + PREFILL_CHUNK, stop - self.queries, PREFILL_CHUNK):
            self.forward(end, 0)
        self.forward(stop, min(stop, self.queries))

    def logits(self, stretch: Stretch) -> Tensor:
        """The logits of the stretch in one pass, [tokens, vocab] float32."""
        return self.forward(stretch.stop, stretch.stop - stretch.start)

    def forward(self, stop: int, num_sampled: int) -> Tensor:
        """Hold what the cache keeps of the text below `stop`; the logits of the last `num_sampled` tokens."""
        span = Span(SEQUENCE, 0, self.tokens[:stop], self.spec)
        logits, batch = self.runner.forward([Forward(span, num_sampled)])
        assert not batch.lacking, "caches here are sized for their text"
        self.at = stop
        return logits


class Reading(Reader):
    """A text and the target's full cache of it, of which snapshots with any selector and budget are cut."""

    queries = 32  # more than any selector needs (`snapkv` 8), except `h2o`, which needs those of all tokens

    def __init__(
        self, runners: Mapping[Tier, ModelRunner], settings: Settings, tokens: tuple[int, ...], selectors: Sequence[str]
    ) -> None:
        """`runners`: of the target, and of those tiers that have a model. `selectors`: those that will choose; the full
        cache keeps what the neediest of them needs.
        """
        self.runners, self.settings, self.target = runners, settings, runners[Tier.TARGET]
        self.geometry = self.target.kv.geometry
        self.kernel = kernel_for(settings, self.geometry.head_dim)
        self.full = FullKV(self.geometry, len(tokens), self.kernel)
        super().__init__(self.target, self.full, tokens)
        needs = {name: SELECTORS[name]().num_queries or math.inf for name in selectors}
        self.spec = replace(self.spec, selector=max(needs, key=lambda name: needs[name], default="streaming"))

    def cut(self, stretch: Stretch, budget: int, selector: Selector) -> Snapshot:
        """A whole snapshot of the text below the stretch."""
        self.read(stretch.seen)
        chunks = ChunkSettings.halved(budget, self.settings.retrieval.chunk)
        snapshot = self.full.cut(SEQUENCE, stretch.seen, chunks, selector)
        # The last tokens of a snapshot are those just before its position.
        kept = snapshot.num_tokens - (stretch.seen - stretch.start)
        keys, values = snapshot.keys[:, :, :kept], snapshot.values[:, :, :kept]
        return replace(snapshot, position=stretch.start, keys=keys, values=values)


def full(reading: Reading, text: Input, budget: int) -> LogitsOf:
    """The full cache, once more over the KV that is held."""
    return reading.logits


def cut_by(name: str, reading: Reading, text: Input, budget: int) -> LogitsOf:
    """Snapshots by a selector, as the retrieval tier has them."""
    selector, runner = SELECTORS[name](), reading.runners[Tier.RETRIEVAL]

    def logits(stretch: Stretch) -> Tensor:
        chunks = ChunkSettings.halved(budget, reading.settings.retrieval.chunk)
        sparse = RetrievalKV(reading.geometry, 1, chunks, stretch.stop - stretch.start, reading.kernel)
        taken = sparse.take(reading.cut(stretch, budget, selector))
        assert taken, "the snapshot has at most the budget"
        return Reader(runner, sparse, text.tokens).logits(stretch)

    return logits


def streaming_llm(reading: Reading, text: Input, budget: int) -> LogitsOf:
    """Sinks and a window of the last tokens, at the positions of a small cache, as StreamingLLM (Xiao et al. 2023) has
    them. The window is filled anew for a stretch that begins `EVICT_EVERY` tokens or more after the last filling.
    """
    longest = max(stretch.stop - stretch.start for stretch in text.stretches)
    window = WindowSettings(SINKS, budget - SINKS, slack=EVICT_EVERY + longest)
    reader: Reader | None = None
    filled = 0  # where the window was filled last

    def logits(stretch: Stretch) -> Tensor:
        nonlocal reader, filled
        if reader is None or stretch.start >= filled + EVICT_EVERY:
            reader = Reader(reading.target, StreamingKV(reading.geometry, 1, window, reading.kernel), text.tokens)
            filled = stretch.start
            reader.forward(filled, 1)
        return reader.logits(stretch)

    return logits


def heavy_hitter(reading: Reading, text: Input, budget: int) -> LogitsOf:
    """Heavy hitters and the last tokens, half of the budget each, as H2O (Zhang et al. 2023) has them."""
    evicting = HeavyHitterSettings(budget, heavy=budget // 2, slack=EVICT_EVERY)
    heads = reading.target.model.config.num_attention_heads
    return reads_on(reading.target, HeavyHitterKV(reading.geometry, 1, evicting, reading.kernel, heads), text)


def draft(reading: Reading, text: Input, budget: int) -> LogitsOf:
    """The draft tier, whose cache has the size that the settings give it."""
    make = heavy_hitter_kv if reading.settings.draft.cache == "heavy_hitter" else streaming_kv
    runner = reading.runners[Tier.DRAFT]
    return reads_on(runner, make(runner.model, reading.settings), text)


def reads_on(runner: ModelRunner, kv: KVCache, text: Input) -> LogitsOf:
    """A cache that reads the text stretch after stretch, and forgets as it goes."""
    reader = Reader(runner, kv, text.tokens)

    def logits(stretch: Stretch) -> Tensor:
        reader.read(stretch.start)
        return reader.logits(stretch)

    return logits


CUT: Mapping[str, OpenCache] = {name: partial(cut_by, name) for name in SELECTORS}
SPARSE: Mapping[str, OpenCache] = {**CUT, "streaming_llm": streaming_llm, "heavy_hitter": heavy_hitter}
CACHES: Mapping[str, OpenCache] = {FULL: full, **SPARSE, DRAFT: draft}


class Case(NamedTuple):
    """One cache at one budget: a row of the tables."""

    cache: str
    budget: int = 0  # tokens; 0 where the plan's budgets do not apply


def cases_of(plan: EvalPlan, settings: Settings) -> list[Case]:
    """The full cache, then each cache of the plan at each budget, and the draft tier's own cache.

    Raises:
        InvalidValueError: a name is that of no cache, or the draft tier has no model.
    """
    known, has_drafter = (*CACHES, TRIFORCE), drafter_weights(settings) is not None
    for name in plan.caches:
        require(name in known, "caches", name, f"must be one of {', '.join(known)}")
    require(has_drafter or DRAFT not in plan.caches, "caches", DRAFT, "needs a draft.model with weights")
    sparse = [Case(name, budget) for name in plan.caches or SPARSE if name in SPARSE for budget in plan.budgets]
    return [Case(FULL), *sparse, *([Case(DRAFT)] if has_drafter and DRAFT in (plan.caches or known) else [])]
