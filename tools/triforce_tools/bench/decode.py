"""`triforce bench decode`: plain decoding against TriForce on the same held-out text, in one process and one run. The
controller, which chooses between the two and other plans, takes its turn as well.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from triforce_core.config import Settings
from triforce_core.engine.engine import Engine, run_to_end
from triforce_core.engine.inspection import kernels_of, runners_of
from triforce_core.engine.loading import load_local_engine
from triforce_core.engine.local_threads import choose_threads
from triforce_core.engine.sequence import Request, Stats
from triforce_core.errors import require
from triforce_core.messages import SamplingParams
from triforce_core.models.cpu import cpu_summary
from triforce_core.models.device import DTYPES
from triforce_core.models.files import load_tokenizer, resolve
from triforce_core.models.rank_group import Leader
from triforce_core.models.threads import ALL_THREADS, run_on
from triforce_tools.bench.pairs import pooled, speculative_share
from triforce_tools.bench.prompts import held_out_tokens

Report = Callable[[str], None]
Steps = dict[str, tuple[int, float]]  # forward passes and their seconds, by tier


class Measurement:
    """One request decoded by one engine: its tokens, its statistics, and the passes of each tier after the prefill."""

    def __init__(self, engine: Engine, request: Request) -> None:
        before: Steps = {}
        tokens: list[int] = []
        for output in run_to_end(engine, [request]):
            if not tokens:  # the prompt's passes are not decoding steps
                before = counters(engine)
            tokens += output.tokens
            self.stats: Stats = output.stats
        self.tokens = tokens
        self.steps = {
            tier: (passes - before[tier][0], seconds - before[tier][1])
            for tier, (passes, seconds) in counters(engine).items()
        }

    @property
    def ms_per_token(self) -> float:
        assert self.stats.ms_per_token is not None
        return self.stats.ms_per_token


def counters(engine: Engine) -> Steps:
    """Forward passes so far and their seconds, by tier."""
    return {tier.name.lower(): (runner.passes, runner.seconds) for tier, runner in runners_of(engine).items()}


def step_ms(runs: list[Measurement], tier: str) -> float | None:
    steps = [run.steps.get(tier, (0, 0.0)) for run in runs]
    passes, seconds = (sum(values) for values in zip(*steps, strict=True))
    return 1e3 * seconds / passes if passes else None


def repeated_share(tokens: list[int], n: int = 16) -> float:
    """Share of the output's n-grams that repeat an earlier one. Near 1, drafting is easy."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def bench_decode(
    settings: Settings,
    *,
    context: int,
    output: int,
    sampling: SamplingParams,
    seed: int,
    repeats: int,
    first_file: int,
    with_transformers: bool,
    report: Report,
    ranks: Leader | None = None,
) -> dict[str, Any]:
    """Run the benchmark and return its figures. Every run has its own prefill; the modes alternate."""
    load_before = os.getloadavg()[0]
    require(output >= 2, "output", output, "must be at least 2: the time from one token to the next is measured")
    engine = load_local_engine(settings.cold, ranks=ranks)
    prompt = tuple(held_out_tokens(load_tokenizer(settings.target.model), context, first_file))
    choose_threads(engine, settings, report)
    threads = {tier.name.lower(): runner.threads for tier, runner in runners_of(engine).items()}

    def run(lookaheads: tuple[int, int] | None, max_tokens: int = output) -> Measurement:
        return Measurement(engine, Request(prompt, max_tokens, sampling, seed, lookaheads))

    run(settings.speculation.effective, min(output, 32))  # warm-up: memory, threads, caches
    plain: list[Measurement] = []
    speculative: list[Measurement] = []
    controlled: list[Measurement] = []
    for repeat in range(repeats):
        modes = [
            (plain, (0, 0), "plain"),
            (speculative, settings.speculation.effective, "TriForce"),
            (controlled, None, "controller"),
        ]
        for runs, lookaheads, name in modes if repeat % 2 == 0 else reversed(modes):
            runs.append(run(lookaheads))
            report(f"{name} {repeat + 1}/{repeats}: {runs[-1].ms_per_token:.2f} ms a token")
    last = speculative[-1].stats
    plain_ms = statistics.median(r.ms_per_token for r in plain)
    triforce_ms = statistics.median(r.ms_per_token for r in speculative)
    controller_ms = statistics.median(r.ms_per_token for r in controlled)
    result: dict[str, Any] = {
        "context": context,
        "output": output,
        "drafter": settings.draft.model,
        "dtype": settings.dtype,
        "kernels": {tier.name.lower(): kernels_of(each) for tier, each in runners_of(engine).items()},
        "temperature": sampling.temperature,
        "lookaheads": list(settings.speculation.effective),
        "budget": settings.retrieval.budget,
        "chunk": settings.retrieval.chunk,
        "self_drafter_quantization": settings.retrieval.quantization,
        "cpu": cpu_summary(),
        "threads": {tier: each and each._asdict() for tier, each in threads.items()},
        "autoregressive_ms_per_token": plain_ms,
        "triforce_ms_per_token": triforce_ms,
        "speedup": plain_ms / triforce_ms,
        "controller_ms_per_token": controller_ms,
        "controller_speedup": plain_ms / controller_ms,
        "controller_speculative_share": speculative_share(pooled(r.stats for r in controlled)),
        "noise": (max(r.ms_per_token for r in plain) - min(r.ms_per_token for r in plain)) / plain_ms,
        "identical": all(r.tokens == plain[0].tokens for r in [*plain, *speculative, *controlled]),
        "tokens_per_round": last.tokens_per_round,
        "acceptance": last.acceptance,
        "repeated_16gram_share": repeated_share(plain[0].tokens),
        "step_ms": {
            "draft": step_ms(speculative, "draft"),
            "retrieval": step_ms(speculative, "retrieval"),
            "target": step_ms(speculative, "target"),
            "plain": step_ms(plain, "target"),
        },
        "prefill_s": statistics.median(r.stats.prefill_s for r in [*plain, *speculative, *controlled]),
    }
    if with_transformers:
        result["transformers"] = transformers_decode(settings, list(prompt), output, report)
    result["load_average"] = [load_before, os.getloadavg()[0]]
    return result


def transformers_decode(settings: Settings, prompt: list[int], output: int, report: Report) -> dict[str, float]:
    """transformers' own greedy `generate` with SDPA on the same prompt and dtype: prefill seconds, ms per token.

    Both are measured with one thread and with all threads, and the better result of each is returned.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        resolve(settings.target.model, "target"), dtype=DTYPES[settings.dtype], attn_implementation="sdpa"
    )
    model = model.to(settings.device).eval()  # type: ignore[arg-type]
    ids = torch.tensor([prompt], device=settings.device)

    def seconds(new_tokens: int) -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            model.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return time.perf_counter() - started

    seconds(1)  # warm-up
    measured = []
    for count in sorted({1, ALL_THREADS}):
        run_on(count)
        prefill = statistics.median(seconds(1) for _ in range(3))
        measured.append((prefill, 1e3 * (seconds(output) - prefill) / (output - 1)))
        report(f"transformers generate, {count} threads: prefill {prefill:.2f} s, {measured[-1][1]:.2f} ms a token")
    prefills, steps = zip(*measured, strict=True)
    return {"prefill_s": min(prefills), "ms_per_token": min(steps)}
