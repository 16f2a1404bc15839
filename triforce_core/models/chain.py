"""Drafting one token after another without the host between them: on the device, what a step draws is the input of the
next. The host lays out all steps at first and reads all tokens at last. docs/decisions/0015-graphs.md
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, log
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from triforce_core.kv.base import Forward, KVCache
from triforce_core.messages import SamplingParams, Span
from triforce_core.sampling.draw import with_noise
from triforce_core.sampling.noise import row_keys
from triforce_core.transfer import staged

if TYPE_CHECKING:
    from triforce_core.models.graphs import ShapedPass

PENDING = 0  # in the cache's text, in place of a token that the device has drawn and the host has not read yet
RANKS = 8  # tokens that are told for each position: which would be drawn first, second, …
# Logits [n, vocab] float32, keys [n, 2] int64, limits [n, 4] float32 -> of the tokens that would be drawn first,
# second, …, the perturbed logits [n, RANKS] float64, descending, and their ids int64.
Best = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def best(logits: Tensor, keys: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    """See `Best`. `limits` are those of `limits_of`.

    Draws as `perturbed_logits` does, but applies top-k and top-p only to the tokens that it finds, without sorting the
    vocabulary, and then to the most probable one, which is never excluded. The excluded come last, at -inf. Where both
    are asked for, top-p is of the whole distribution: drafts need not be exact.
    """
    temperature, top_k, top_p, least = limits.split(1, dim=1)
    noisy, ranks = temperature > 0, min(RANKS, logits.shape[1])
    warped = logits / torch.where(noisy, temperature, 1.0)
    most, likeliest = warped.max(-1, keepdim=True)
    perturbed = torch.where(noisy, with_noise(warped, keys), warped.double())
    perturbed = torch.where(warped >= most + torch.where(noisy, least, -inf), perturbed, -inf)
    values, tokens = perturbed.topk(ranks)
    found = warped.gather(1, tokens)
    higher = warped[:, None] > found[:, :, None]
    before = (warped.softmax(-1)[:, None] * higher).sum(-1)
    values = torch.where((higher.sum(-1) < top_k) & (before < top_p) | ~noisy, values, -inf)
    last = torch.where((tokens == likeliest).any(-1, keepdim=True), -inf, perturbed.gather(1, likeliest))
    values, order = torch.cat([values, last], dim=1).sort(dim=-1, descending=True, stable=True)
    return values[:, :ranks], torch.cat([tokens, likeliest], dim=1).gather(1, order[:, :ranks])


def best_greedy(logits: Tensor, keys: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    """See `Best`; where all temperatures are 0."""
    values, tokens = logits.topk(min(RANKS, logits.shape[1]))
    return values.double(), tokens


def limits_of(sampling: SamplingParams) -> list[float]:
    """Temperature, top-k, top-p and the logarithm of min-p, as numbers that exclude nothing where nothing is asked."""
    top_p = max(sampling.top_p, 1e-30) if sampling.top_p < 1 else inf  # as in `truncate_by_rank`
    return [sampling.temperature, sampling.top_k or inf, top_p, log(sampling.min_p) if sampling.min_p else -inf]


class Chain:
    """The chain of one number of sequences, on top of the pass over one token of each."""

    def __init__(self, step: ShapedPass, vocab_size: int, most: int) -> None:
        """`most`: tokens of a sequence that are drawn together, at least 2."""
        self.step, self.most = step, most
        self.best: dict[bool, Best] = {True: best, False: best_greedy}  # by whether any row has noise
        self.graphs: dict[bool, torch.cuda.CUDAGraph] = {}  # of `draw`, if captured
        inputs, self.sequences = step.batch.inputs, step.batch.shape.sequences
        device, self.size = inputs.device, inputs.numel()
        self.at = torch.zeros(1, dtype=torch.int64, device=device)  # how many tokens of each have been drawn
        self.inputs = inputs.repeat(most + 1, 1)  # of each step's pass; now of one over nothing but padding
        self.keys = torch.zeros(most, self.sequences, 2, dtype=torch.int64, device=device)
        self.limits = torch.ones(self.sequences, 4, dtype=torch.float32, device=device)
        self.logits = torch.zeros(self.sequences, vocab_size, dtype=torch.float32, device=device)
        ranks = min(RANKS, vocab_size)
        self.found = torch.zeros(most, 2, self.sequences, ranks, dtype=torch.float64, device=device)

    @torch.inference_mode()
    def first_draw(self, *, noisy: bool) -> None:
        """`draw` as the first of a block, so that it may be tried as often as anyone likes."""
        self.at.zero_()
        self.draw(noisy=noisy)

    @torch.inference_mode()
    def draw(self, *, noisy: bool) -> None:
        """Draw from `logits`, and make what was drawn the input of the next pass."""
        keys = self.keys.index_select(0, self.at)[0]
        values, tokens = self.best[noisy](self.logits, keys, self.limits)
        self.found.index_copy_(0, self.at, torch.stack([values, tokens.double()])[None])
        self.at += 1
        inputs = self.step.batch.inputs
        inputs.copy_(self.inputs.index_select(0, self.at)[0])
        inputs[: self.sequences] = tokens[:, 0]

    @torch.inference_mode()
    def run(self, kv: KVCache, logits: Tensor, wanted: dict[int, int]) -> list[list[list[list[float]]]]:
        """Draw from `logits` [n, vocab], and on from what is drawn. `wanted`: the n sequences' ids, in the order of the
        rows, and how many tokens to draw of each, no row more than the one before; of all but the last the KV is
        written, and the text in `kv` ends with them.

        Returns for each step the perturbed logits and the tokens, each by sequence as in `Best`. The host waits once.
        """
        held = [kv.held[sequence_id] for sequence_id in wanted]
        steps, ends = max(wanted.values()), [len(each.tokens) for each in held]
        keys = [(0, 0)] * (steps * self.sequences)
        for row, (each, end) in enumerate(zip(held, ends, strict=True)):
            keys[row :: self.sequences] = [row_keys(each.spec.seed, end + step) for step in range(steps)]
        inputs = [[0] * self.size]
        for step in range(1, steps):
            going = [sequence_id for sequence_id, most in wanted.items() if step < most]
            batch = kv.prepare([Forward(Span(i, len(kv.held[i].tokens), (PENDING,)), 1) for i in going])
            assert [row.placed.count for row in batch.rows] == [1] * len(going), "each step is over one token of each"
            inputs.append(self.step.batch.numbers(batch))
        device = self.logits.device
        self.at.zero_()
        self.inputs[:steps].copy_(staged(inputs, torch.int32, device), non_blocking=True)
        self.keys[:steps].flatten(0, 1).copy_(staged(keys, torch.int64, device), non_blocking=True)
        limits = [limits_of(each.spec.sampling) for each in held]
        self.limits[: len(held)].copy_(staged(limits, torch.float32, device), non_blocking=True)
        self.logits[: len(held)] = logits
        noisy = any(each.spec.sampling.temperature for each in held)
        draw = self.graphs[noisy].replay if self.graphs else partial(self.draw, noisy=noisy)
        draw()
        for _ in range(1, steps):
            self.logits.copy_(self.step.run())
            draw()
        found: list[list[list[list[float]]]] = self.found[:steps].tolist()
        for row, (each, end, most) in enumerate(zip(held, ends, wanted.values(), strict=True)):
            each.tokens[end:] = [int(tokens[row][0]) for _, tokens in found[: most - 1]]
        return found
