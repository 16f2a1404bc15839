"""Log probabilities of tokens in the model's own distribution, before any sampling parameter, as OpenAI has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from triforce_core.messages import TokenLogprobs
from triforce_core.transfer import on_device

ROWS_TOGETHER = 64  # bounds the memory of the normalised copy


@torch.inference_mode()
def token_logprobs(logits: Tensor, tokens: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """The logprob of each token under its row of logits [tokens, vocab] float32, with the `num_top` most probable
    tokens.
    """
    found: list[TokenLogprobs] = []
    given = on_device(tokens, torch.int64, logits.device)
    for some, wanted in zip(logits.split(ROWS_TOGETHER), given.split(ROWS_TOGETHER), strict=True):
        normalised = some.log_softmax(-1)
        own = normalised.gather(-1, wanted[:, None])[:, 0].tolist()
        values, ids = (best.tolist() for best in normalised.topk(num_top, dim=-1))
        tops = (tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True))
        found += [TokenLogprobs(logprob, top) for logprob, top in zip(own, tops, strict=True)]
    return tuple(found)
