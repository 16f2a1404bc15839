"""A GPU that computes no numbers: PyTorch's fake tensors, with what they leave out of CUDA filled in.

Every operator gives a tensor of the right shape, dtype and device, and raises where devices are mixed. `Device` also
counts the memory of the device, now and at most; what makes the host wait for the device; and the bytes that cross the
link between them. It counts separately the bytes from or to memory that is not pinned, because the copying stream
cannot copy these by itself.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from triforce_core.models.load import ATTENTION

aten = torch.ops.aten


class Event:
    """A point of a stream; it has always passed."""

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def wait(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        Device.now.syncs["event"] += 1

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class Stream:
    def __init__(self, device: object = None) -> None:
        pass

    def record_event(self) -> Event:
        return Event()

    def wait_event(self, event: Event) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass

    def synchronize(self) -> None:
        Device.now.syncs["stream"] += 1


class Graph:
    """What was captured holds its memory until the graph is gone; a replay computes nothing."""

    def replay(self) -> None:
        Device.now.replays += 1


class Device(TorchDispatchMode):
    """Sees every operator before the fake tensors do."""

    now: Device

    def __init__(self, total: int) -> None:
        super().__init__()
        self.total, self.live, self.peak = total, 0, 0
        self.others = 0  # bytes that other processes have taken
        self.syncs: Counter[str] = Counter()  # by what made the host wait
        # Bytes over the link. `pageable` counts, for both directions, the bytes whose host memory is not pinned.
        self.to_host = self.to_device = self.pageable = 0
        self.replays = 0
        self.largest_pinned = 0  # bytes of a piece that torch pins, which it rounds up to a power of two
        self.calls: Counter[str] = Counter()
        self.true_values: Callable[[Tensor], int] = Tensor.numel  # how many values of a mask are true
        self.capturing, self.capture_streams = False, list[Stream]()
        self.launches = 0  # operators on its tensors, but for views
        self.storages: dict[int, Any] = {}
        self.pinned: dict[int, Any] = {}
        Device.now = self

    @property
    def captured_in(self) -> int:
        """The number of streams in which graphs were captured."""
        return len({id(stream) for stream in self.capture_streams})

    # -- memory ----------------------------------------------------------------------------------------------------

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.device.type != "cuda" or storage._cdata in self.storages:
            return
        size, key = storage.nbytes(), storage._cdata

        def gone() -> None:
            self.live -= size
            self.storages.pop(key, None)

        self.storages[key] = weakref.finalize(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)

    def reset_peak(self, _: object = None) -> None:
        self.peak = self.live

    def pin(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self.pinned[key] = weakref.finalize(storage, lambda: self.pinned.pop(key, None))

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.pinned

    @contextmanager
    def most(self) -> Iterator[SimpleNamespace]:
        """Yield an object whose `bytes`, after the body, are the most that the body has allocated beyond what was there
        before.
        """
        before, self.peak = self.live, self.live
        found = SimpleNamespace(bytes=0)
        yield found
        found.bytes = self.peak - before

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """Yield a counter that, after the body, holds the times that the host waited in the body."""
        before = Counter(self.syncs)
        found: Counter[str] = Counter()
        yield found
        found.update(self.syncs - before)

    # -- operators ---------------------------------------------------------------------------------------------------

    def sync(self, what: str) -> None:
        assert not self.capturing, f"{what} makes the host wait, which a graph cannot hold"
        self.syncs[what] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.calls[str(func)] += 1
        given = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        on_gpu = any(tensor.device.type == "cuda" for tensor in given)
        self.launches += on_gpu and not func.is_view and func.overloadpacket not in (aten.detach, torch.ops.prim.device)
        assert kwargs.get("block_table") is None, "with split keys it gives wrong rows from PyTorch 2.12 on (#194167)"
        if func in (aten.uniform_.default, aten.normal_.default):
            return args[0]
        if on_gpu and (read := self.reading(func, args, kwargs)) is not None:
            return read
        result = func(*args, **kwargs)
        if func.overloadpacket in (aten.copy_, aten._to_copy, aten.to):  # `to` comes as a whole in inference mode
            source = args[1] if func is aten.copy_.default else args[0]
            positional = {aten.copy_.default: 2, aten.to.device: 3}.get(func, len(args))
            quick = kwargs.get("non_blocking", False) or args[positional : positional + 1] == (True,)
            self.crossing(source, result, waits=not quick)
        if func is aten._pin_memory.default or kwargs.get("pin_memory"):
            self.pin(result)
            self.largest_pinned = max(self.largest_pinned, result.nbytes)
        return self.made(result)

    def made(self, result: Any) -> Any:
        for each in tree_iter(result):
            if isinstance(each, Tensor):
                self.note(each)
        return result

    def reading(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator for which the host must know values; None for others."""
        if func is aten._local_scalar_dense.default:
            self.sync("item")
            return 0
        if func is aten.nonzero.default:
            self.sync("nonzero")
            return self.made(torch.empty(self.true_values(args[0]), args[0].dim(), dtype=torch.int64, device="cuda"))
        if func is aten.bincount.default:
            self.sync("bincount")
            found = self.made(torch.empty(args[2] if len(args) > 2 else kwargs["minlength"], device="cuda"))
            found.values = [args[0].numel() // len(found)] * len(found)
            return found
        indices = args[1] if func in (aten.index.Tensor, aten.index_put_.default) else ()
        mask = next((each for each in indices if each is not None and each.dtype is torch.bool), None)
        if mask is None:
            return None
        self.sync("index by a mask")
        if func is aten.index_put_.default:
            return args[0]
        return self.made(args[0].new_empty(self.true_values(mask), *args[0].shape[mask.dim() :]))

    def crossing(self, source: Tensor, into: Tensor, *, waits: bool) -> None:
        """Count a copy if it goes between host and device."""
        if source.device.type == into.device.type:
            return
        back = into.device.type == "cpu"
        pinned = self.is_pinned(into if back else source)
        if back:
            self.to_host += source.nbytes
        else:
            self.to_device += source.nbytes
        if not pinned:
            self.pageable += source.nbytes
        if waits or not pinned:
            self.sync("copy to the host" if back else "copy from the host")


def listed(tensor: Any) -> Any:
    """Replace `tolist`: return zeros, or the values that an operator has left with the tensor."""
    if tensor.device.type == "cuda":
        Device.now.sync("tolist")
    values = getattr(tensor, "values", None)
    if isinstance(values, list):
        return values

    def zeros(shape: tuple[int, ...]) -> Any:
        return [zeros(shape[1:]) for _ in range(shape[0])] if shape else (0.0 if tensor.is_floating_point() else 0)

    return zeros(tuple(tensor.shape))


def nonzero(tensor: Tensor, *, as_tuple: bool = False) -> Any:
    found = aten.nonzero.default(tensor)
    return found.unbind(1) if as_tuple else found


ASKING = {
    Tensor.copy_: aten.copy_.default,
    Tensor.__invert__: aten.bitwise_not.default,
    Tensor.nonzero: nonzero,
    torch.nonzero: nonzero,
}


class Indexing(TorchFunctionMode):
    """Calls the operators behind `x[…]` and a few others that ask a device for its guard, which PyTorch for CPUs lacks
    for CUDA.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            return indexed(*args)
        if func is Tensor.__setitem__:
            return put(*args)
        if func in ASKING:
            return ASKING[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def viewed(tensor: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Divide an index. Its slices, numbers and None give the returned view. Its tensors are returned as `aten.index`
    takes them: a list with None for each dimension of the view that no tensor indexes.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    taken = sum(each.dim() if isinstance(each, Tensor) and each.dtype is torch.bool else 1 for each in parts)
    for place, part in enumerate(parts):
        if part is Ellipsis:
            absent = parts.count(None) if None in [each for each in parts if not isinstance(each, Tensor)] else 0
            parts[place : place + 1] = [slice(None)] * (tensor.dim() - taken + 1 + absent)
            break
    dim, tensors = 0, []
    for part in parts:
        if part is None:
            tensor, dim = tensor.unsqueeze(dim), dim + 1
            tensors.append(None)
        elif isinstance(part, slice):
            size = tensor.shape[dim]
            start, stop, step = part.indices(size)
            if (start, stop, step) != (0, size, 1):
                tensor = aten.slice.Tensor(tensor, dim, start, max(start, stop), step)
            dim += 1
            tensors.append(None)
        elif isinstance(part, int):
            tensor = tensor.select(dim, part)
        else:
            found = part if isinstance(part, Tensor) else real_tensor(part)
            tensors.append(found)
            dim += found.dim() if found.dtype is torch.bool else 1
    return tensor, tensors if any(each is not None for each in tensors) else []


def indexed(tensor: Tensor, index: Any) -> Tensor:
    view, tensors = viewed(tensor, index)
    return aten.index.Tensor(view, tensors) if tensors else view  # type: ignore[no-any-return]


def put(tensor: Tensor, index: Any, value: Any) -> None:
    view, tensors = viewed(tensor, index)
    if tensors:
        given = value if isinstance(value, Tensor) else view.new_empty(())
        aten.index_put_.default(view, tensors, given)
    elif isinstance(value, Tensor):
        aten.copy_.default(view, value)
    else:
        view.fill_(value)


real_tensor = torch.tensor


def tensor(data: Any, *, pin_memory: bool = False, device: Any = None, **given: Any) -> Tensor:
    """Replace `torch.tensor`, which looks for a GPU before the fake tensors can answer. The result is an empty copy,
    because fake tensors know the numbers of the original and would compute with them.
    """
    known = real_tensor(data, **given)
    made = torch.empty(known.shape, dtype=known.dtype)
    if pin_memory:
        Device.now.pin(made)
    return made if device is None else made.to(device, non_blocking=True)


def is_pinned(tensor: Tensor) -> bool:
    return Device.now.is_pinned(tensor)


def fake_model(config: PretrainedConfig, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """A model of this configuration on the device."""
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = nn.Parameter(torch.empty_like(weight, device="cuda"), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cuda")
    return model.eval()  # type: ignore[no-any-return]


@contextmanager
def fake_cuda(total: int = 141 << 30) -> Iterator[Device]:
    """In the body `cuda` is a device of this many bytes and compute capability 9.0."""
    cuda = torch.cuda
    device = Device(total)

    @contextmanager
    def capture(graph: Graph, *, stream: Stream | None = None, **_: Any) -> Iterator[None]:
        device.capture_streams.append(stream or Stream())
        device.capturing = True
        try:
            yield
        finally:
            device.capturing = False

    def context(_: object) -> AbstractContextManager[None]:
        return nullcontext()

    def register(address: int, size: int, flags: int) -> int:
        device.pinned[address] = True
        return 0

    properties = SimpleNamespace(
        multi_processor_count=132, total_memory=total, major=9, minor=0, name="fake", uuid="GPU-fake"
    )
    # Fake tensors come first: they ask whether there is a GPU.
    with FakeTensorMode(), pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "Event": Event,
            "Stream": Stream,
            "CUDAGraph": Graph,
            "graph": capture,
            "graph_pool_handle": lambda: (0, 0),
            "stream": context,
            "device": context,
            "current_stream": Stream,
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_device_capability": lambda _=None: (9, 0),
            "get_device_properties": lambda _=None: properties,
            "get_device_name": lambda _=None: "fake",
            "mem_get_info": lambda _=None: (device.total - device.others - device.live, device.total),
            "memory_allocated": lambda _=None: device.live,
            "memory_reserved": lambda _=None: device.live,
            "max_memory_allocated": lambda _=None: device.peak,
            "max_memory_reserved": lambda _=None: device.peak,
            "reset_peak_memory_stats": device.reset_peak,
            "synchronize": lambda _=None: device.sync("synchronize"),
            "empty_cache": lambda: None,
            "cudart": lambda: SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda *_: 0),
        }.items():
            patch.setattr(cuda, name, value)
        patch.setattr(torch.random, "fork_rng", lambda **_: nullcontext())
        patch.setattr(torch, "tensor", tensor)
        patch.setattr(FakeTensor, "tolist", listed)
        patch.setattr(FakeTensor, "is_pinned", is_pinned)
        patch.setattr(FakeTensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata)
        with device, Indexing():
            yield device
