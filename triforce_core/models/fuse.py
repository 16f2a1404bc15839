"""Fused kernels for the element-wise parts of a model, by torch.compile: norms, rotary embeddings, gated activations.

Captured in a graph, such a part still costs a kernel for each operator, some two microseconds of a GPU, however small.
What is compiled is transformers' own code, each function once for all layers and lengths, and once more for one token.
Not run on a GPU yet. docs/decisions/0015-graphs.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from triforce_core.config import Settings
from triforce_core.models.fallback import LOWER, fall_back, ignored, out_of_memory, reason_of, shortage

ROTATE = "apply_rotary_pos_emb"  # what attention modules of transformers call, by this name
GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}  # the parts of a gated feed-forward block

Function = Callable[..., Any]


def fuse(model: PreTrainedModel, settings: Settings) -> bool:
    """Have the model run fused kernels, in place, where the settings want that; whether it does from now on. Compiles
    them, which takes seconds. A model that several runners share may be given again.

    One that is divided over ranks stays as it is, and one without parts for it, which the log says where compile is on.
    So does one with which the compiler of this machine fails, or runs out of memory: with auto the log says so, with on
    this raises `InvalidValueError`.
    """
    if not settings.fused:
        return False
    if (ranks := model.tp_size or 1) > 1:
        ignored("compile", settings.compile, f"models on several ranks, here {ranks}, stay as they are")
        return False
    if is_fused(model):
        return True
    try:
        set_fused_forwards(model)
        if not is_fused(model):
            ignored("compile", settings.compile, f"{type(model).__name__} has no part that could become a kernel")
            return False
        compile_kernels(model)
    except Exception as error:  # a compiler that is missing or broken may raise anything
        for module in filter(has_own_forward, model.modules()):
            del module.forward
        give_up(settings, error)
        return False
    return True


def is_fused(model: PreTrainedModel) -> bool:
    return any(map(has_own_forward, model.modules()))


def give_up(settings: Settings, error: Exception) -> None:
    """On fused kernels: with auto say so, with on raise `InvalidValueError`."""
    why = f"needs a compiler that works on {settings.device_type} ({reason_of(error)})"
    remedy = "set compile: off"
    if out_of_memory(error):
        why, remedy = shortage(settings, error), f"{LOWER}, or set compile: off"
    fall_back("compile", settings.compile, "no fused kernels", why, remedy)


def has_own_forward(module: nn.Module) -> bool:
    """Rather than that of its class."""
    return "forward" in vars(module)


def set_fused_forwards(model: PreTrainedModel) -> None:
    """Modules' own `forward`, as fused kernels. Those of one class share theirs."""
    fused: dict[type[nn.Module], Function] = {}
    for module in model.modules():
        kind = type(module)
        make = rotating if rotates(module) else compiled if is_norm(module) or is_gated(module) else None
        if make is None:
            continue
        if kind not in fused:
            fused[kind] = make(kind.forward)
        module.forward = MethodType(fused[kind], module)


def rotates(module: nn.Module) -> bool:
    """By a function: the package `kernels` puts a module in its place, which is a kernel already."""
    forward: Function = type(module).forward
    if not isinstance(forward, FunctionType) or ROTATE not in forward.__code__.co_names:
        return False
    return isinstance(forward.__globals__.get(ROTATE), FunctionType)


def is_norm(module: nn.Module) -> bool:
    """It has a weight for each channel, and that is all."""
    weights = [*module.parameters()]
    return (
        len(weights) > 0
        and are_plain(weights)
        and all(weight.dim() == 1 for weight in weights)
        and has_no_children(module)
    )


def is_gated(module: nn.Module) -> bool:
    """Its products stay the library's: only what is between them becomes a kernel. Quantised ones stay as they are."""
    return dict(module.named_children()).keys() == GATED and are_plain([*module.parameters()])


def has_no_children(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def are_plain(weights: list[nn.Parameter]) -> bool:
    """Quantised and divided weights are tensors of types of their own."""
    return all(type(weight) is nn.Parameter for weight in weights)


def rotating(forward: Function) -> Function:
    """Attention's `forward` with the rotation of queries and keys compiled, and nothing else."""
    assert isinstance(forward, FunctionType)
    return copied(forward, **{ROTATE: compiled(forward.__globals__[ROTATE])})


def compiled(function: Function) -> Function:
    """For tensors of any sizes. Of a copy, for torch counts how often it compiles a function, and stops at eight."""
    return torch.compile(copied(function), dynamic=True)


def copied(function: Function, **names: Any) -> FunctionType:
    """The same code in an object of its own, with `names` in place of the globals of these names."""
    assert isinstance(function, FunctionType)
    where = function.__globals__ | names if names else function.__globals__
    copy = FunctionType(
        function.__code__.replace(), where, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@contextmanager
def compiling() -> Iterator[None]:
    """For first calls of what is compiled: sizes that happen to be equal are not taken for one size, for which there
    would be another compilation where they are not, and numbers such as a scale are constants.
    """
    from torch._dynamo import config as tracing  # takes seconds, which only those wait for who compile
    from torch.fx.experimental import _config as sizes

    with sizes.patch(use_duck_shape=False), tracing.patch(specialize_float=True):  # type: ignore[attr-defined]
        yield


class NoContext:
    """Stands for a batch and its cache where only shapes matter."""

    def __init__(self) -> None:
        self.cache = self

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float, batch: Any) -> Tensor:
        return query.transpose(0, 1)


@torch.inference_mode()
def compile_kernels(model: PreTrainedModel) -> None:
    """Compile at start: for two tokens, which is for all numbers of them but one, and for one."""
    with compiling():
        for count in (2, 1):
            tokens = torch.zeros(1, count, dtype=torch.long, device=model.device)
            model(input_ids=tokens, position_ids=tokens, use_cache=False, kv=NoContext())
