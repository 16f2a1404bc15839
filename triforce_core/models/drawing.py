"""Drawing a model's own tokens at the sampled positions of a pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from triforce_core.kv.base import Row
from triforce_core.models.runner import ModelRunner
from triforce_core.sampling.draw import Draw, draw_tokens


def draw_rows(runner: ModelRunner, logits: Tensor, rows: list[Row]) -> Iterator[tuple[int, list[int]]]:
    """(sequence id, the model's own tokens at its sampled positions) for each row of `rows` that has any.

    `logits` are those of the sampled positions, [Σ num_sampled, vocab].
    """
    sampled = [row for row in rows if row.num_sampled]
    draws = []
    for row in sampled:
        spec, end = runner.kv.held[row.sequence_id].spec, len(runner.kv.held[row.sequence_id].tokens)
        first = end - row.num_sampled + 1
        draws += [Draw(spec.sampling, spec.seed, position) for position in range(first, end + 1)]
    with torch.inference_mode():
        tokens = draw_tokens(logits, draws)
    taken = 0
    for row in sampled:
        yield row.sequence_id, tokens[taken : taken + row.num_sampled]
        taken += row.num_sampled
