"""`triforce bench device`: the time of each stage on this device, for models of a real geometry with random weights.

First each stage is timed alone and compared with the device's peaks, measured in the same run. Then plain decoding and
TriForce are compared with the real engine, loop and caches, but with acceptance drawn at given rates.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from triforce_core.building.assembly import local_engine
from triforce_core.building.drafters import drafter_weights
from triforce_core.building.inspection import kernels_of, runners_of
from triforce_core.config import Settings
from triforce_core.engine.engine import Engine
from triforce_core.engine.sequence import Request, Sequence
from triforce_core.errors import require
from triforce_core.kv.base import Forward
from triforce_core.kv.offloaded import OffloadedKV
from triforce_core.kv.retrieval import RetrievalKV
from triforce_core.machine.device import DTYPES, torch_device
from triforce_core.messages import GREEDY, Claim, Proposer, SamplingParams, SequenceSpec, Span, Tier
from triforce_core.models.files import context_length, kv_shape
from triforce_core.models.quantize import quantized_copy, weight_bytes
from triforce_core.models.runner import ModelRunner
from triforce_core.speculation.decoder import SpeculativeDecoder
from triforce_core.speculation.verification import ModelVerifier
from triforce_tools.bench.cuts import cut_figures
from triforce_tools.bench.geometry import Geometry, random_model
from triforce_tools.bench.peaks import Peaks, measure_peaks, seconds
from triforce_tools.bench.stages import decoding, drafting, level_below, newest, verifying
from triforce_tools.bench.synthetic import SyntheticAcceptance, SyntheticVerifier
from triforce_tools.bench.together import Together, finish

VERIFIED = (1, 3, 7, 9, 17)  # query tokens of the target passes that are timed
STAGE_TOKENS = 1024  # room for output of the sequence on which stages are timed
LONG = 16_384  # tokens of a prompt whose prefill is timed once
PREFILLED = 2**60  # a sequence id that no engine uses

Keep = Callable[[dict[str, Any]], object]  # is told the figures so far, so that a run which is cut off leaves some


@dataclass(frozen=True, slots=True)
class DeviceWorkload:
    """What `bench_device` runs. Sizes are in tokens."""

    context: int  # of each prompt
    output: int  # of each request, in the time that is measured
    prefills: tuple[int, ...]  # of the prompts whose prefill is timed, each at most `context`
    acceptance: SyntheticAcceptance
    seed: int
    repeats: int  # runs of each mode
    fill: bool  # fill the prompt's KV with random values instead of running the prefill
    requests: int = 1  # decoded together, with prompts of their own
    samplings: tuple[SamplingParams, ...] = (GREEDY, SamplingParams(0.6))
    verified: tuple[int, ...] = VERIFIED

    @property
    def room(self) -> int:
        """For the output of a request, which is decoded before and after the time that is measured, too."""
        return room_for(self.output)

    def of(self, context: int) -> DeviceWorkload:
        """The same with prompts of this length, and prefills of at most that."""
        prefills = tuple(dict.fromkeys(min(tokens, context) for tokens in self.prefills))
        return replace(self, context=context, prefills=prefills)


def room_for(output: int) -> int:
    return max(2 * output, STAGE_TOKENS)


def prefill_lengths(text: str) -> tuple[int, ...]:
    """The lengths in a text such as `8192,65536`. Raises `InvalidValueError`."""
    lengths = tuple(int(each) if each.strip().isdecimal() else 0 for each in text.split(","))
    require(min(lengths) > 0, "prefill", text, "must be numbers of prompt tokens, each 1 or more")
    return lengths


def bench_device(
    settings: Settings,
    geometry: Geometry,
    load: DeviceWorkload,
    report: Callable[[str], None],
    keep: Keep = lambda found: None,
    engine: Engine | None = None,
) -> dict[str, Any]:
    """Run the benchmark and return its figures. The arguments must have passed `check`. `keep` gets the figures so far
    whenever there are new ones, the same dictionary each time. `engine`: a `synthetic_engine` for this load that is
    there already.
    """
    device = torch_device(settings.device)
    peaks = measure_peaks(device, DTYPES[settings.dtype])
    report(f"copy {peaks.copy_gb_s:.0f} GB/s, matrix product {peaks.matrix_tflops:.2f} TFLOP/s")
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "context": load.context,
        "requests": load.requests,
        "dtype": settings.dtype,
        "budget": settings.retrieval.budget,
        "chunk": settings.retrieval.chunk,
        "self_drafter_quantization": settings.retrieval.quantization,
        "offload": settings.target.offload,
        "fill": "random" if load.fill else "prefill",
        "copy_bandwidth_gb_s": peaks.copy_gb_s,
        "host_link_gb_s": peaks.host_link_gb_s,
        "matrix_peak_tflops": peaks.matrix_tflops,
    }
    keep(found)
    engine = engine or synthetic_engine(settings, geometry, load)
    rng = random.Random(load.seed)
    vocab_size = geometry.target.vocab_size
    prompts = [tuple(rng.randrange(vocab_size) for _ in range(load.context)) for _ in range(load.requests)]
    found["kernels"] = {tier.name.lower(): kernels_of(runner) for tier, runner in runners_of(engine).items()}
    report("each stage by itself")
    by_itself: dict[str, Any] = {}
    for by_itself in stages(engine, settings, load, prompts, peaks):
        found["stages"] = by_itself
        keep(found)
    for found["decoding"] in decode(engine, settings, load, prompts, by_itself, report):
        keep(found)
    return found


def check(settings: Settings, geometry: Geometry, load: DeviceWorkload) -> None:
    """Raise `InvalidValueError` for arguments that would otherwise fail only after the weights are made."""
    rule = "must be a model: prompt lookup runs no passes that could be timed"
    require(drafter_weights(settings) is not None, "draft.model", settings.draft.model, rule)
    for tier in ("target", "retrieval"):
        ranks = settings.ranks((tier,))
        require(ranks == 1, f"{tier}.tensor_parallel", ranks, "must be 1: one device is measured")
    require(
        settings.retrieval.model is None, "retrieval.model", settings.retrieval.model, "must be null: none is loaded"
    )
    lookaheads = settings.speculation.effective
    require(all(lookaheads), "speculation.lookaheads", lookaheads, "must each be 1 or more: all tiers are measured")
    rule = "must be at least 2: the time from one token to the next is measured"
    require(load.output >= 2, "output", load.output, rule)
    positions = context_length(geometry.target)
    rule = f"and {load.room} tokens of output must fit the geometry's {positions} positions"
    require(load.context + load.room <= positions, "context", load.context, rule)


def synthetic_engine(settings: Settings, geometry: Geometry, load: DeviceWorkload) -> Engine:
    """The engine of a whole chain in this process, with random weights and room for everything that is measured."""
    pool = load.requests * (load.context + load.room)
    # Nobody waits here: prompts are read as fast as they can be, so that all requests soon decode together.
    given = {"kv_pool_tokens": pool, "max_stall_ms": None}
    target_settings = settings.cold.target.model_copy(update=given)
    settings = settings.model_copy(update={"target": target_settings, "max_sequences": load.requests})
    target = random_model(geometry.target, settings)
    self_drafter = quantized_copy(target) if settings.retrieval.quantization else None
    engine = local_engine(target, random_model(geometry.drafter, settings), settings, self_drafter)
    level: Proposer = engine.decoder
    while isinstance(level, SpeculativeDecoder):
        assert isinstance(level.verifier, ModelVerifier)
        level.verifier = SyntheticVerifier(level.verifier, acceptance=load.acceptance, seed=load.seed, fill=load.fill)
        level = level.proposer
    return engine


def stages(
    engine: Engine, settings: Settings, load: DeviceWorkload, prompts: list[tuple[int, ...]], peaks: Peaks
) -> Iterator[dict[str, Any]]:
    """Figures of single passes over sequences of `context` tokens, of snapshots, and of prefills; those so far after
    each of them.
    """
    lookaheads, retrieval = settings.speculation.effective, level_below(engine.decoder)
    assert isinstance(engine.decoder, SpeculativeDecoder)
    assert isinstance(retrieval, SpeculativeDecoder)
    runners, judged, found = runners_of(engine), lookaheads[1] + 1, dict[str, Any]()
    sequences = decoding(engine, prompts, lookaheads, GREEDY)

    def stage(tier: Tier, run: Callable[[], object], tokens: int, passes: int = 1) -> dict[str, Any]:
        taken_s = seconds(run, torch_device(settings.device)) / passes
        return pass_figures(runners[tier], taken_s, sequences, tokens, peaks)

    def draft() -> dict[str, Any]:
        """One step of as many as are drafted together."""
        return stage(Tier.DRAFT, drafting(retrieval.proposer, sequences, lookaheads[1]), 1, lookaheads[1])

    found["draft"] = draft()
    yield found
    step = stage(Tier.RETRIEVAL, verifying(retrieval.verifier, sequences, judged), judged)
    found["retrieval"] = step | {"roofline": 1 / step["share"]}  # of the weights and its own KV
    yield found
    found["verify"] = {}
    for tokens in load.verified:
        run = verifying(engine.decoder.verifier, sequences, tokens)
        found["verify"][str(tokens)] = stage(Tier.TARGET, run, tokens)
        yield found
    sparse = runners[Tier.RETRIEVAL].kv
    assert isinstance(sparse, RetrievalKV)
    found["cut"] = cut_figures(engine, sparse, sequences)
    yield found
    finish(engine, {sequence.request_id for sequence in sequences})
    sequences = decoding(engine, prompts, lookaheads, SamplingParams(1.0))
    found["draft_sampled"] = draft()  # at temperature 1
    yield found
    finish(engine, {sequence.request_id for sequence in sequences})
    found["prefill"] = {}
    for tokens in load.prefills:
        found["prefill"][str(tokens)] = prefill(runners[Tier.TARGET], settings, prompts[0][:tokens], peaks)
        yield found


def pass_figures(
    runner: ModelRunner, taken_s: float, sequences: list[Sequence], tokens: int, peaks: Peaks
) -> dict[str, Any]:
    """Figures of a pass over the last `tokens` tokens of each sequence. It must read the KV that it sees, and all
    weights except a separate table of input embeddings, of which a pass reads a few rows only.
    """
    table, head = tables(runner.model)
    weights = weight_bytes(runner.model) - (0 if table is head else table.nbytes)
    _, batch = runner.forward([Forward(newest(sequence), tokens) for sequence in sequences])
    cached = sum(stop - start for row in batch.rows for start, stop in row.placed.visible)
    own = sum(len(row.placed.tokens) for row in batch.rows)
    moved = weights + (cached + own) * runner.kv.geometry.bytes_per_token
    found = {"tokens": tokens, "ms": 1e3 * taken_s, "bytes": moved, "share": moved / taken_s / 1e9 / peaks.copy_gb_s}
    if isinstance(runner.kv, OffloadedKV):
        layers = runner.kv.geometry.num_layers
        link = cached * runner.kv.geometry.bytes_per_token * (layers - runner.kv.resident_layers) // layers
        found["link_bytes"] = link
        if peaks.host_link_gb_s:  # none where the device is the host
            found["link_share"] = link / taken_s / 1e9 / peaks.host_link_gb_s
    return found


def decode(
    engine: Engine,
    settings: Settings,
    load: DeviceWorkload,
    prompts: list[tuple[int, ...]],
    stages: dict[str, Any],
    report: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Figures of plain decoding and TriForce by temperature, run in alternating order; those so far after each pair of
    runs.
    """
    lookaheads, found = settings.speculation.effective, dict[str, Any]()
    verify = min(stages["verify"].values(), key=lambda stage: abs(stage["tokens"] - lookaheads[0] - 1))
    for sampling in load.samplings:
        plain: list[Together] = []
        speculative: list[Together] = []
        for repeat in range(load.repeats + 1):  # the first run of each mode is a warm-up
            modes = [(plain, (0, 0), "plain"), (speculative, lookaheads, "TriForce, synthetic acceptance")]
            for runs, each, name in modes if repeat % 2 == 0 else reversed(modes):
                requests = [
                    Request(prompt, load.room, sampling, load.seed + number, each)
                    for number, prompt in enumerate(prompts)
                ]
                runs.append(Together(engine, requests, load.output))
                at = f"{name} at T = {sampling.temperature:g}, {repeat}/{load.repeats}"
                report(f"{at}: {runs[-1].ms_per_token:.2f} ms a token")
            if repeat:
                draft = stages["draft_sampled" if sampling.temperature else "draft"]["ms"]
                alone = {"draft": draft, "retrieval": stages["retrieval"]["ms"], "target": verify["ms"]}
                figures = decoding_figures(plain[1:], speculative[1:], lookaheads, load.acceptance, alone)
                found[f"{sampling.temperature:g}"] = {"output": load.output, "lookaheads": list(lookaheads)} | figures
                yield found


def decoding_figures(
    plain: list[Together],
    speculative: list[Together],
    lookaheads: tuple[int, int],
    asked: SyntheticAcceptance,
    alone: dict[str, float],
) -> dict[str, Any]:
    """Times are medians, from one token of a request to its next; the rest is of the last run.

    Few rounds draw other rates than those asked for. So the speed-up is told as it was run, and for the expected tokens
    of a round at the asked rates (`speedup_as_asked`). What the passes of a round take is reckoned from `alone`, the
    milliseconds of one of each tier by itself; what is left of its time is the host between passes, and cuts.
    """
    plain_ms = statistics.median(run.ms_per_token for run in plain)
    triforce_ms = statistics.median(run.ms_per_token for run in speculative)
    round_ms = statistics.median(1e3 * run.taken_s / run.passes["target"] for run in speculative)
    last, expected = speculative[-1], asked.tokens_per_round(lookaheads)
    passes_ms = sum(last.passes[tier] * ms for tier, ms in alone.items()) / last.passes["target"]
    return {
        "plain_ms_per_token": plain_ms,
        "triforce_ms_per_token": triforce_ms,
        "speedup": plain_ms / triforce_ms,
        "speedup_as_asked": plain_ms * expected / round_ms,
        "round_ms": round_ms,
        "first_round_ms": 1e3 * statistics.median(run.first_round_s for run in speculative),
        "passes_of_a_round_ms": passes_ms,
        "between_passes_ms": round_ms - passes_ms,
        "tokens_per_round": {"drawn": last.stats.tokens_per_round, "as_asked": expected},
        "passes": last.passes,
        "acceptance": {**last.stats.acceptance, "asked": asdict(asked), "synthetic": True},
    }


def tables(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """The weights of the input embeddings and of the output head, which may be the same tensor."""
    return (
        model.get_input_embeddings().get_parameter("weight"),
        model.get_output_embeddings().get_parameter("weight"),
    )


def prefill(runner: ModelRunner, settings: Settings, prompt: tuple[int, ...], peaks: Peaks) -> dict[str, Any]:
    """Figures of a prefill in chunks, as the scheduler cuts them, with an ordinary verifier: no KV is random."""
    verifier, chunk = ModelVerifier(runner, Tier.TARGET), settings.target.prefill_chunk
    spec = SequenceSpec(GREEDY, 0, len(prompt), len(prompt))

    def run() -> None:
        for start in range(0, len(prompt), chunk):
            span = Span(PREFILLED, start, prompt[start : start + chunk], None if start else spec)
            verifier.verify([Claim(span, (), sample=False)])
        verifier.release([PREFILLED])

    # A long one takes seconds, and varies little.
    taken = seconds(run, runner.kv.geometry.device, repeats=1 if len(prompt) > LONG else 3)
    flops = prefill_flops(runner.model, len(prompt))
    return {
        "tokens": len(prompt),
        "ms": 1e3 * taken,
        "tokens_per_s": len(prompt) / taken,
        "flops": flops,
        "share": flops / taken / 1e12 / peaks.matrix_tflops,  # of the matrix peak
    }


def prefill_flops(model: PreTrainedModel, tokens: int) -> int:
    """Floating-point operations of a prefill: two per token and weight of a matrix, and those of the causal half of
    attention. Embeddings and output head are not counted.
    """
    spared = {id(table) for table in tables(model)}
    weights = sum(w.numel() for w in model.parameters() if w.dim() == 2 and id(w) not in spared)
    layers, _, head_dim = kv_shape(model.config)
    heads: int = model.config.num_attention_heads
    return 2 * weights * tokens + 2 * layers * heads * head_dim * tokens**2
