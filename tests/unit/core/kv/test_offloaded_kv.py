"""The offloaded cache against the one in memory, bit for bit; what it takes of the device; where the truth lies."""

from __future__ import annotations

import gc
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.random_models import Pair, random_pair, random_tokens
from tests.stating import Statement, ask, fragment, full_kv, full_runner, geometry, spec
from triforce_core.attention import KERNELS
from triforce_core.errors import InvalidValueError
from triforce_core.kv.base import KVGeometry
from triforce_core.kv.full import FullKV
from triforce_core.kv.full_held import FullHeld
from triforce_core.kv.offloaded import Offload, OffloadedKV
from triforce_core.kv.selectors import MeanKey, Selector, SnapKV
from triforce_core.kv.snapshot import ChunkSettings, Snapshot
from triforce_core.machine.memory import mapped
from triforce_core.messages import Span
from triforce_core.models.runner import ModelRunner
from triforce_tools.bench.fill import fill

LAYERS, POOL = 5, 400
CHUNKS = ChunkSettings(32, 4, 8)


@pytest.fixture(scope="module", params=[2, 4], ids="kv_heads={}".format)
def pair(request: pytest.FixtureRequest) -> Pair:
    return random_pair(num_hidden_layers=LAYERS, num_key_value_heads=request.param)


@pytest.fixture(params=["host", "disk"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path if request.param == "disk" else None


def offloaded_runner(pair: Pair, offload: Offload, pool_tokens: int = POOL) -> tuple[ModelRunner, OffloadedKV]:
    kv = OffloadedKV(geometry(pair), pool_tokens, KERNELS["cpu_flash"], offload)
    return ModelRunner(pair.ours, kv), kv


def poison_staging(kv: OffloadedKV) -> None:
    for staging in kv.staging:
        staging.pool.fill_(torch.nan)


class Late(TorchDispatchMode):
    """Stands for a GPU's copy stream, as late as it may be. What is copied within `copying` waits until somebody waits
    for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.due: list[tuple[Tensor, Tensor]] = []
        self.done = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        self.due.append(args[:2])
        return args[0]

    def copying(self, after: object) -> Late:
        return self

    def copied(self) -> int:
        return len(self.due)

    def computed(self) -> None:
        """Do nothing: a CPU has computed already."""

    def compute_after(self, mark: int) -> None:
        while self.done < mark:
            into, source = self.due[self.done]
            into.copy_(source)
            self.done += 1

    def wait(self) -> None:
        self.compute_after(len(self.due))


def assert_same_snapshot(found: Snapshot, expected: Snapshot) -> None:
    assert (found.version, found.position, found.record) == (expected.version, expected.position, expected.record)
    assert all(map(torch.equal, found.tensors, expected.tensors))
    assert not any(tensor.isnan().any() for tensor in found.tensors)


def snapshot_of(kv: FullKV, rng: random.Random, sequence_id: int) -> Snapshot:
    """A random snapshot that the text allows: a whole one, or changes."""
    held = kv.held[sequence_id]
    position, base = rng.randint(1, held.cached), rng.choice([0, *held.layouts])
    return kv.cut(sequence_id, position, CHUNKS, MeanKey(), base)


@pytest.mark.parametrize("late", [False, True], ids="late={}".format)
@pytest.mark.parametrize(("resident", "hole"), [(0, 21), (1, None), (3, 21), (4, None)])
def test_any_history_gives_what_memory_gives(
    pair: Pair, directory: Path | None, resident: int, hole: int | None, late: bool
) -> None:
    """Sequences grow, are rolled back, released and opened anew, several a pass, in chunks of any size, with snapshots
    cut in between. Nothing depends on what staging held before, which is poisoned each time, nor on when copies run.
    """
    rng = random.Random(f"{resident} {hole}")
    memory = full_runner(pair, POOL)
    runner, kv = offloaded_runner(pair, Offload(resident, directory))
    if late:
        kv.stream = Late()
    for cache in (memory.kv, kv):
        if hole:
            fragment(cache, hole, 3 * 80)
    texts: dict[int, tuple[int, ...]] = {1: (), 2: (), 3: ()}
    cut = 0
    for _ in range(25):
        statements = []
        for sequence_id in rng.sample(sorted(texts), rng.randint(1, 3)):
            if rng.random() < 0.1:
                texts[sequence_id] = ()
                for each in (memory, runner):
                    each.release([sequence_id])
            kept = rng.choice([len(texts[sequence_id]), rng.randint(0, len(texts[sequence_id]))])
            fresh = random_tokens(rng.choice([1, 5, 40]), seed=rng.randrange(10**6))
            text = (texts[sequence_id][:kept] + fresh)[:80]
            statements.append(Statement(sequence_id, text, rng.choice([0, 1, rng.randint(1, len(text))])))
            texts[sequence_id] = text
        if not late:  # a copy that is due still may read it
            poison_staging(kv)
        expected, found = (ask(each, *statements, max_length=80) for each in (memory, runner))
        assert found.keys() == expected.keys()
        for sequence_id, logits in found.items():
            assert isinstance(logits, Tensor)
            assert torch.equal(logits, expected[sequence_id])
        which, seed = rng.choice([s.sequence_id for s in statements]), rng.randrange(10**6)
        snapshots = [snapshot_of(cache, random.Random(seed), which) for cache in (full_kv(memory), kv)]
        assert_same_snapshot(snapshots[1], snapshots[0])
        cut += snapshots[0].changes is not None
    assert cut > 3, "changes were cut"
    pieces = [len(held.ranges) for held in kv.held.values()]
    assert not hole or max(pieces) > 1, "the pool was meant to be in pieces"


@pytest.mark.parametrize("selector", [MeanKey(), SnapKV()], ids=lambda each: type(each).__name__)
def test_a_cut_waits_for_kv_on_its_way_to_the_host(pair: Pair, selector: Selector) -> None:
    """Where copies are as late as they may be, the last pass has left KV that the host does not hold yet."""
    memory, (runner, kv) = full_runner(pair, POOL), offloaded_runner(pair, Offload(1))
    kv.host.fill_(torch.nan)
    late = Late()
    kv.stream = late
    for each in (memory, runner):
        ask(each, Statement(1, random_tokens(70, seed=3), 1), max_length=80)
    assert late.done < len(late.due), "something was meant to be on its way"
    expected, found = (cache.cut(1, 69, CHUNKS, selector) for cache in (full_kv(memory), kv))
    assert_same_snapshot(found, expected)


def test_the_truth_is_on_the_host(pair: Pair) -> None:
    """If a single number of the sequence is spoiled there, in any layer, the next pass is wrong. A number outside the
    sequence spoils nothing.
    """
    text = random_tokens(50, seed=1)
    for layer in range(1, LAYERS):
        runner, kv = offloaded_runner(pair, Offload(1))
        ask(runner, Statement(1, text[:40]), Statement(2, text[:40]), max_length=100)
        [[start, _]] = kv.held[1].ranges
        kv.host[layer - 1, :, :, start + 60 :] = torch.nan  # not written yet, and the other sequence
        sound = ask(runner, Statement(1, text[:45]), max_length=100)[1]
        assert isinstance(sound, Tensor)
        assert sound.isfinite().all()
        kv.values[layer][-1, start + 44, 3] = torch.nan  # of the pass before
        spoiled = ask(runner, Statement(1, text), max_length=100)[1]
        assert isinstance(spoiled, Tensor)
        assert spoiled.isnan().any()


@pytest.mark.parametrize("where", ["memory", "host", "disk"])
def test_random_kv_lies_where_the_texts_would(pair: Pair, where: str, tmp_path: Path) -> None:
    """Benchmarks use it. The numbers are as spread as promised, in every layer, and no other sequence's slots are
    touched.
    """
    kv = full_kv(full_runner(pair, POOL))
    if where != "memory":
        _, kv = offloaded_runner(pair, Offload(1, tmp_path if where == "disk" else None))
    for pool in (*kv.keys, *kv.values):
        pool.fill_(torch.nan)
    fill(kv, Span(1, 0, random_tokens(120, seed=1), spec(120)), group=2)
    [[start, stop]] = kv.held[1].ranges
    for pool in (*kv.keys, *kv.values):
        assert 0.8 < pool[:, start:stop].std() < 1.2
        assert pool[:, :start].isnan().all()
        assert pool[:, stop:].isnan().all()
    for queries in map(kv.held[1].queries.of, range(LAYERS)):
        assert queries.isfinite().all()
        assert len(queries) == 2 * kv.geometry.num_kv_heads, "a pass that follows carries them on with its own"


class Drawn(TorchDispatchMode):
    """Counts how many random numbers are drawn."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.normal_.default:
            self.count += result.numel()
        return result


def test_few_random_numbers_are_drawn(pair: Pair) -> None:
    """Random numbers are drawn for one head and for the queries. A CPU takes minutes to draw a long context for all
    heads and layers.
    """
    _, kv = offloaded_runner(pair, Offload(1))
    with Drawn() as drawn:
        fill(kv, Span(1, 0, random_tokens(300, seed=1), spec(300)))
    head = 300 * kv.geometry.head_dim
    queries = sum(kv.held[1].queries.of(layer).numel() for layer in range(LAYERS))
    assert 2 * head <= drawn.count <= 2 * head + queries


class Tensors(TorchDispatchMode):
    """Counts the bytes that operators create and copy."""

    def __init__(self, host: Tensor | None = None) -> None:
        super().__init__()
        self.made: list[int] = []  # new storages, in order
        self.known: set[int] = set()
        self.host = None if host is None else host.untyped_storage().data_ptr()
        self.fetched = self.kept = 0  # copied from the host's pools, and to them

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            into, source = (tensor.untyped_storage().data_ptr() for tensor in args[:2])
            self.fetched += args[1].nbytes * (source == self.host)
            self.kept += args[1].nbytes * (into == self.host)
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.made.append(tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("resident", range(LAYERS), ids="resident={}".format)
def test_the_device_holds_the_resident_layers_and_two_more(resident: int, directory: Path | None) -> None:
    shape = KVGeometry(LAYERS, 2, 16, torch.float32, torch.device("cpu"))
    offload = Offload(resident, directory)
    layer_bytes = 2 * 2 * POOL * 16 * 4
    on_device = (resident + min(2, LAYERS - resident)) * layer_bytes
    with Tensors() as tensors:
        kv = OffloadedKV(shape, POOL, KERNELS["cpu_flash"], offload)
    assert kv.host.untyped_storage().nbytes() == (LAYERS - resident) * layer_bytes
    assert sum(tensors.made) == on_device + kv.host.nbytes
    assert offload.kv_bytes(shape, POOL) == (on_device, kv.host.nbytes)


def keep_random(held: FullHeld, length: int, dim: int) -> None:
    held.queries.expect(length - 1, length - 1, length)
    for layer in range(LAYERS):
        held.queries.take(layer, torch.randn(2, 1, dim), 1)


def test_nothing_as_large_as_a_layer_is_made_to_cut() -> None:
    length, dim = 20_000, 6
    shape = KVGeometry(LAYERS, 2, dim, torch.float32, torch.device("cpu"))
    kv = OffloadedKV(shape, length, KERNELS["cpu_flash"], Offload(1))
    held = kv.open(1, spec(length))
    assert isinstance(held, FullHeld)
    for keys, values in zip(kv.keys, kv.values, strict=True):
        keys.normal_()
        values.normal_()
    held.cached = length
    keep_random(held, length, dim)
    with Tensors() as tensors:
        first = kv.cut(1, length - 9, CHUNKS, MeanKey())
        keep_random(held, length, dim)
        second = kv.cut(1, length, CHUNKS, MeanKey(), base=first.version)
    assert second.changes is not None
    assert len(second.changes.keys) > 0, "chunks were meant to be replaced"
    assert max(tensors.made) < kv.keys[0].nbytes / 2


@pytest.mark.parametrize("chunk", [120, 40, 30])
def test_a_prompt_crosses_the_bus_once_where_one_pass_takes_it(pair: Pair, chunk: int) -> None:
    """A pass fetches only what the passes before it have left. docs/decisions/0013-offload.md relies on this."""
    prompt = 120
    runner, kv = offloaded_runner(pair, Offload(2))
    text = random_tokens(prompt, seed=3)
    with Tensors(kv.host) as tensors:
        for stop in range(chunk, prompt + 1, chunk):
            ask(runner, Statement(1, text[:stop], 0))
    token_bytes = kv.geometry.bytes_per_token * (LAYERS - 2) // LAYERS
    assert tensors.kept == prompt * token_bytes
    assert tensors.fetched == sum(range(0, prompt, chunk)) * token_bytes


def mappings(directory: Path) -> list[tuple[int, bool]]:
    """Bytes of each file of a directory that this process has mapped, and whether it has a name still."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if f"{directory}/" in line]
    bounds = [re.match(r"(\w+)-(\w+) ", line) for line in lines]
    return [
        (int(b[2], 16) - int(b[1], 16), not line.endswith("(deleted)"))
        for b, line in zip(bounds, lines, strict=True)
        if b is not None
    ]


def test_the_file_has_no_name_and_goes_with_the_cache(tmp_path: Path) -> None:
    shape = KVGeometry(LAYERS, 2, 16, torch.bfloat16, torch.device("cpu"))
    kv = OffloadedKV(shape, 4096, KERNELS["cpu_flash"], Offload(1, tmp_path))
    assert mappings(tmp_path) == [(4 * 2 * 2 * 4096 * 16 * 2, False)]
    assert list(tmp_path.iterdir()) == [], "a process that is killed leaves nothing behind"
    del kv
    gc.collect()
    assert mappings(tmp_path) == []


def test_a_file_that_the_disk_cannot_take_is_refused_before_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"target\.offload_path: .* can hold 4194304\.00 GiB"):
        mapped(tmp_path, (2**50,), torch.float32)
    with pytest.raises(InvalidValueError, match=r"target\.offload_path: .*No such file or directory"):
        mapped(tmp_path / "nowhere", (8,), torch.float32)
    assert list(tmp_path.iterdir()) == []
