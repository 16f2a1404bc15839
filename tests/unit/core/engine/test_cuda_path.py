"""The CUDA path without a GPU: every pass of every tier at real geometries, on tensors that have no numbers.

What fails here would fail on a GPU: mixed devices, wrong dtypes and shapes, a host that waits within a graph, a room
check that overlooks something. Layers repeat, so few are made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.fake_cuda import Device, fake_cuda, fake_model
from tests.random_models import random_model, with_noise
from triforce_core import attention
from triforce_core.attention import KERNELS
from triforce_core.attention.chunk_sums import triton_chunk_sums
from triforce_core.building import target_kv
from triforce_core.building.inspection import runners_of
from triforce_core.building.trial import LIBRARIES
from triforce_core.config import Settings, load_settings
from triforce_core.engine.controller import Controller
from triforce_core.engine.engine import Engine
from triforce_core.engine.sequence import Request
from triforce_core.kv.base import KVGeometry
from triforce_core.kv.full import FullKV
from triforce_core.kv.offloaded import Offload, OffloadedKV
from triforce_core.kv.pinned import BUFFER_BYTES
from triforce_core.kv.retrieval import RetrievalHeld, RetrievalKV
from triforce_core.kv.selectors import SnapKV
from triforce_core.kv.snapshot import ChunkSettings
from triforce_core.messages import Drafting, SamplingParams, SequenceSpec, Span, Tier
from triforce_core.models.join import join_projections
from triforce_core.models.quantize import quantized_copy
from triforce_core.plans import Plan
from triforce_core.speculation.drafting import ModelProposer
from triforce_tools.bench import device as bench
from triforce_tools.bench.device import DeviceWorkload, synthetic_engine
from triforce_tools.bench.fill import fill
from triforce_tools.bench.geometry import Geometry, geometry_of
from triforce_tools.bench.synthetic import SyntheticAcceptance

CONTEXT, OUTPUT = 124_928, 60  # tokens; whole chunks, so that the last, which is computed, is one
LAYERS = 2
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1.0, top_p=0.95)


def geometry(name: str, layers: int = LAYERS, ranks: int = 1) -> Geometry:
    """The shape of one rank's share of these models; a rank has its heads and its part of the feed-forward width."""
    shape = geometry_of(name)
    target = shape.target
    target.num_hidden_layers, target.head_dim = layers, 128
    target.num_attention_heads //= ranks
    target.num_key_value_heads //= ranks
    target.intermediate_size //= ranks
    return shape


@dataclass
class Run:
    engine: Engine
    settings: Settings
    target: FullKV
    reserved: int  # bytes for passes and snapshots, as measured; without those for libraries, which are not seen here
    counted: int  # the most that passes and snapshots took
    rounds: list[Counter[str]]  # host syncs of each round; not of prompts whose logprobs are asked, by 64 tokens
    most: int  # requests that got tokens in one turn


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(bench, "random_model", lambda config, settings: fake_model(config))
    monkeypatch.setattr(attention, "can_run", lambda device: True)  # as where PyTorch for CUDA has brought Triton along
    with fake_cuda() as made:
        yield made


def run(device: Device, shape: Geometry, *requests: Request, together: bool = False, **given: Any) -> Run:
    """Decode the requests one after another, or together. Most prompts get random KV up to their last chunk."""
    retrieval = {"budget": 4096, "refresh_every": 16, **given.pop("retrieval", {})}
    settings = load_settings(
        **{"device": "cuda", "dtype": "bfloat16", "compile": "off", "max_sequences": 1, "retrieval": retrieval, **given}
    )
    lines = settings.retrieval.budget // settings.retrieval.chunk
    layers, kv_heads = shape.target.num_hidden_layers, shape.target.num_key_value_heads

    def true_values(mask: torch.Tensor) -> int:
        """Of a text's chunks, the chunks of the snapshot are true. Of a snapshot's chunks, the next snapshot replaces a
        tenth.
        """
        if mask.shape[-1] == 1:  # of layers: those that are resident
            return mask.numel() * settings.target.resident_layers // layers
        return layers * kv_heads * lines if mask.shape[-1] > lines else -(-mask.numel() // 10)

    device.true_values = true_values
    context = max(len(request.prompt) for request in requests)
    rates, sequences = SyntheticAcceptance(1.0, 1.0), settings.max_sequences
    load = DeviceWorkload(context, OUTPUT, (2048,), rates, 0, 1, fill=True, requests=sequences)
    measured, measure = list[int](), target_kv.working_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_kv, "working_bytes", lambda *asked: measured.append(measure(*asked)) or measured[0])
        engine = synthetic_engine(settings, shape, load)
    device.reset_peak()
    runners = runners_of(engine)
    weights = {id(weight): weight.nbytes for runner in runners.values() for weight in runner.model.parameters()}
    target = runners[Tier.TARGET].kv
    assert isinstance(target, FullKV)
    pools = [pool for runner in runners.values() for pool in (*runner.kv.keys, *runner.kv.values)]
    if isinstance(target, OffloadedKV):
        pools += [staging.pool for staging in target.staging]
    pools += target.landmarks.layers if target.landmarks else []
    caches = sum(pool.nbytes for pool in pools if pool.device.type == "cuda")
    rounds, most = list[Counter[str]](), 0
    for some in [requests] if together else [(request,) for request in requests]:
        left = {engine.submit(request) for request in some}
        while left:
            with device.counted() as syncs:
                outputs = engine.run_once()
            if all(request.prompt_logprobs is None for request in some):
                rounds.append(syncs)
            most = max(most, len(outputs))
            left -= {output.sequence_id for output in outputs if output.finish_reason}
    counted = device.peak - sum(weights.values()) - caches
    return Run(engine, settings, target, measured[0] - LIBRARIES, counted, rounds, most)


def request(sampling: SamplingParams = GREEDY, tokens: int = CONTEXT, **more: Any) -> Request:
    return Request(tuple(i % 1000 for i in range(tokens)), OUTPUT, sampling, 0, (8, 3), **more)


@pytest.mark.usefixtures("device")
def test_a_snapshot_to_which_nothing_is_new_reads_nothing_from_the_host() -> None:
    """As at the end of a chunk, if the snapshot before has as many chunks: a GPU run failed there."""
    cuda = torch.device("cuda", 0)
    kv = OffloadedKV(KVGeometry(2, 4, 64, torch.bfloat16, cuda), 256, KERNELS["cuda_flash"], Offload(1))
    layers, heads, slots = (torch.zeros(shape, dtype=torch.int64, device=cuda) for shape in ((0, 1), (0, 1), (0, 8)))
    for found in kv.read(layers, heads, slots):
        assert found.shape == (0, 8, 64)


def test_a_cut_launches_few_operators(device: Device) -> None:
    """Of all layers of Llama2-7B-128K: they were 5,300, and the host took longer for them than the GPU."""
    layers, kv_heads, lines = 32, 32, 512
    geometry = KVGeometry(layers, kv_heads, 128, torch.bfloat16, torch.device("cuda", 0))
    full = FullKV(geometry, CONTEXT, KERNELS["cuda_flash"], unit=8, chunk_sums=triton_chunk_sums)
    sparse = RetrievalKV(geometry, 1, ChunkSettings(4096), 64, KERNELS["cuda_flash"])
    every = layers * kv_heads * lines
    device.true_values = lambda mask: every if mask.shape[-1] > lines else every // 10
    spec = SequenceSpec(SamplingParams(), 0, CONTEXT, CONTEXT)
    fill(full, Span(1, 0, (0,) * CONTEXT, spec))
    held, base = sparse.open(1, spec), 0
    assert isinstance(held, RetrievalHeld)
    for position in (CONTEXT - 64, CONTEXT):  # a whole snapshot, then changes to it
        before = device.launches
        snapshot = full.cut(1, position, ChunkSettings.halved(4096, 8), SnapKV(), base)
        assert (snapshot.changes is None) == (base == 0)
        cut = device.launches
        assert cut - before <= 4 * layers + 48
        assert sparse.take(snapshot)
        assert sparse._install(1, held)
        assert device.launches - cut <= 16
        base = snapshot.version


@pytest.mark.parametrize(("name", "billions"), [("llama2-7b-128k", 6.48), ("llama-3.1-8b", 6.98)])
def test_a_self_drafter_of_8_bits_takes_a_byte_a_weight(device: Device, name: str, billions: float) -> None:
    """Of its linear layers; all else is the target's. Two float32 copies of one layer are the most that is made."""
    target = fake_model(geometry(name, layers=32).target)
    largest = max(weight.numel() for weight in target.model.layers.parameters())
    before = device.live
    with device.most() as made:
        copied = quantized_copy(target)
        join_projections(copied)
    assert device.live - before == pytest.approx(1e9 * billions, rel=0.01)
    assert made.bytes <= device.live - before + 3 * 4 * largest
    assert copied.model.embed_tokens.weight is target.model.embed_tokens.weight


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_block_of_drafts_waits_once(
    device: Device, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three tokens were 102 launches and three waits, or 123 where they are sampled; a round with two such blocks 307
    or 370, and nine waits.
    """
    drafted, rounds = list[tuple[int, int]](), list[tuple[int, int]]()

    def counting(run: Any, counts: list[tuple[int, int]], tokens: int | None) -> Any:
        def counted(*given: Any) -> Any:
            before = device.launches + device.replays
            with device.counted() as syncs:
                result = run(*given)
            if tokens is None or len(result[0].tokens) == tokens:
                counts.append((device.launches + device.replays - before, sum(syncs.values())))
            return result

        return counted

    monkeypatch.setattr(ModelProposer, "collect", counting(ModelProposer.collect, drafted, 3))
    monkeypatch.setattr(Engine, "run_once", counting(Engine.run_once, rounds, None))
    run(device, geometry("llama2-7b-128k"), request(sampling, 4096), retrieval={"refresh_every": 64})
    assert len(drafted) > 5
    assert min(launches for launches, _ in drafted) <= 18
    assert {waits for _, waits in drafted} == {1}
    last = rounds[-3:]
    assert max(launches for launches, _ in last) <= (160 if sampling.temperature else 139)
    assert max(waits for _, waits in last) <= 5


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "selector"),
    [
        ("llama2-7b-128k", "snapkv"),
        pytest.param("llama2-7b-128k", "mean_key", marks=pytest.mark.slow),
        pytest.param("llama-3.1-8b", "snapkv", marks=pytest.mark.slow),
        pytest.param("llama-3.1-8b", "mean_key", marks=pytest.mark.slow),
    ],
)
def test_a_long_context_on_one_device(device: Device, name: str, selector: str) -> None:
    """All tiers, captured; greedy and sampled; two snapshots and more, of which the later ones state changes; and a
    prompt whose logprobs are asked. What was measured is enough. It is more than these requests take, because others
    may name the selector `h2o`.
    """
    shape = geometry(name)
    short = request(tokens=4096, prompt_logprobs=1)
    made = run(device, shape, request(), request(SAMPLED), short, retrieval={"selector": selector})
    assert made.counted <= made.reserved <= 4 * made.counted
    assert device.replays > 0
    assert device.captured_in == len(Tier), "libraries keep buffers for each stream: the graphs of a runner share one"
    assert device.pageable == 0, "copies from memory that is not pinned wait for the device"
    # A round at (8, 3): a draw for each draft step, each retrieval pass and the target's; and the cut of a snapshot.
    assert max(syncs["tolist"] for syncs in made.rounds) <= 3 * 9
    assert max(sum(syncs.values()) for syncs in made.rounds) <= 64


@pytest.mark.ci
def test_two_of_six_sequences_at_once(device: Device) -> None:
    """This is the batch of docs/benchmarks/gpu.md: captured passes with padding sequences, and a pool that several
    sequences share.
    """
    shape, prompt = geometry("llama2-7b-128k"), 19 * 1024
    first = replace(request(tokens=prompt), max_tokens=300)  # it decodes still when the other's prompt has been read
    made = run(device, shape, first, request(SAMPLED, prompt), together=True, max_sequences=6)
    assert made.counted <= made.reserved
    assert made.most == 2
    assert made.engine.totals.stats.preempted == 0
    assert device.replays > 0
    assert device.pageable == 0


@pytest.mark.parametrize("name", ["llama2-7b-128k", pytest.param("llama-3.1-8b", marks=pytest.mark.slow)])
@pytest.mark.parametrize("graphs", ["auto", pytest.param("off", marks=pytest.mark.slow)])
def test_trees(device: Device, name: str, graphs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole trees for the retrieval tier, in captured passes and in others."""
    monkeypatch.setattr(Controller, "plan", lambda *_: Plan(8, 3, Drafting.MODEL, 11, 0.01))
    planned = [replace(request(sampling, 16_384), lookaheads=None) for sampling in (GREEDY, SAMPLED)]
    made = run(device, geometry(name), *planned, graphs=graphs)
    _, below, leaf = made.engine.totals.stats.tallies
    assert below.proposed >= 8 * below.rounds, "they branch"
    assert leaf.passes > below.drafts
    assert (device.replays > 0) is (graphs == "auto")
    retrieval = runners_of(made.engine)[Tier.RETRIEVAL].shaped
    assert (retrieval is None) is (graphs == "off")
    assert retrieval is None or retrieval.passes[-1].batch.shape.queries == 16, "11 nodes, and what was accepted last"
    assert device.pageable == 0
    assert max(syncs["tolist"] for syncs in made.rounds) <= 3 * 9


@pytest.mark.parametrize("graphs", ["auto", "eager", pytest.param("off", marks=pytest.mark.slow)])
def test_layers_with_a_window(device: Device, graphs: str) -> None:
    """The first of two layers sees 1,024 tokens, in captured passes, too; each token's own."""
    shape = geometry("llama-3.1-8b")
    shape.target.sliding_window, shape.target.layer_types = 1024, ["sliding_attention", "full_attention"]
    made = run(
        device, shape, request(tokens=16_384), request(SAMPLED, 16_384), together=True, max_sequences=2, graphs=graphs
    )
    assert made.target.geometry.windows.layers == {0}
    assert (device.replays > 0) is (graphs == "auto")
    assert made.counted <= made.reserved
    assert device.pageable == 0
    assert max(syncs["tolist"] for syncs in made.rounds) <= 3 * 9


@pytest.mark.parametrize("graphs", ["eager", "off"])
def test_passes_that_are_not_captured(device: Device, graphs: str) -> None:
    """These run the code that graphs hold, which fake graphs do not replay. Ordinary passes run, too."""
    made = run(device, geometry("llama-3.1-8b"), request(SAMPLED, 16_384), graphs=graphs)
    assert device.replays == 0
    assert device.pageable == 0
    assert len(made.rounds) > 3


@pytest.mark.ci
@pytest.mark.parametrize("selector", ["mean_key", pytest.param("snapkv", marks=pytest.mark.slow)])
def test_an_offloaded_shard_of_two_4090s(device: Device, selector: str) -> None:
    """A rank's share of Llama2-7B over two GPUs of 24 GB, its KV in host memory but for one layer."""
    shape = geometry("llama2-7b-128k", layers=4, ranks=2)
    device.total = 24 << 30
    target = {"offload": "host", "resident_layers": 1}
    made = run(device, shape, request(), target=target, retrieval={"selector": selector})
    assert isinstance(made.target, OffloadedKV)
    assert made.counted <= made.reserved <= 4 * made.counted
    assert device.pageable == 0, "the link is twice as slow from memory that is not pinned, and the host waits"
    assert max(syncs["copy from the host"] for syncs in made.rounds) == 0, "landmarks come while the host goes on"
    assert device.largest_pinned <= BUFFER_BYTES, "larger pieces are registered: torch would round them up"


def test_the_tests_drafter_is_made_where_its_target_is() -> None:
    """Noise on the host and weights on a GPU do not mix, and neither do noise and the meta device's weights."""
    assert with_noise(random_model().to("meta"), 0.1).device.type == "meta"
