"""Warping: from a model's logits to the law that a request asked for. Pure, row by row.

The order is that of transformers' `generate`: temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from triforce_core.messages import SamplingParams


def warp(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits [rows, vocab] float32 → the same with temperature applied and excluded tokens at -inf, a new tensor.

    Rows with temperature 0 are left as they are: their token is the argmax whatever the truncation.
    """
    temperatures = [p.temperature or 1.0 for p in params]
    warped = logits / logits.new_tensor(temperatures)[:, None]
    truncated = [i for i, p in enumerate(params) if p.temperature and (p.top_k or p.top_p < 1 or p.min_p)]
    if truncated:
        warped[truncated] = truncate(warped[truncated], [params[i] for i in truncated])
    return warped


def truncate(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Exclude what top-k, top-p and min-p exclude; of equal logits the lower vocabulary ids stay first."""
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    vocab = logits.shape[-1]
    top_k = logits.new_tensor([min(p.top_k, vocab) or vocab for p in params])[:, None]
    # The sum of all probabilities rounds to 1 before the last of them: off must be more than that.
    top_p = logits.new_tensor([p.top_p if p.top_p < 1 else torch.inf for p in params])[:, None]
    min_p = logits.new_tensor([p.min_p for p in params])[:, None]

    ranks = torch.arange(vocab, device=logits.device)
    ranked = ranked.masked_fill(ranks >= top_k, -torch.inf)
    probabilities = ranked.softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    ranked = ranked.masked_fill((mass_before >= top_p) & (ranks > 0), -torch.inf)  # the first token always stays
    ranked = ranked.masked_fill(ranked < ranked[:, :1] + min_p.log(), -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter(-1, order, ranked)
