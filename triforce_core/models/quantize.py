"""Weight-only quantisation of the retrieval tier's own copy of the target's weights, by torchao.

It costs acceptance at most: the target judges with weights of its own. The linear layers of the transformer blocks are
quantised; embeddings, norms and the output head stay as they are.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from triforce_core.errors import InvalidValueError
from triforce_core.models.files import check_quantization

Quantization = Literal["int8", "int4", "fp8"]


def quantize_weights(model: PreTrainedModel, kind: Quantization) -> None:
    """Replace the weights of the blocks' linear layers by quantised ones, in place; activations stay in the model's
    dtype. int8 and fp8 (e4m3) have a scale a row; int4 has a scale and a zero point for 128 values of a row.

    Raises `InvalidValueError` where the package or the machine cannot do it.
    """
    check_quantization(kind)
    from torchao import quantize_

    head = model.get_output_embeddings()

    def in_a_block(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and module is not head

    if kind == "fp8":
        for name, module in model.named_modules():
            if in_a_block(module, name):
                give_rows_a_scale(module.weight)
    try:
        quantize_(model, configuration(kind), in_a_block)
    except (ImportError, RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InvalidValueError(
            "retrieval.quantization", kind, f"fails with {model.dtype} on {model.device} ({reason})"
        ) from None


@torch.no_grad()
def give_rows_a_scale(weight: nn.Parameter) -> None:
    """For fp8 torchao divides a row by its largest value: rows of zeros, as trained models have some, would become NaN.
    A millionth in one place changes nothing that a float8 could show.
    """
    weight[weight.abs().amax(-1) == 0, 0] = 1e-6


def configuration(kind: Quantization) -> Any:
    """torchao's name for it. What it would set for the whole process stays as it is: its older versions let float32
    products, the target's too, be rounded.
    """
    from torchao.quantization import Float8WeightOnlyConfig, Int4WeightOnlyConfig, Int8WeightOnlyConfig

    if kind == "int8":
        return Int8WeightOnlyConfig(set_inductor_config=False)
    if kind == "fp8":
        return Float8WeightOnlyConfig(set_inductor_config=False)
    # The one packing whose kernel comes with torch itself, on CUDA and for bfloat16.
    return Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d", set_inductor_config=False)


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of all weights as they are held; one that is used twice counts once."""
    return sum(tensor_bytes(weight) for weight in model.parameters())


def tensor_bytes(tensor: Tensor) -> int:
    """Of a quantised tensor, which is made of several, those of its parts."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    return sum(tensor_bytes(getattr(tensor, name)) for name in names)
