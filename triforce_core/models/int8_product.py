"""The product with 8-bit weights on CUDA, as a Triton kernel: a pass over few tokens takes as long as reading the
weights does, and these have half the bytes of bfloat16.
"""

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from triforce_core.errors import reason_of

log = logging.getLogger(__name__)

# Of a tile: outputs and inputs of the layer, and the least and most tokens. With these, four tiles on their way from
# memory take 72 KiB of a multiprocessor's shared memory, of which an RTX 4090 has 99.
OUTPUTS, DEPTH, LEAST_ROWS, MOST_ROWS = 32, 256, 16, 32
WARPS, STAGES = 4, 4
MOST_TILES = 4  # each reads all weights, and rounding them to the model's dtype for an ordinary product costs as much
FLOATS = (torch.bfloat16, torch.float16)


# An operator of PyTorch, so that tensors without data, as in tests and compilers, pass through it too.
@torch.library.custom_op("triforce::int8_product", mutates_args=())
def int8_product(hidden: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """hidden [tokens, inputs] in one of `FLOATS`, weight [outputs, inputs] int8, scale [outputs] in the same dtype.

    Returns hidden @ (weight * scale).T, [tokens, outputs]; sums are in float32.
    """
    if len(hidden) > MOST_TILES * MOST_ROWS:
        return widened_product(hidden, weight, scale)
    import triton

    hidden, result = hidden.contiguous(), empty(hidden, weight, scale)
    tokens, (outputs, inputs) = len(hidden), weight.shape
    tile = min(MOST_ROWS, max(LEAST_ROWS, triton.next_power_of_2(tokens)))
    with torch.cuda.device_of(hidden):  # Triton launches on the current device
        kernel()[triton.cdiv(outputs, OUTPUTS), triton.cdiv(tokens, tile)](
            *(hidden, weight, scale, result, tokens, outputs, inputs, tile, OUTPUTS, DEPTH),
            num_warps=WARPS,
            num_stages=STAGES,
        )
    return result


def widened_product(hidden: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The same on any device and in any dtype. Scaled before the sums, which could overflow else in float16."""
    return torch.nn.functional.linear(hidden, weight.to(hidden.dtype) * scale[:, None])


def empty(hidden: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """An empty tensor for the result, which is all that tensors without data need."""
    return hidden.new_empty(len(hidden), len(weight))


int8_product.register_fake(empty)


@cache
def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel runs on this device, where it is tried once. If not, the log says why."""
    if device.type != "cuda":
        return False
    why = "" if dtype in FLOATS else f"our kernel takes bfloat16 and float16, and dtype is {dtype}"
    try:
        for tokens in () if why else (LEAST_ROWS, MOST_ROWS):
            some, scale = (torch.zeros(*size, dtype=dtype, device=device) for size in ((tokens, DEPTH), (OUTPUTS,)))
            int8_product(some, torch.zeros(OUTPUTS, DEPTH, dtype=torch.int8, device=device), scale)
    except Exception as error:  # a compiler or a driver that is broken may raise anything
        why = f"our kernel fails on {device} ({reason_of(error)})"
    if why:
        log.warning("retrieval.quantization: int8 saves memory, and steps get slower: %s", why)
    return not why


@cache
def kernel() -> Any:
    """The kernel, which Triton compiles at its first call. Made only here, because Triton may not be installed."""
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
    def product(  # type: ignore[no-untyped-def]
        hidden,
        weight,
        scale,
        result,
        tokens,
        outputs,
        inputs,
        ROWS: tl.constexpr,
        OUTPUTS: tl.constexpr,
        DEPTH: tl.constexpr,
    ):
        output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        wanted, asking = output < outputs, row < tokens
        # Offsets within large weights may exceed 32 bits.
        weight += output.to(tl.int64)[None, :] * inputs
        total = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for first in range(0, inputs, DEPTH):
            place = first + tl.arange(0, DEPTH)
            there = place < inputs
            some = tl.load(
                hidden + row[:, None] * inputs + place[None, :], mask=asking[:, None] & there[None, :], other=0.0
            )
            weights = tl.load(weight + place[:, None], mask=there[:, None] & wanted[None, :], other=0)
            total = tl.dot(some, weights.to(some.dtype), total)
        total *= tl.load(scale + output, mask=wanted, other=0.0).to(tl.float32)[None, :]
        into = result + row[:, None] * outputs + output[None, :]
        tl.store(into, total.to(result.dtype.element_ty), mask=asking[:, None] & wanted[None, :])

    return product
