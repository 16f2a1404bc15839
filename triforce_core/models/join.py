"""Linear layers with the same input as one matrix product: query, key and value, and the two halves of a gated block.

A pass over few tokens then launches 96 kernels less over 32 layers, and each product is large enough to read weights
at the device's bandwidth. Done on CUDA only: on a CPU a launch costs nothing, and the rounding would differ.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from triforce_core.models.fallback import LOWER, say
from triforce_core.models.fuse import are_plain
from triforce_core.models.quantize import Int8Linear

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # as transformers names them
KINDS = (nn.Linear, Int8Linear)  # of layers, no others that are made from them


class Joined(nn.Module):
    """The product of several linear layers, each of which asks for its own part of it."""

    def __init__(self, layers: Sequence[nn.Linear | Int8Linear]) -> None:
        super().__init__()
        self.sizes = [layer.out_features for layer in layers]
        self.whole = as_one(layers)
        # The input of the latest product, and the parts of its output that were not asked for yet. One attribute, so
        # that threads which share the model never see one of them without the other.
        self.latest: tuple[Tensor, dict[int, Tensor]] | None = None

    def part(self, index: int, hidden: Tensor) -> Tensor:
        """Part `index` of the product with `hidden`, which is computed unless the latest product was with it."""
        latest = self.latest
        if latest is None or latest[0] is not hidden or index not in latest[1]:
            latest = hidden, dict(enumerate(self.whole(hidden).split(self.sizes, dim=-1)))
        part = latest[1].pop(index)
        self.latest = latest if latest[1] else None  # keeps no activations once all parts are taken
        return part


def as_one(layers: Sequence[nn.Linear | Int8Linear]) -> nn.Module:
    """One layer with the outputs of all."""
    weights: list[Tensor] = [layer.weight for layer in layers]
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    scales: list[Tensor] = [layer.scale for layer in layers if isinstance(layer, Int8Linear)]
    weight, bias = torch.cat(weights), torch.cat(biases) if biases else None
    if scales:
        return Int8Linear(weight, torch.cat(scales), bias)
    with torch.device("meta"):
        whole = nn.Linear(weight.shape[1], len(weight), bias=bias is not None)
    whole.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        whole.bias = nn.Parameter(bias, requires_grad=False)
    return whole


class Part(nn.Module):
    """Stands in the model in place of one of the linear layers."""

    def __init__(self, joined: Joined, index: int) -> None:
        super().__init__()
        self.joined, self.index = joined, index

    def forward(self, hidden: Tensor) -> Tensor:
        return self.joined.part(self.index, hidden)


@torch.no_grad()
def join_projections(model: PreTrainedModel) -> None:
    """Join the linear layers of each attention and feed-forward block, in place; not what is divided over ranks or
    joined. One block after another, so that no more than one's weights are held twice; where there is no
    memory for that, the other blocks stay as they are.
    """
    if (model.tp_size or 1) > 1:
        return
    # No list of all modules: it would hold the old layers, and with them their weights.
    blocks = [module for module in model.modules() if any(hasattr(module, names[0]) for names in TOGETHER)]
    for module in blocks:
        for names in TOGETHER:
            layers = [getattr(module, name, None) for name in names]
            if not may_join(layers):
                continue
            try:
                joined = Joined(layers)  # type: ignore[arg-type]
            except torch.OutOfMemoryError:
                say(f"no memory to join the linear layers of {type(module).__name__}: passes are slower; {LOWER}")
                return
            for index, name in enumerate(names):
                setattr(module, name, Part(joined, index))
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # the old weights' pieces are too small for the next joined ones


def may_join(layers: list[object]) -> bool:
    """Whether these are linear layers of one kind and one input size, all with a bias or all without."""
    linear = [each for each in layers if isinstance(each, nn.Linear | Int8Linear) and type(each) in KINDS]
    linear = [each for each in linear if are_plain([*each.parameters()])]
    kinds = {(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in linear}
    return len(linear) == len(layers) and len(kinds) == 1
