"""Linear layers with the same input as one matrix product: query, key and value, and the two halves of a gated block.

A pass over few tokens then launches 96 kernels less over 32 layers, and each product is large enough to read weights
at the device's bandwidth. Done on CUDA only: on a CPU a launch costs nothing, and the rounding would differ.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from triforce_core.models.fallback import LOWER, say
from triforce_core.models.fuse import are_plain

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # as transformers names them


class Joined(nn.Module):
    """The product of several linear layers, each of which asks for its own part of it."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [layer.out_features for layer in layers]
        weights: list[Tensor] = [layer.weight for layer in layers]
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        self.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        # The input of the latest product, and the parts of its output that were not asked for yet. One attribute, so
        # that threads which share the model never see one of them without the other.
        self.latest: tuple[Tensor, dict[int, Tensor]] | None = None

    def part(self, index: int, hidden: Tensor) -> Tensor:
        """Part `index` of the product with `hidden`, which is computed unless the latest product was with it."""
        latest = self.latest
        if latest is None or latest[0] is not hidden or index not in latest[1]:
            product = nn.functional.linear(hidden, self.weight, self.bias)
            latest = hidden, dict(enumerate(product.split(self.sizes, dim=-1)))
        part = latest[1].pop(index)
        self.latest = latest if latest[1] else None  # keeps no activations once all parts are taken
        return part


class Part(nn.Module):
    """Stands in the model in place of one of the linear layers."""

    def __init__(self, joined: Joined, index: int) -> None:
        super().__init__()
        self.joined, self.index = joined, index

    def forward(self, hidden: Tensor) -> Tensor:
        return self.joined.part(self.index, hidden)


@torch.no_grad()
def join_projections(model: PreTrainedModel) -> None:
    """Join the linear layers of each attention and feed-forward block, in place; not what is quantised, divided over
    ranks or joined. One block after another, so that no more than one's weights are held twice; where there is no
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
    """Whether these are ordinary linear layers of one input size, all with a bias or all without."""
    linear = [layer for layer in layers if type(layer) is nn.Linear and are_plain([*layer.parameters()])]
    kinds = {(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in linear}
    return len(linear) == len(layers) and len(kinds) == 1
