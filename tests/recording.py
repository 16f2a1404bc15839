"""What a model's attention sees, recorded: the raw material of dense references."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import eager_attention_forward

from tests.random_models import Pair

Tokens = tuple[int, ...]


class Recorded:
    """Queries, keys and values of every layer of one plain pass, after RoPE, [heads, tokens, head_dim] each."""

    def __init__(self) -> None:
        self.queries: list[Tensor] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []


def recording_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
    record: Recorded = named.pop("record")
    record.queries.append(query[0])
    record.keys.append(key[0])
    record.values.append(value[0])
    count = query.shape[2]
    causal = torch.zeros(1, 1, count, count).masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
    return eager_attention_forward(module, query, key, value, causal, named["scaling"])


AttentionInterface.register("recording", recording_attention)


def recorded(pair: Pair, text: Tokens) -> Recorded:
    record = Recorded()
    ids = torch.tensor([text])
    with torch.inference_mode():
        pair.theirs(input_ids=ids, position_ids=torch.arange(len(text))[None], use_cache=False, record=record)
    return record
