"""`triforce bench device` on a tiny geometry: all figures are there, and synthetic acceptance is what was asked for."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from tests.command_line import Refusals, run
from tests.random_models import random_model
from triforce_core.building.inspection import runners_of
from triforce_core.config import RetrievalSettings, TargetSettings, load_settings
from triforce_core.engine.sequence import Request
from triforce_core.errors import InvalidValueError
from triforce_core.machine.memory import HOST
from triforce_core.messages import GREEDY, Tier
from triforce_core.models.load import kv_geometry
from triforce_tools.bench import device, fitting
from triforce_tools.bench.alone import Measurement
from triforce_tools.bench.device import DeviceWorkload, bench_device, prefill_flops, synthetic_engine
from triforce_tools.bench.fitting import fitting_context
from triforce_tools.bench.geometry import SHAPES, geometry_of
from triforce_tools.bench.geometry import random_model as model_of
from triforce_tools.bench.peaks import Peaks
from triforce_tools.bench.stages import decoding
from triforce_tools.bench.synthetic import SyntheticAcceptance, chance
from triforce_tools.bench.together import Together

SETTINGS = load_settings(dtype="float32", retrieval={"budget": 64}, threads=1, max_sequences=1)
PROMPT = tuple(range(200))
NAMED = "llama2-7b-128k"


pytestmark = pytest.mark.usefixtures("own_threads")


@pytest.fixture
def shape(tmp_path: Path) -> str:
    """A configuration as transformers writes it."""
    random_model().config.save_pretrained(tmp_path)
    return str(tmp_path / "config.json")


def measured(shape: str, acceptance: SyntheticAcceptance, *, seed: int, output: int, fill: bool = True) -> Measurement:
    load = DeviceWorkload(len(PROMPT), output, (50,), acceptance, seed, repeats=1, fill=fill)
    engine = synthetic_engine(SETTINGS, geometry_of(shape, shape), load)
    return Measurement(engine, Request(PROMPT, output, GREEDY, seed, (8, 3)))


def test_every_figure_is_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shape: str) -> None:
    small = (
        "--context",
        "300",
        "--output",
        "40",
        "--prefill",
        "100,4000",
        "--repeats",
        "1",
        "--budget",
        "64",
        "--force",
    )
    arguments = ("--geometry", shape, "--drafter-geometry", shape, "--threads", "1", "--dtype", "float32", "--json")
    assert run(monkeypatch, "bench", "device", *small, *arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["device"], result["geometry"], result["context"]) == ("cpu", shape, 300)
    assert result["copy_bandwidth_gb_s"] > 0
    assert result["matrix_peak_tflops"] > 0
    assert result["host_link_gb_s"] is None, "a CPU is its own host"
    stages = result["stages"]
    assert list(stages["verify"]) == ["1", "3", "7", "9", "17"]
    for stage in (stages["draft"], stages["draft_sampled"], stages["retrieval"], *stages["verify"].values()):
        assert stage["share"] == pytest.approx(
            stage["bytes"] / (stage["ms"] / 1e3) / 1e9 / result["copy_bandwidth_gb_s"]
        )
    own = stages["retrieval"]["bytes"] / result["copy_bandwidth_gb_s"] / 1e6
    assert stages["retrieval"]["roofline"] == pytest.approx(stages["retrieval"]["ms"] / own), "over weights and its KV"
    assert list(stages["prefill"]) == ["100", "300"], "as many tokens as there are"
    for tokens, prefill in stages["prefill"].items():
        assert prefill["tokens_per_s"] == pytest.approx(int(tokens) / (prefill["ms"] / 1e3))
    assert list(stages["cut"]) == ["whole", "install_whole", "changes", "install_changes", "replaced"]
    assert all(ms > 0 for ms in list(stages["cut"].values())[:4])
    assert 0 < stages["cut"]["replaced"] < 1
    assert list(result["decoding"]) == ["0", "0.6"], "by temperature"
    for temperature, runs in result["decoding"].items():
        assert runs["speedup"] == pytest.approx(runs["plain_ms_per_token"] / runs["triforce_ms_per_token"])
        assert runs["speedup_as_asked"] == pytest.approx(runs["plain_ms_per_token"] * 7.0 / runs["round_ms"], rel=1e-3)
        passes = {tier: count / runs["passes"]["target"] for tier, count in runs["passes"].items()}
        alone = (
            passes["draft"] * stages["draft" if temperature == "0" else "draft_sampled"]["ms"]
            + passes["retrieval"] * stages["retrieval"]["ms"]
        )
        assert runs["passes_of_a_round_ms"] == pytest.approx(alone + stages["verify"]["9"]["ms"])
        assert runs["between_passes_ms"] == pytest.approx(runs["round_ms"] - runs["passes_of_a_round_ms"])
        assert runs["first_round_ms"] > 0
        assert runs["acceptance"]["synthetic"] is True
        assert runs["acceptance"]["asked"] == {"retrieval": 0.92, "draft": 0.6}
    # What a pass reads: the weights but the embeddings, and of KV what it sees.
    model = model_of(geometry_of(shape, shape).target, SETTINGS)
    weights = sum(weight.nbytes for weight in model.parameters()) - model.get_input_embeddings().weight.nbytes
    seen = (stages["verify"]["17"]["bytes"] - weights) / kv_geometry(model).bytes_per_token
    assert 300 + 24 <= seen < 300 + 40
    assert 64 <= (stages["retrieval"]["bytes"] - weights) / kv_geometry(model).bytes_per_token < 64 + 100


@pytest.mark.parametrize(
    "rates", [SyntheticAcceptance(0.92, 0.6), SyntheticAcceptance(0.3, 0.95), SyntheticAcceptance(1.0, 0.0)], ids=str
)
def test_tokens_are_accepted_as_often_as_asked(shape: str, rates: SyntheticAcceptance) -> None:
    """The rate is within four standard errors."""
    stats = measured(shape, rates, seed=5, output=600).stats
    for tally, rate in zip(stats.tallies[:2], (rates.retrieval, rates.draft), strict=True):
        judged = tally.accepted + tally.rejected
        assert judged > 200
        assert tally.accepted / judged == pytest.approx(rate, abs=4 * (rate * (1 - rate) / judged) ** 0.5)


@pytest.mark.parametrize("lookaheads", [(8, 3), (16, 3), (5, 0), (1, 2)])
def test_the_tokens_expected_of_a_round_are_those_of_many_rounds(lookaheads: tuple[int, int]) -> None:
    rates, rng, tokens = SyntheticAcceptance(0.92, 0.6), random.Random(0), 0

    def run_of(most: int, rate: float) -> int:
        """How many of so many proposed tokens are accepted."""
        return next((n for n in range(most) if rng.random() >= rate), most)

    rounds = 20_000
    for _ in range(rounds):
        block = 0
        while block < lookaheads[0]:
            block += run_of(lookaheads[1], rates.draft) + 1
        tokens += run_of(block, rates.retrieval) + 1
    assert rates.tokens_per_round(lookaheads) == pytest.approx(tokens / rounds, rel=0.02)


def test_the_same_seed_gives_the_same_counts(shape: str) -> None:
    one, again, other = (
        [tally.counts for tally in measured(shape, SyntheticAcceptance(0.8, 0.6), seed=seed, output=200).stats.tallies]
        for seed in (1, 1, 2)
    )
    assert one == again != other


def small(**more: Any) -> DeviceWorkload:
    given = {"output": 20, "prefills": (50,), "acceptance": SyntheticAcceptance(0.9, 0.6), "seed": 0, "repeats": 1}
    return DeviceWorkload(**{"context": 200, "fill": True, "verified": (1, 5), **given, **more})


def test_what_was_measured_before_a_run_is_cut_off_remains(shape: str) -> None:
    """Each figure is reported as soon as it is there: first the peaks, then the stages, then the whole runs."""
    told: list[str] = []

    class CutOffError(Exception):
        pass

    def keep(found: dict[str, Any]) -> None:
        told.append(json.dumps(found))
        if "0" in found.get("decoding", {}):
            raise CutOffError

    with pytest.raises(CutOffError):
        bench_device(SETTINGS, geometry_of(shape, shape), small(), lambda line: None, keep)
    *stages, last = map(json.loads, told)
    assert "copy_bandwidth_gb_s" in stages[0]
    assert [list(each.get("stages", {})) for each in stages[:3]] == [[], ["draft"], ["draft", "retrieval"]]
    assert [list(each["stages"]["verify"]) for each in stages[3:5]] == [["1"], ["1", "5"]]
    assert list(last["stages"]) == ["draft", "retrieval", "verify", "cut", "draft_sampled", "prefill"]
    assert list(last["decoding"]) == ["0"]


def test_several_requests_are_measured_while_all_of_them_decode(shape: str) -> None:
    """A pass reads the weights once, and the KV of each request. Which tokens are accepted differs from request to
    request.
    """
    requests, report = 3, list[str]()
    found = bench_device(SETTINGS, geometry_of(shape, shape), small(requests=requests), report.append)
    one = bench_device(SETTINGS, geometry_of(shape, shape), small(), report.append)
    geometry = kv_geometry(model_of(geometry_of(shape, shape).target, SETTINGS))
    more = found["stages"]["verify"]["5"]["bytes"] - one["stages"]["verify"]["5"]["bytes"]
    assert more == pytest.approx((requests - 1) * 230 * geometry.bytes_per_token, rel=0.1)
    for figures in found["decoding"].values():
        assert figures["passes"]["target"] * (8 + 1) >= 20
        assert figures["passes"]["target"] < 20, "all requests are in each pass"
    engine = synthetic_engine(SETTINGS, geometry_of(shape, shape), small(requests=requests))
    together = Together(engine, [Request(PROMPT, 1000, GREEDY, seed, (8, 3)) for seed in range(requests)], 40)
    assert engine.idle, "others have their room"
    assert 40 * requests <= together.tokens < 52 * requests
    alone = Together(engine, [Request(PROMPT, 1000, GREEDY, 0, (8, 3))], 40)
    assert alone.stats.tallies[0].rounds == alone.passes["target"] + 1, "the first round is told apart"
    assert alone.first_round_s > 0
    counts = []
    for seed in range(2):
        engine = synthetic_engine(SETTINGS, geometry_of(shape, shape), small(requests=requests))
        tallies = Measurement(engine, Request(PROMPT, 200, GREEDY, seed, (8, 3))).stats.tallies
        counts.append([tally.counts for tally in tallies])
    assert counts[0] != counts[1], "in step with each other they would be faster than any real ones"


def test_requests_that_are_not_decoded_together_are_refused(shape: str) -> None:
    engine = synthetic_engine(SETTINGS, geometry_of(shape, shape), small(requests=2))
    requests = [Request(PROMPT, tokens, GREEDY, 0, (8, 3)) for tokens in (3, 100)]
    with pytest.raises(InvalidValueError, match="requests: 2 are not decoded together for long enough"):
        Together(engine, requests, 40)


@pytest.mark.parametrize("resident", [0, 1])
def test_offloaded_a_pass_is_held_against_the_link(shape: str, resident: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What crosses the link is the KV that the pass sees in the layers that are not resident."""
    monkeypatch.setattr(device, "measure_peaks", lambda *_: Peaks(10.0, 2.0, 1.0))
    target = TargetSettings(offload="host", resident_layers=resident)
    settings = SETTINGS.model_copy(update={"target": target})
    found = bench_device(settings, geometry_of(shape, shape), small(samplings=()), lambda line: None)
    geometry = kv_geometry(model_of(geometry_of(shape, shape).target, settings))
    for stage in found["stages"]["verify"].values():
        assert stage["link_share"] == pytest.approx(stage["link_bytes"] / (stage["ms"] / 1e3) / 1e9 / 2.0)
        tokens = stage["link_bytes"] / (geometry.bytes_per_token * (2 - resident) / 2)
        assert 200 + 20 < tokens < 200 + 40
    assert "link_share" not in found["stages"]["retrieval"], "its KV is on the device"


@pytest.mark.parametrize("fill", [True, False])
def test_the_models_run_every_pass(shape: str, fill: bool) -> None:
    """There is one exception: filled prompts need no passes up to the chunk that gives the first token."""
    load = DeviceWorkload(len(PROMPT), 100, (50,), SyntheticAcceptance(0.9, 0.6), 0, repeats=1, fill=fill)
    settings = SETTINGS.model_copy(update={"target": TargetSettings(prefill_chunk=len(PROMPT) // 4)})
    engine = synthetic_engine(settings, geometry_of(shape, shape), load)
    stats = Measurement(engine, Request(PROMPT, 100, GREEDY, 0, (8, 3))).stats
    passes = {tier: runner.passes for tier, runner in runners_of(engine).items()}
    assert passes[Tier.TARGET] == stats.tallies[0].rounds + (1 if fill else 4)
    assert passes[Tier.RETRIEVAL] == stats.tallies[1].rounds
    assert passes[Tier.DRAFT] >= stats.tallies[1].proposed


def test_a_model_whose_configuration_names_no_kv_heads_has_one_for_each_query_head(tmp_path: Path) -> None:
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    GPTNeoXConfig(vocab_size=256, max_position_embeddings=8192, **size).save_pretrained(tmp_path)
    run = measured(str(tmp_path / "config.json"), SyntheticAcceptance(0.9, 0.6), seed=0, output=40)
    assert len(run.tokens) == 40


def test_what_is_drawn_is_spread_evenly() -> None:
    drawn = sorted(chance(3, position, "TARGET") for position in range(2000))
    assert all(abs(value - index / 2000) < 0.04 for index, value in enumerate(drawn))  # Kolmogorov, p < 1e-2


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "llama-68m"])
def test_the_published_shapes(name: str) -> None:
    geometry = geometry_of(name)
    assert geometry.target.vocab_size == geometry.drafter.vocab_size
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(geometry.target).num_parameters()
    assert round(parameters / 1e9, 2) == {"llama2-7b-128k": 6.74, "llama-3.1-8b": 8.03}[name]


def test_flops_of_a_prefill(shape: str) -> None:
    model = model_of(geometry_of(shape, shape).target, SETTINGS)
    # Two layers of 64×(64 + 2×32 + 64) and 3×64×128, and for attention 4 heads × 16 twice over half of n².
    assert prefill_flops(model, 10) == 2 * 10 * 2 * (64 * 192 + 3 * 64 * 128) + 2 * 2 * 4 * 16 * 10**2


def test_the_default_context_fits_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the default geometry, a GPU of 141 GB has room for the longest context, and a GPU of 80 GB for a shorter
    one.
    """
    settings, shapes = load_settings(dtype="bfloat16", max_sequences=1, retrieval={"budget": 4096}), geometry_of(NAMED)
    found = {}
    for gib in (140, 79, 24):
        monkeypatch.setattr(fitting, "free_bytes", lambda place, gib=gib: gib << 30)
        found[gib] = fitting_context(settings, shapes, 1024)
    assert found[140] == 124_928
    assert 80_000 < found[79] < 122_880
    assert 0 < found[24] < found[79]
    assert all(context % 1024 == 0 for context in found.values())
    monkeypatch.setattr(fitting, "free_bytes", lambda place: 140 << 30)
    six = settings.model_copy(update={"retrieval": RetrievalSettings(budget=768)})
    assert 19_456 <= fitting_context(six, shapes, 1024, requests=6) < 124_928 / 3
    monkeypatch.setattr(fitting, "free_bytes", lambda place: 8 << 30)
    with pytest.raises(InvalidValueError, match=r"geometry: 'llama' takes .* where 8\.00 GiB are free: choose a"):
        fitting_context(settings, shapes, 1024)
    with pytest.raises(
        InvalidValueError, match=r"output: 1100 leaves fewer than 1024 of the geometry's 2048 positions"
    ):
        fitting_context(settings, geometry_of("llama-68m"), 1100)


def test_offloaded_the_default_context_fits_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has room for the layers on their way, and the host for 40 GiB of KV at .5 MiB a token."""
    settings = load_settings(dtype="bfloat16", max_sequences=1, target=TargetSettings(offload="host"))
    monkeypatch.setattr(fitting, "torch_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(fitting, "free_bytes", lambda place: (40 if place == HOST else 79) << 30)
    context = fitting_context(settings, geometry_of(NAMED), 1024)
    assert 0.8 * 40 < (context + 1024) / 2048 < 0.95 * 40
    assert fitting_context(settings.model_copy(update={"target": TargetSettings()}), geometry_of(NAMED), 1024) > context


def test_stages_are_timed_on_all_sequences_or_not_at_all() -> None:
    """A sequence that ends while the prompts of others are read would leave a smaller batch than is told."""
    outputs = [SimpleNamespace(sequence_id=each, stats=SimpleNamespace(decoded=24)) for each in range(2)]
    engine: Any = SimpleNamespace(
        submit=lambda request: None, run_once=lambda: outputs, scheduler=SimpleNamespace(live={1: "the other ended"})
    )
    with pytest.raises(InvalidValueError, match="requests: 2 are not decoded together: the first had all its tokens"):
        decoding(engine, [PROMPT, PROMPT], (8, 3), GREEDY)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--geometry", "gpt-5"], ["geometry", "gpt-5", "llama2-7b-128k"]),
        (["--acceptance", "1.2,.5"], ["acceptance", "1.2,.5", "between 0 and 1"]),
        (["--acceptance", "high"], ["acceptance", "high", "two numbers"]),
        (["--prefill", "8192,0"], ["prefill", "8192,0", "1 or more"]),
        (["--prefill", "long"], ["prefill", "long", "numbers of prompt tokens"]),
        (["--fill", "zeros"], ["fill", "zeros", "random or prefill"]),
        (["--device", "abacus"], ["device", "abacus", "must be cpu"]),
        (["--lookaheads", "8,0"], ["lookaheads", "(8, 0)", "must each be 1 or more"]),
        (["--context", "131000"], ["context", "131000", "1024 tokens of output", "131072 positions"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(refusals: Refusals, arguments: list[str], named: list[str]) -> None:
    refusals.check(named, "bench", "device", "--force", *arguments)


def test_rates_are_checked_where_they_are_read() -> None:
    with pytest.raises(InvalidValueError, match="must each be between 0 and 1"):
        SyntheticAcceptance.parse("nan,.5")
