"""A text that the target reads once. Snapshots with any selector and budget are cut of the one full cache."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor
from transformers import PreTrainedModel

from triforce_core.attention import Kernel
from triforce_core.kv.base import Forward, KVCache
from triforce_core.kv.full import FullKV
from triforce_core.kv.selectors import SELECTORS, Selector
from triforce_core.kv.snapshot import ChunkSettings, Snapshot
from triforce_core.messages import SamplingParams, SequenceSpec, Span, Tier
from triforce_core.models.load import kv_geometry
from triforce_core.models.runner import ModelRunner
from triforce_core.models.threads import Threads
from triforce_tools.evaluation.texts import Stretch

SEQUENCE = 0  # the only sequence of each cache here
PREFILL_CHUNK = 2048  # tokens
WRITTEN = 32  # tokens for which a full cache has room after its text


class Model:
    """A model, and how passes over caches of its KV are run."""

    def __init__(self, model: PreTrainedModel, kernel: Kernel, threads: Threads | None) -> None:
        self.model, self.kernel, self.threads = model, kernel, threads
        self.geometry = kv_geometry(model)

    def over(self, kv: KVCache, tokens: tuple[int, ...]) -> Reader:
        return Reader(ModelRunner(self.model, kv, self.threads), tokens)


class Reader:
    """Reads one text into one cache."""

    queries = 0  # how many of the last tokens are read in one pass, so that their queries are kept

    def __init__(self, runner: ModelRunner, tokens: tuple[int, ...]) -> None:
        self.runner, self.tokens = runner, tokens
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
    """A text and the target's full cache of it."""

    queries = 32  # more than any selector needs (`snapkv` 8), except `h2o`, which needs those of all tokens

    def __init__(
        self, models: Mapping[Tier, Model], tokens: tuple[int, ...], chunk: int, selectors: Sequence[str]
    ) -> None:
        """`models`: of the target, and of those tiers that have their own. `chunk`: tokens that are chosen together.
        `selectors`: those that will choose.
        """
        self.models, self.target, self.chunk = models, models[Tier.TARGET], chunk
        self.full = FullKV(self.target.geometry, len(tokens) + WRITTEN, self.target.kernel)
        super().__init__(self.target.over(self.full, tokens).runner, tokens)
        self.spec = replace(self.spec, max_length=len(tokens) + WRITTEN, selector=neediest(selectors))

    def cut(self, stretch: Stretch, budget: int, selector: Selector) -> Snapshot:
        """A whole snapshot of the text below the stretch."""
        self.read(stretch.seen)
        snapshot = self.full.cut(SEQUENCE, stretch.seen, ChunkSettings.halved(budget, self.chunk), selector)
        # The last tokens of a snapshot are those just before its position.
        kept = snapshot.num_tokens - (stretch.seen - stretch.start)
        keys, values = snapshot.keys[:, :, :kept], snapshot.values[:, :, :kept]
        return replace(snapshot, position=stretch.start, keys=keys, values=values)

    def written(self, start: int, count: int) -> list[int]:
        """What greedy decoding writes with the full cache after the text through position `start`, token by token."""
        tokens = self.tokens
        self.tokens = tokens[: start + 1]
        for _ in range(count):
            self.tokens += (int(self.forward(len(self.tokens), 1).argmax()),)
        written, self.tokens, self.at = list(self.tokens[start + 1 :]), tokens, start
        return written


def neediest(selectors: Sequence[str]) -> str:
    """The selector for which the full cache keeps what all of these need."""
    needs = {name: SELECTORS[name]().num_queries for name in selectors}
    return max(needs, key=lambda name: needs[name] or math.inf, default="streaming")
