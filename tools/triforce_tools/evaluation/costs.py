"""What selecting costs: the milliseconds of a cut by context, beside a verification pass of the target in the same run.

The caches hold random KV, as times do not depend on its values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from triforce_core.config import Settings
from triforce_core.kv.snapshot import ChunkSettings
from triforce_core.messages import Span
from triforce_core.models.files import kv_shape
from triforce_tools.bench.fill import fill
from triforce_tools.evaluation.caches import selector_named
from triforce_tools.evaluation.plan import EvalPlan
from triforce_tools.evaluation.reading import SEQUENCE, Model, Reading
from triforce_tools.evaluation.texts import Stretch
from triforce_tools.evaluation.walk import Watch

Row = dict[str, Any]

TURNS = 5  # of which the medians are reported, after a warm-up
PREFILL_TURNS = 2
PREFILL = 4096  # tokens, or the greatest length if that is less


def measure_costs(
    target: Model, selectors: Sequence[str], plan: EvalPlan, settings: Settings, watch: Watch
) -> list[Row]:
    """A row for each context and selector: the first cut, a refresh `refresh_every` tokens later, a verification pass.

    `share_of_decoding` is the most of the target's time that refreshes take: when every drafted token is accepted, so
    that the fewest passes lie between two refreshes.
    """
    rows = []
    block, every = settings.speculation.effective[0] + 1, settings.retrieval.refresh_every
    for context in plan.lengths:
        times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in selectors}
        watch.begin(f"costs at {context}")
        for turn in range(TURNS + 1):
            for name in selectors if turn % 2 else reversed(selectors):
                times[name].append(_turn(target, name, context, block, settings))
        for name in selectors:
            first, refresh, verify = (median(each) for each in zip(*times[name][1:], strict=True))
            rows.append(
                {
                    "context": context,
                    "selector": name,
                    "first_cut_ms": first,
                    "refresh_ms": refresh,
                    "verify_ms": verify,
                    "refresh_over_verify": refresh / verify,
                    "share_of_decoding": refresh / (refresh + every / block * verify),
                }
            )
    return rows


def measure_prefills(target: Model, selectors: Sequence[str], plan: EvalPlan, chunk: int, watch: Watch) -> list[Row]:
    """A row for each selector: the milliseconds in which the target reads a prompt and keeps what the selector needs,
    and their ratio to those of the first selector.
    """
    context = min(PREFILL, max(plan.lengths))
    watch.begin(f"prefill of {context}")
    tokens = tuple(position % target.model.config.vocab_size for position in range(context))
    times: dict[str, list[float]] = {name: [] for name in selectors}
    for turn in range(PREFILL_TURNS):
        for name in selectors if turn % 2 else reversed(selectors):
            reading = Reading(target, target, tokens, chunk, [name])
            times[name].append(_ms(target, partial(reading.read, context)))
    fastest = {name: min(each) for name, each in times.items()}
    first = fastest[selectors[0]]
    return [
        {"context": context, "selector": name, "prefill_ms": ms, "over_first": ms / first}
        for name, ms in fastest.items()
    ]


def _turn(target: Model, name: str, context: int, block: int, settings: Settings) -> tuple[float, float, float]:
    """Milliseconds of the first cut at `context`, of the next one, and of a pass over `block` tokens."""
    every, budget, chunk = settings.retrieval.refresh_every, settings.retrieval.budget, settings.retrieval.chunk
    tokens = tuple(position % target.model.config.vocab_size for position in range(context + every + block + 1))
    selector = selector_named(name)
    reading = Reading(target, target, tokens, chunk, [name])
    full, chunks = reading.full, ChunkSettings.halved(budget, chunk)
    config = target.model.config
    group = config.num_attention_heads // kv_shape(config)[1]
    fill(full, Span(SEQUENCE, 0, tokens[:context], reading.spec), group)
    first = _ms(target, lambda: full.cut(SEQUENCE, context, chunks, selector))
    later = context + every
    reading.logits(Stretch(context, later, seen=context))
    refresh = _ms(target, lambda: full.cut(SEQUENCE, later, chunks, selector, base=1))
    return first, refresh, _ms(target, lambda: reading.logits(Stretch(later, later + block, seen=later)))


def _ms(model: Model, work: Callable[[], object]) -> float:
    """The milliseconds of the work, on the device too."""

    def now() -> float:
        if model.geometry.device.type == "cuda":
            torch.cuda.synchronize(model.geometry.device)
        return time.perf_counter()

    started = now()
    work()
    return 1e3 * (now() - started)
