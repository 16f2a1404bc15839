"""Weights of linear layers in oneDNN's own layout, on the CPUs where that is faster: passes over few tokens then take
no longer than reading the weights, where PyTorch's ordinary product may take several times as long.
docs/decisions/0028-small-tiers.md
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from triforce_core.machine.cpu import CPUINFO, cpu_vendor
from triforce_core.models.fuse import are_plain


class Packed(nn.Module):
    """Stands in the model in place of a linear layer."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())
        self.weight, self.bias = nn.Parameter(packed, requires_grad=False), layer.bias

    def forward(self, hidden: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self.weight, self.bias, "none", [], "")
        return product


@torch.no_grad()
def pack_weights(model: PreTrainedModel) -> None:
    """Pack the linear layers, in place, where that is faster; not what is quantised, divided over ranks or packed.
    Packed weights are this process's own memory. An output head that shares its weight with the input embedding gets a
    copy.
    """
    if (model.tp_size or 1) > 1 or not packing_pays(model.dtype):
        return
    for module in model.modules():
        for name in [name for name, layer in module.named_children() if type(layer) is nn.Linear]:
            if are_plain([*getattr(module, name).parameters()]):
                setattr(module, name, Packed(getattr(module, name)))


def packing_pays(dtype: torch.dtype, cpuinfo: Path = CPUINFO) -> bool:
    """Whether this CPU is faster with packed weights of this type: by its kind, not by a measurement, because the two
    products round differently and replicas on equal machines must draw the same tokens.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:  # the ordinary product is oneDNN's too, which rearranges the weight at every call
        return torch.cpu._is_avx512_bf16_supported()
    # The ordinary product is MKL's, which is made for Intel's CPUs.
    return dtype == torch.float32 and cpu_vendor(cpuinfo) == "AuthenticAMD"
