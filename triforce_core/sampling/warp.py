"""Warping: turns a model's logits into the distribution that a request asked for, each row by itself.

The order is that of transformers' `generate`: temperature, top-k, top-p, min-p.
"""

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
    if all(temperature == 1.0 for temperature in temperatures):
        warped = logits.clone()
    else:
        warped = logits / on_device(temperatures, logits.dtype, logits.device).unsqueeze(1)
    truncated = [i for i, p in enumerate(params) if p.temperature and p.truncates]
    if not truncated:
        return warped
    if len(truncated) == len(params):
        return truncate(warped, params)
    rows = on_device(truncated, torch.int64, logits.device)
    return warped.index_copy_(0, rows, truncate(warped.index_select(0, rows), [params[i] for i in truncated]))


def truncate(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Set tokens that top-k, top-p or min-p exclude to -inf, in place. A step that no row asks for is skipped."""
    if any(p.top_k or p.top_p < 1 for p in params):
        logits = truncate_by_rank(logits, params)
    if any(p.min_p for p in params):
        least = on_device([p.min_p for p in params], logits.dtype, logits.device).log_().unsqueeze(1)
        logits.masked_fill_(logits < least + logits.amax(-1, keepdim=True), -torch.inf)
    return logits


def truncate_by_rank(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Top-k and top-p, in place; of equal logits, the lower vocabulary ids rank first."""
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    vocab = logits.shape[-1]
    if any(p.top_k for p in params):
        numbers = [min(p.top_k, vocab) or vocab for p in params]
        top_k = on_device(numbers, torch.int64, logits.device).unsqueeze(1)
        ranked.masked_fill_(torch.arange(vocab, device=logits.device) >= top_k, -torch.inf)
    if any(p.top_p < 1 for p in params):
        # The cumulated probabilities may round to 1 before the last token, so a limit of 1 would exclude tokens. The
        # first token has no mass before it, so any limit above 0 keeps it, and 1e-30 does not round to 0. Every later
        # token has far more than 1e-30 before it, so the smallest limit keeps the first alone.
        limits = [max(p.top_p, 1e-30) if p.top_p < 1 else torch.inf for p in params]
        top_p = on_device(limits, logits.dtype, logits.device).unsqueeze(1)
        probabilities = ranked.softmax(-1)
        ranked.masked_fill_(probabilities.cumsum(-1).sub_(probabilities) >= top_p, -torch.inf)
    return logits.scatter_(-1, order, ranked)
