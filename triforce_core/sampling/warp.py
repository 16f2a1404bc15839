"""Warping: turns a model's logits into the distribution that a request asked for, each row by itself.

The order is that of transformers' `generate`: temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from triforce_core.messages import SamplingParams
from triforce_core.transfer import on_device


def warp(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits [rows, vocab] float32 → the same with temperature applied and excluded tokens at -inf, a new tensor.

    Rows with temperature 0 stay unchanged, because truncation never changes the argmax.
    """
    temperatures = [p.temperature or 1.0 for p in params]
    warped = logits / on_device(temperatures, logits.dtype, logits.device)[:, None]
    truncated = [i for i, p in enumerate(params) if p.temperature and p.truncates]
    if truncated:
        rows = on_device(truncated, torch.int64, logits.device)
        warped[rows] = truncate(warped[rows], [params[i] for i in truncated])
    return warped


def truncate(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Set tokens that top-k, top-p or min-p exclude to -inf; of equal logits, the lower vocabulary ids rank first."""
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    vocab = logits.shape[-1]
    numbers = [
        [float(min(p.top_k, vocab) or vocab) for p in params],
        # The cumulated probabilities may round to 1 before the last token, so a limit of 1 would exclude tokens.
        [p.top_p if p.top_p < 1 else torch.inf for p in params],
        [p.min_p for p in params],
    ]
    top_k, top_p, min_p = on_device(numbers, logits.dtype, logits.device).unsqueeze(-1)

    ranks = torch.arange(vocab, device=logits.device)
    ranked = ranked.masked_fill(ranks >= top_k, -torch.inf)
    probabilities = ranked.softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    ranked = ranked.masked_fill((mass_before >= top_p) & (ranks > 0), -torch.inf)  # the first token always stays
    ranked = ranked.masked_fill(ranked < ranked[:, :1] + min_p.log(), -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter(-1, order, ranked)
