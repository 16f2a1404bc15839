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

from triforce_core.models.int8_product import has_kernel, int8_product, widened_product

LEAST = 1 / 32  # outputs of a layer that is quantised, relative to its inputs: fewer cost nothing, and may decide much


class Int8Linear(nn.Module):
    """A linear layer whose weight is `weight` [outputs, inputs] int8 times `scale` [outputs] in the model's dtype."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight, self.scale = (nn.Parameter(each, requires_grad=False) for each in (weight, scale))
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.by_kernel = has_kernel(scale.device, scale.dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        multiply = int8_product if self.by_kernel else widened_product
        product: Tensor = multiply(hidden.flatten(0, -2), self.weight, self.scale).unflatten(0, hidden.shape[:-1])
        return product if self.bias is None else product + self.bias


def rounded(layer: nn.Linear) -> Int8Linear:
    """The layer with each row of weights rounded to 255 steps between minus and plus its largest weight."""
    weight = layer.weight.detach().float()
    scale = weight.abs().amax(1, keepdim=True) / 127
    steps = (weight / scale.clamp_min(torch.finfo(torch.float32).tiny)).round_()  # rows of zeros stay zeros
    return Int8Linear(steps.to(torch.int8), scale[:, 0].to(layer.weight.dtype), layer.bias)


@torch.no_grad()
def quantize_weights(model: PreTrainedModel) -> None:
    """Replace the linear layers in the transformer blocks by quantised ones, in place, one after another; not routers
    and gates of few outputs, nor experts that are no linear layers.
    """
    head = model.get_output_embeddings()
    for module in model.modules():
        for name, layer in [*module.named_children()]:
            if type(layer) is nn.Linear and layer is not head and LEAST * layer.in_features <= layer.out_features:
                setattr(module, name, rounded(layer))


def quantized_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same weights, of which the linear layers are quantised, and the others are the model's own."""
    shared: dict[int, Any] = {id(each): each for each in chain(model.parameters(), model.buffers())}
    other = copy.deepcopy(model, shared)
    quantize_weights(other)
    return other


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of all weights; a weight that is used twice counts once."""
    return sum(weight.nbytes for weight in model.parameters())
