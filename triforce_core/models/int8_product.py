"""The product with 8-bit weights on CUDA, as a Triton kernel: a pass over few tokens takes as long as reading the
weights does, and these have half the bytes of bfloat16.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

OUTPUTS, DEPTH, WARPS, STAGES = 32, 256, 4, 4  # of a tile: outputs and inputs of the layer; of a program
LEAST_ROWS, MOST_ROWS = 16, 64  # tokens of a tile, and of all that the kernel is for: each tile reads all weights
FLOATS = (torch.bfloat16, torch.float16)


# An operator of PyTorch, so that tensors without data, as in tests and compilers, pass through it too.
@torch.library.custom_op("triforce::int8_product", mutates_args=())
def int8_product(hidden: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """hidden [tokens, inputs] in one of `FLOATS`, weight [outputs, inputs] int8, scale [outputs] in the same dtype.

    Returns hidden @ (weight * scale).T, [tokens, outputs]; sums are in float32.
    """
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


def empty(hidden: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """An empty tensor for the result, which is all that tensors without data need."""
    return hidden.new_empty(len(hidden), len(weight))


int8_product.register_fake(empty)


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
