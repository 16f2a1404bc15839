"""One model with one KV cache: brings sequences up to their stated spans in packed forward passes."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from triforce_core.costs import Part, PassCosts
from triforce_core.kv.base import Batch, Forward, KVCache, Row
from triforce_core.kv.ranges import size_of
from triforce_core.machine.threads import Threads, run_on
from triforce_core.models.graphs import ShapedPasses
from triforce_core.models.passing import run_pass
from triforce_core.sampling.draw import Noisiest, noisiest
from triforce_core.transfer import on_device

if TYPE_CHECKING:
    from triforce_core.models.replay import LeadingKV


Moment = float | torch.cuda.Event


class PassClock:
    """Times the passes of one runner, without waiting for the device.

    On a CPU a pass has ended when its call returns. On a GPU it has only been queued then: events are recorded
    before and after it, and read at some later pass, once they have happened.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.costs = device, PassCosts()
        self.queued: deque[tuple[list[Part], torch.cuda.Event, torch.cuda.Event]] = deque()

    def now(self) -> Moment:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def passed(self, parts: list[Part], began: Moment) -> None:
        """Add a pass over these parts, which began at that moment and ends now, to the costs."""
        ended = self.now()
        if isinstance(began, float) and isinstance(ended, float):
            self.costs.add(parts, ended - began)
        elif isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
            self.queued.append((parts, began, ended))
        while self.queued and self.queued[0][2].query():
            past, first, last = self.queued.popleft()
            self.costs.add(past, first.elapsed_time(last) / 1e3)


class ModelRunner:
    """Runs a model, which others may share, over a KV cache and passes of constant shape of its own."""

    def __init__(
        self,
        model: PreTrainedModel,
        kv: KVCache | LeadingKV,
        threads: Threads | None = None,
        shaped: ShapedPasses | None = None,
        noisiest: Noisiest = noisiest,
        padding: int = 1,
    ) -> None:
        """`padding`: ordinary passes run over a multiple of this number of tokens; what is added has no effect."""
        self.model, self.kv, self.shaped = model, kv, shaped
        self.padding = padding
        self.noisiest = noisiest  # with which tokens are drawn from the logits of a pass
        self.threads = threads if kv.geometry.device.type == "cpu" else None  # None: torch's own setting
        self.clock = PassClock(kv.geometry.device)
        self.read = 1.0  # `Reading.share` of the latest pass: less than 1 where it read keys once for several rows
        self.passes, self.seconds = 0, 0.0  # forward passes so far, and the wall time they took

    @torch.inference_mode()
    def forward(self, forwards: list[Forward]) -> tuple[Tensor, Batch]:
        """Bring every sequence up to its span, in one pass unless its cache takes only so much at once.

        Returns the sampled rows' logits, [Σ num_sampled, vocab] float32 in the order of `batch.rows`, and the batch,
        whose `lacking` names the sequences that could not take part.
        """
        passes = [self._pass(forwards)]
        while rest := passes[-1][1].rest:
            passes.append(self._pass(rest))
        return passes[0] if len(passes) == 1 else as_one(passes)

    def _pass(self, forwards: list[Forward]) -> tuple[Tensor, Batch]:
        """One pass, which returns what `forward` does."""
        started, began = time.perf_counter(), self.clock.now()
        batch = self.kv.prepare(forwards)
        if not batch.rows:
            return torch.empty(0, self.model.config.vocab_size), batch
        threads = self.threads
        if threads is not None:
            run_on(threads.of(batch.num_tokens, sum(size_of(row.placed.visible) for row in batch.rows)))
        logits = self.shaped.forward(batch) if self.shaped is not None else None
        self.read = 1.0  # passes of constant shape do not share reads between rows
        if logits is None:
            self.read = batch.reading.share if batch.reading is not None else 1.0
            logits = self.run(batch)
        if threads is not None:  # sampling and chunk selection follow, which are small work
            run_on(threads.latest)
        parts = [Part(row.placed.count, size_of(row.placed.visible), self.read) for row in batch.rows]
        self.clock.passed(parts, began)
        seconds = time.perf_counter() - started
        if threads is not None:
            threads.took(seconds)
        self.passes, self.seconds = self.passes + 1, self.seconds + seconds
        return logits, batch

    def run(self, batch: Batch) -> Tensor:
        """An ordinary pass over a prepared batch, with tensors of its own shape; returns logits as `forward` does."""
        token_ids = [token for row in batch.rows for token in row.placed.all_tokens]
        positions = [position for row in batch.rows for position in row.placed.all_positions]
        sampled = [index for row in batch.rows for index in range(row.stop - row.num_sampled, row.stop)]
        num_sampled, added = len(sampled), [0] * (-len(token_ids) % self.padding)
        token_ids, positions = token_ids + added, positions + added
        sampled += [0] * (-num_sampled % self.padding)  # the output head's product is padded, too
        inputs = on_device([*token_ids, *positions, *sampled], torch.int64, self.kv.geometry.device)
        ids, places, wanted = inputs.split([len(token_ids), len(positions), len(sampled)])
        output = run_pass(self.model, batch, input_ids=ids[None], position_ids=places[None], logits_to_keep=wanted)
        logits: Tensor = output.logits[0, :num_sampled].float()
        return logits

    def release(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            self.kv.release(sequence_id)


def as_one(passes: list[tuple[Tensor, Batch]]) -> tuple[Tensor, Batch]:
    """The results of consecutive passes as those of one: each sequence's logits in the order of its text.

    The rows are those of the sequences' last passes, with the number of all their sampled tokens.
    """
    parts: dict[int, list[Tensor]] = {}
    rows: dict[int, Row] = {}
    for logits, batch in passes:
        for row, part in zip(batch.rows, logits.split([row.num_sampled for row in batch.rows]), strict=True):
            parts.setdefault(row.sequence_id, []).append(part)
            rows[row.sequence_id] = row
    whole = {sequence_id: torch.cat(own) for sequence_id, own in parts.items()}
    lacking = {sequence_id: lack for _, batch in passes for sequence_id, lack in batch.lacking.items()}
    together = [replace(rows[sequence_id], num_sampled=len(own)) for sequence_id, own in whole.items()]
    return torch.cat([*whole.values()]), Batch(passes[0][1].cache, together, lacking)
