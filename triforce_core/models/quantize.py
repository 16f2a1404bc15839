"""Weight-only quantisation of the retrieval tier's own copy of the target's weights, by torchao.

At worst it lowers acceptance, because the target verifies with unquantised weights. The linear layers of the
transformer blocks are quantised; embeddings, norms and the output head stay as they are.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from triforce_core.errors import InvalidValueError
from triforce_core.models.fallback import say
from triforce_core.models.files import check_quantization

Quantization = Literal["int8", "int4", "fp8"]
SAMPLE_TOKENS, REPEATS = 4, 20  # of the layer that is timed


def quantize_weights(model: PreTrainedModel, kind: Quantization) -> None:
    """Replace the weights of the linear layers in the transformer blocks by quantised ones, in place: int8 and fp8
    (e4m3) with one scale per row, int4 with a scale and a zero point per 128 values. On a GPU one layer is timed before
    and after; if it is slower, the log says so. Raises `InvalidValueError` if torchao is missing or cannot do it here.
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
    sample = next((module for name, module in model.named_modules() if in_a_block(module, name)), None)
    before = None if sample is None or model.device.type != "cuda" else layer_seconds(sample)
    try:
        quantize_(model, configuration(kind), in_a_block)
        after = None if before is None or sample is None else layer_seconds(sample)
    except (ImportError, RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InvalidValueError(
            "retrieval.quantization", kind, f"fails with {model.dtype} on {model.device} ({reason})"
        ) from None

    if before is not None and after is not None:
        say_if_slower(kind, before, after)


def say_if_slower(kind: Quantization, before: float, after: float) -> None:
    """Warn where quantised weights save memory but are slower: their kernels suit some GPUs and not others."""
    if after > before:
        advice = "" if kind == "int4" else "; int4 may be faster"
        say(
            f"retrieval.quantization: {kind} is slower on this device: {SAMPLE_TOKENS} tokens take {1e6 * after:.0f} µs"
            f" through a layer, and {1e6 * before:.0f} µs unquantised. It saves memory only{advice}"
        )


@torch.inference_mode()
def layer_seconds(layer: nn.Module) -> float:
    """The time of a layer with few tokens, in a CUDA graph as in a step of the retrieval tier, without launches."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    tokens = torch.ones(SAMPLE_TOKENS, weight.shape[1], dtype=torch.bfloat16, device=weight.device).to(weight.dtype)
    with torch.cuda.device(weight.device):
        graph, begin, end = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
        side = torch.cuda.Stream(weight.device)
        side.wait_stream(torch.cuda.current_stream(weight.device))
        with torch.cuda.stream(side):
            layer(tokens)  # libraries prepare themselves
        torch.cuda.current_stream(weight.device).wait_stream(side)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(REPEATS):
                layer(tokens)
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / REPEATS


@torch.no_grad()
def give_rows_a_scale(weight: nn.Parameter) -> None:
    """Set one value of each row of zeros to a millionth, in place. For fp8 torchao divides a row by its largest value,
    so rows of zeros, which trained models do have, would become NaN. A millionth has no noticeable effect.
    """
    weight[weight.abs().amax(-1) == 0, 0] = 1e-6


def configuration(kind: Quantization) -> Any:
    """torchao's configuration; its process-wide settings, which may change float32 products, are left alone."""
    from torchao.quantization import Float8WeightOnlyConfig, Int4WeightOnlyConfig, Int8WeightOnlyConfig

    if kind == "int8":
        return Int8WeightOnlyConfig(set_inductor_config=False)
    if kind == "fp8":
        return Float8WeightOnlyConfig(set_inductor_config=False)
    # The only packing whose kernel is part of torch; it needs CUDA and bfloat16.
    return Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d", set_inductor_config=False)


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of all weights as stored; a weight that is used twice counts once."""
    return sum(tensor_bytes(weight) for weight in model.parameters())


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor; for a quantised tensor, the sum over its parts."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    return sum(tensor_bytes(getattr(tensor, name)) for name in names)
