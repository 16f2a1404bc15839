"""Fused kernels, by torch.compile, for norms, rotary embeddings, gated activations and the draw of tokens: even in a
CUDA graph each of their operators costs a kernel of two microseconds. The compiled code is transformers' own, compiled
once for all layers and lengths, and once more for a single token. docs/decisions/0015-graphs.md
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from triforce_core.attention import Scoring
from triforce_core.config import Settings
from triforce_core.errors import reason_of
from triforce_core.machine.toolchain import lacking
from triforce_core.models.fallback import LOWER, fall_back, ignored, out_of_memory, shortage
from triforce_core.models.passing import run_pass
from triforce_core.sampling.draw import Noisiest, noisiest

ROTATE = "apply_rotary_pos_emb"  # the function of this name that transformers' attention modules call
GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}  # the parts of a gated feed-forward block

Function = Callable[..., Any]


def fuse(model: PreTrainedModel, settings: Settings) -> bool:
    """Replace parts of the model by fused kernels, in place, where the settings ask for it; returns whether the model
    has them. Compiling takes seconds, once per model. A model that is divided over ranks, or has no suitable parts,
    stays as it is. If the compiler fails or memory runs out, so it does with `compile: auto`; `on` raises
    `InvalidValueError`.
    """
    if not settings.fused:
        return False
    if (ranks := model.tp_size or 1) > 1:
        ignored("compile", settings.compile, f"models on several ranks, here {ranks}, stay as they are")
        return False
    if is_fused(model):
        return True
    try:
        if what := lacking(settings.device_type):
            raise RuntimeError(what)
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


@torch.inference_mode()
def fused_noisiest(settings: Settings, vocab_size: int, device: torch.device) -> Noisiest:
    """`noisiest` as one or two kernels instead of some thirty, compiled now. Failures are handled as in `fuse`."""
    fused: Noisiest = compiled(noisiest)
    try:
        with compiling():
            for rows in (2, 1):
                keys = torch.zeros(rows, 2, dtype=torch.int64, device=device)
                fused(torch.zeros(rows, vocab_size, device=device), keys)
    except Exception as error:  # a compiler that is broken may raise anything
        give_up(settings, error)
        return noisiest
    return fused


def is_fused(model: PreTrainedModel) -> bool:
    return any(map(has_own_forward, model.modules()))


def give_up(settings: Settings, error: Exception) -> None:
    """Do without fused kernels: log the reason with `compile: auto`, raise `InvalidValueError` with `compile: on`."""
    why = f"needs a compiler that works on {settings.device_type} ({reason_of(error)})"
    remedy = "set compile: off"
    if out_of_memory(error):
        why, remedy = shortage(settings, error), f"{LOWER}, or set compile: off"
    fall_back("compile", settings.compile, "no fused kernels", why, remedy)


def has_own_forward(module: nn.Module) -> bool:
    """Whether the module itself has a `forward`, which replaces that of its class."""
    return "forward" in vars(module)


def set_fused_forwards(model: PreTrainedModel) -> None:
    """Give each suitable module a fused `forward`; modules of one class share it."""
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
    """Whether it is attention that rotates by a plain function; the package `kernels` has a module in its place."""
    forward: Function = type(module).forward
    if not isinstance(forward, FunctionType) or ROTATE not in forward.__code__.co_names:
        return False
    return isinstance(forward.__globals__.get(ROTATE), FunctionType)


def is_norm(module: nn.Module) -> bool:
    """Whether the module has only plain one-dimensional weights, and no child modules."""
    weights = [*module.parameters()]
    return (
        len(weights) > 0
        and are_plain(weights)
        and all(weight.dim() == 1 for weight in weights)
        and not [*module.children()]
    )


def is_gated(module: nn.Module) -> bool:
    """Whether it is a gated feed-forward block with plain weights, of which all but the products is fused."""
    return dict(module.named_children()).keys() == GATED and are_plain([*module.parameters()])


def are_plain(weights: list[nn.Parameter]) -> bool:
    """Whether no weight is quantised or divided over ranks: those have tensor types other than `Parameter`."""
    return all(type(weight) is nn.Parameter for weight in weights)


def rotating(forward: Function) -> Function:
    """The attention module's `forward` in which only the rotation of queries and keys is compiled."""
    assert isinstance(forward, FunctionType)
    return copied(forward, **{ROTATE: compiled(forward.__globals__[ROTATE])})


def compiled(function: Function) -> Function:
    """The function compiled for tensors of any sizes; a copy, because torch compiles one at most eight times."""
    return torch.compile(copied(function), dynamic=True)


def copied(function: Function, **names: Any) -> FunctionType:
    """A copy of the function, in which the globals called `names` have the given values."""
    assert isinstance(function, FunctionType)
    where = function.__globals__ | names if names else function.__globals__
    copy = FunctionType(
        function.__code__.replace(), where, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@contextmanager
def compiling() -> Iterator[None]:
    """The torch settings for first calls of compiled functions. Sizes that happen to be equal are not assumed to be
    always equal: that assumption would cause another compilation as soon as they differ. Numbers such as a scale are
    constants.
    """
    from torch._dynamo import config as tracing  # imported only where it is used: it takes seconds
    from torch.fx.experimental import _config as sizes

    with sizes.patch(use_duck_shape=False), tracing.patch(specialize_float=True):  # type: ignore[attr-defined]
        yield


class NoContext:
    """A stand-in for a batch and its cache where only shapes matter."""

    def __init__(self) -> None:
        self.cache = self

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, batch: Any) -> Tensor:
        return query.transpose(0, 1)


@torch.inference_mode()
def compile_kernels(model: PreTrainedModel) -> None:
    """Compile the kernels now: a pass over two tokens compiles them for any number above one, a second pass for one."""
    with compiling():
        for count in (2, 1):
            tokens = torch.zeros(1, count, dtype=torch.long, device=model.device)
            run_pass(model, NoContext(), input_ids=tokens, position_ids=tokens)
