"""8-bit weights for the self-drafter: of the linear layers in the transformer blocks; embeddings, norms and the output
head stay as they are. At worst it lowers acceptance, because the target verifies with its own weights.
"""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from triforce_core.attention.trial import can_run
from triforce_core.models.int8_product import FLOATS, MOST_ROWS, int8_product


class Int8Linear(nn.Module):
    """A linear layer whose weight is `weight` [outputs, inputs] int8 times `scale` [outputs] in the model's dtype."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight, self.scale = (nn.Parameter(each, requires_grad=False) for each in (weight, scale))
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.by_kernel = scale.is_cuda and scale.dtype in FLOATS and can_run(scale.device)

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, -2)
        if self.by_kernel and len(rows) <= MOST_ROWS:
            product: Tensor = int8_product(rows, self.weight, self.scale)
        else:
            product = nn.functional.linear(rows, self.weight.to(rows.dtype)) * self.scale
        product = product.unflatten(0, hidden.shape[:-1])
        return product if self.bias is None else product + self.bias


def rounded(layer: nn.Linear) -> Int8Linear:
    """The layer with each row of weights rounded to 255 steps between minus and plus its largest weight."""
    weight = layer.weight.detach().float()
    scale = weight.abs().amax(1, keepdim=True) / 127
    steps = (weight / scale.clamp_min(torch.finfo(torch.float32).tiny)).round_()  # rows of zeros stay zeros
    return Int8Linear(steps.to(torch.int8), scale[:, 0].to(layer.weight.dtype), layer.bias)


@torch.no_grad()
def quantize_weights(model: PreTrainedModel) -> None:
    """Replace the linear layers in the transformer blocks by quantised ones, in place, one after another."""
    head = model.get_output_embeddings()
    for module in model.modules():
        for name in [name for name, layer in module.named_children() if type(layer) is nn.Linear and layer is not head]:
            setattr(module, name, rounded(getattr(module, name)))


def quantized_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same weights, of which the linear layers are quantised, and the others are the model's own."""
    shared: dict[int, Any] = {id(each): each for each in chain(model.parameters(), model.buffers())}
    other = copy.deepcopy(model, shared)
    quantize_weights(other)
    return other


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of all weights; a weight that is used twice counts once."""
    return sum(weight.nbytes for weight in model.parameters())
