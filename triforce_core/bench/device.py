"""`triforce bench device`: the time of each stage on this device, for models of a real geometry with random weights.

First plain decoding and TriForce are compared with the real engine, loop and caches, but with acceptance drawn at given
rates. Then each stage is timed alone and compared with the device's peaks, measured in the same run.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from triforce_core.bench.decode import Measurement, Report
from triforce_core.bench.geometry import Geometry, random_model
from triforce_core.bench.peaks import Peaks, measure_peaks, seconds
from triforce_core.bench.stages import decoding, drafting, level_below, newest, verifying
from triforce_core.bench.synthetic import SyntheticAcceptance, SyntheticVerifier
from triforce_core.config import Settings
from triforce_core.decoder import SpeculativeDecoder
from triforce_core.engine.assembly import local_engine
from triforce_core.engine.drafters import drafter_weights
from triforce_core.engine.engine import Engine
from triforce_core.engine.inspection import kernels_by_tier, runners_of
from triforce_core.engine.sequence import Request, Sequence
from triforce_core.errors import require
from triforce_core.kv.base import Forward
from triforce_core.messages import GREEDY, Claim, SequenceSpec, Span, Tier
from triforce_core.models.device import torch_device
from triforce_core.models.files import context_length, kv_shape
from triforce_core.models.load import DTYPES
from triforce_core.models.quantize import quantize_weights, tensor_bytes, weight_bytes
from triforce_core.models.runner import ModelRunner
from triforce_core.verification import ModelVerifier

VERIFIED = (1, 3, 7, 9, 17)  # query tokens of the target passes that are timed
STAGE_TOKENS = 1024  # room for output of the sequence on which stages are timed
PREFILLED = 2**60  # a sequence id that no engine uses


@dataclass(frozen=True, slots=True)
class DeviceWorkload:
    """What `bench_device` runs. Sizes are in tokens."""

    context: int  # of the prompt
    output: int
    prefill: int  # of the prompt whose prefill is timed, at most `context`
    acceptance: SyntheticAcceptance
    seed: int
    repeats: int  # runs of each mode
    fill: bool  # fill the prompt's KV with random values instead of running the prefill


def bench_device(settings: Settings, geometry: Geometry, load: DeviceWorkload, report: Report) -> dict[str, Any]:
    """Run the benchmark and return its figures. The arguments must have passed `check`."""
    device = torch_device(settings.device)
    peaks = measure_peaks(device, DTYPES[settings.dtype])
    report(f"copy {peaks.copy_gb_s:.0f} GB/s, matrix product {peaks.matrix_tflops:.2f} TFLOP/s")
    engine = synthetic_engine(settings, geometry, load)
    rng = random.Random(load.seed)
    prompt = tuple(rng.randrange(geometry.target.vocab_size) for _ in range(load.context))
    decoded = decode(engine, settings, load, prompt, report)
    report("each stage by itself")
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "context": load.context,
        "dtype": settings.dtype,
        "kernels": kernels_by_tier(engine),
        "budget": settings.retrieval.budget,
        "chunk": settings.retrieval.chunk,
        "self_drafter_quantization": settings.retrieval.quantization,
        "fill": "random" if load.fill else "prefill",
        "copy_bandwidth_gb_s": peaks.copy_gb_s,
        "host_link_gb_s": peaks.host_link_gb_s,
        "matrix_peak_tflops": peaks.matrix_tflops,
        "stages": stages(engine, settings, load, prompt, peaks),
        "decoding": decoded,
    }


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
    positions, more = context_length(geometry.target), max(load.output, STAGE_TOKENS)
    rule = f"and {more} tokens of output must fit the geometry's {positions} positions"
    require(load.context + more <= positions, "context", load.context, rule)


def synthetic_engine(settings: Settings, geometry: Geometry, load: DeviceWorkload) -> Engine:
    """The engine of a whole chain in this process, with random weights and room for everything that is measured."""
    pool = load.context + max(load.output, STAGE_TOKENS) + load.prefill
    target_settings = settings.cold.target.model_copy(update={"kv_pool_tokens": pool})
    settings = settings.model_copy(update={"target": target_settings, "max_sequences": 1})
    target = random_model(geometry.target, settings)
    self_drafter = None
    if settings.retrieval.quantization:
        self_drafter = random_model(geometry.target, settings)
        quantize_weights(self_drafter, settings.retrieval.quantization)
    make_verifier = partial(SyntheticVerifier, acceptance=load.acceptance, seed=load.seed, fill=load.fill)
    return local_engine(
        target, random_model(geometry.drafter, settings), settings, self_drafter, make_verifier=make_verifier
    )


def decode(
    engine: Engine, settings: Settings, load: DeviceWorkload, prompt: tuple[int, ...], report: Report
) -> dict[str, Any]:
    """Figures of plain decoding and TriForce, run in alternating order; times are medians."""
    lookaheads = settings.speculation.effective
    plain: list[Measurement] = []
    speculative: list[Measurement] = []
    for repeat in range(load.repeats + 1):  # the first run of each mode is a warm-up
        modes = [(plain, (0, 0), "plain"), (speculative, lookaheads, "TriForce, synthetic acceptance")]
        for runs, each, name in modes if repeat % 2 == 0 else reversed(modes):
            runs.append(Measurement(engine, Request(prompt, load.output, GREEDY, load.seed, each)))
            report(f"{name} {repeat}/{load.repeats}: {runs[-1].ms_per_token:.2f} ms a token")
    plain_ms = statistics.median(run.ms_per_token for run in plain[1:])
    triforce_ms = statistics.median(run.ms_per_token for run in speculative[1:])
    last = speculative[-1]
    return {
        "output": load.output,
        "lookaheads": list(lookaheads),
        "plain_ms_per_token": plain_ms,
        "triforce_ms_per_token": triforce_ms,
        "speedup": plain_ms / triforce_ms,
        "tokens_per_round": last.stats.tokens_per_round,
        "passes": {tier: passes for tier, (passes, _) in last.steps.items()},
        "acceptance": {**last.stats.acceptance, "asked": asdict(load.acceptance), "synthetic": True},
    }


def stages(
    engine: Engine, settings: Settings, load: DeviceWorkload, prompt: tuple[int, ...], peaks: Peaks
) -> dict[str, Any]:
    """Figures of single passes on a sequence of `context` tokens, and of the prefill of at most that many."""
    [sequence] = decoding(engine, [prompt], settings.speculation.effective, GREEDY)
    retrieval = level_below(engine.decoder)
    assert isinstance(engine.decoder, SpeculativeDecoder)
    assert isinstance(retrieval, SpeculativeDecoder)
    runners = runners_of(engine)
    judged = settings.speculation.effective[1] + 1

    def stage(tier: Tier, run: Callable[[], object], tokens: int) -> dict[str, Any]:
        taken, moved = seconds(run, torch_device(settings.device)), bytes_read(runners[tier], sequence, tokens)
        share = moved / taken / 1e9 / peaks.copy_gb_s
        return {"tokens": tokens, "ms": 1e3 * taken, "bytes": moved, "share": share}

    step = stage(Tier.RETRIEVAL, verifying(retrieval.verifier, [sequence], judged), judged)
    return {
        "draft": stage(Tier.DRAFT, drafting(retrieval.proposer, [sequence]), 1),
        "retrieval": step | {"roofline": 1 / step["share"]},  # of the weights and its own KV
        "verify": {
            str(tokens): stage(Tier.TARGET, verifying(engine.decoder.verifier, [sequence], tokens), tokens)
            for tokens in VERIFIED
        },
        "prefill": prefill(runners[Tier.TARGET], settings, prompt[: load.prefill], peaks),
    }


def bytes_read(runner: ModelRunner, sequence: Sequence, tokens: int) -> int:
    """Bytes that a pass over the last `tokens` tokens of a sequence must read: the KV that it sees, and all weights
    except a separate table of input embeddings, of which a pass reads a few rows only.
    """
    table, head = tables(runner.model)
    weights = weight_bytes(runner.model) - (0 if table is head else tensor_bytes(table))
    [row] = runner.kv.prepare([Forward(newest(sequence), tokens)]).rows
    seen = sum(stop - start for start, stop in row.placed.visible) + len(row.placed.tokens)
    return weights + seen * runner.kv.geometry.bytes_per_token


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

    taken = seconds(run, runner.kv.geometry.device)
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
