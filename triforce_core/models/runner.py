"""One model with one KV cache: aligns sequences to what is stated of them and runs packed forward passes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from triforce_core.config import Settings
from triforce_core.kv.base import Batch, Forward, Held, KVGeometry
from triforce_core.models.graphs import ShapedPasses
from triforce_core.transfer import on_device

MANY_TOKENS = 64  # from here on a pass is worth all prefill threads
ALL_THREADS = torch.get_num_threads()  # before any pass has changed it


class Threads(NamedTuple):
    """CPU threads of a pass over few tokens, and of one over many."""

    decode: int
    prefill: int


def threads_for(settings: Settings) -> Threads:
    """What the settings say. By default all threads, of which ranks have equal shares; those of decoding are measured
    later where that can be done (`Settings.chooses_threads`).
    """
    threads = settings.threads or max(1, ALL_THREADS // settings.ranks(("target", "retrieval")))
    return Threads(decode=threads, prefill=threads)


def run_on(threads: int) -> None:
    """Have this thread's operators run on so many CPU threads, whatever ran on it before."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


class Cache(Protocol):
    """A KV cache as its runner sees it."""

    @property
    def geometry(self) -> KVGeometry: ...

    @property
    def held(self) -> Mapping[int, Held]:
        """By sequence id."""
        ...

    def prepare(self, forwards: list[Forward]) -> Batch: ...

    def release(self, sequence_id: int) -> None: ...


class ModelRunner:
    """Several runners may share one model: only the KV cache is a runner's own, and the passes of constant shape."""

    def __init__(
        self, model: PreTrainedModel, kv: Cache, threads: Threads | None = None, shaped: ShapedPasses | None = None
    ) -> None:
        self.model, self.kv, self.shaped = model, kv, shaped
        self.threads = threads if kv.geometry.device.type == "cpu" else None  # None: torch's own setting
        self.passes, self.seconds = 0, 0.0  # forward passes so far, and the wall time they took

    def decode_on(self, threads: int) -> None:
        """Passes over few tokens, from the next on. From any thread."""
        if self.threads is not None:
            self.threads = self.threads._replace(decode=threads)

    @torch.inference_mode()
    def forward(self, forwards: list[Forward]) -> tuple[Tensor, Batch]:
        """Bring every sequence up to its span in one pass.

        Returns the sampled rows' logits, [Σ num_sampled, vocab] float32 in the order of `batch.rows`, and the batch,
        whose `lacking` names the sequences that could not take part.
        """
        started = time.perf_counter()
        batch = self.kv.prepare(forwards)
        if not batch.rows:
            return torch.empty(0, self.model.config.vocab_size), batch
        threads = self.threads
        if threads is not None:
            run_on(threads.prefill if batch.num_tokens >= MANY_TOKENS else threads.decode)
        logits = self.shaped.forward(batch) if self.shaped is not None else None
        if logits is None:
            logits = self._forward(batch)
        if threads is not None:  # what follows, sampling and selecting chunks, is small work again
            run_on(threads.decode)
        self.passes += 1
        self.seconds += time.perf_counter() - started
        return logits, batch

    def _forward(self, batch: Batch) -> Tensor:
        """One pass of the batch's own shape."""
        token_ids = [token for row in batch.rows for token in row.placed.tokens]
        positions = [position for row in batch.rows for position in row.placed.positions]
        sampled = [index for row in batch.rows for index in range(row.stop - row.num_sampled, row.stop)]
        inputs = on_device([*token_ids, *positions, *sampled], torch.int64, self.kv.geometry.device)
        ids, places, wanted = inputs.split([len(token_ids), len(positions), len(sampled)])
        output = self.model(
            input_ids=ids[None], position_ids=places[None], logits_to_keep=wanted, use_cache=False, kv=batch
        )
        logits: Tensor = output.logits[0].float()
        return logits

    def release(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            self.kv.release(sequence_id)
