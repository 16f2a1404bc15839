"""Tokens a second by batch, with the same memory for each cache: what H2O gains is a larger batch (arXiv 2306.14048).

Only decoding is timed: from the moment when all requests of a batch have their first token until one has its last.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from triforce_core.config import Settings
from triforce_core.engine.engine import Engine
from triforce_core.engine.inspection import runners_of
from triforce_core.engine.loading import load_local_engine
from triforce_core.engine.sequence import Request
from triforce_core.evaluation.walk import Watch
from triforce_core.messages import GREEDY

Row = dict[str, Any]

FULL_REQUESTS = 4  # the memory is that of so many full caches
OUTPUT = 192  # tokens of each request
KINDS = ("full", "heavy_hitter", "triforce")


def measure_batches(settings: Settings, prompts: Sequence[tuple[int, ...]], watch: Watch) -> list[Row]:
    """A row for each cache and batch that fits: 1, 2, 4 … requests, and as many as there is room for.

    Args:
        settings: those of TriForce. The other caches have the same models and precision, and H2O's budget is that of
            the retrieval tier.
        prompts: token ids, all of one length. Requests take them in turn.
    """
    length, memory, rows = len(prompts[0]) + OUTPUT, 0, []
    for kind in KINDS:
        watch.begin(f"batches, {kind}")
        each = kv_bytes(engine_for(kind, settings, 1, length))
        memory = memory or FULL_REQUESTS * each
        for batch in up_to(memory // each):
            engine = engine_for(kind, settings, batch, length)
            requests = [
                Request(prompts[number % len(prompts)], OUTPUT, GREEDY, number, lookaheads=None)
                for number in range(batch)
            ]
            rate = decoding_rate(engine, requests)
            rows.append(
                {"cache": kind, "batch": batch, "kv_bytes": kv_bytes(engine), "memory": memory, "tokens_per_s": rate}
            )
    return rows


def up_to(most: int) -> list[int]:
    """Powers of two below `most`, and `most` itself; none if that is 0."""
    return [2**n for n in range(most.bit_length()) if 2**n < most] + [most] * (most > 0)


def engine_for(kind: str, settings: Settings, requests: int, length: int) -> Engine:
    """An engine with room for so many requests of `length` tokens. Its turns are not bounded in time, so that all
    requests are soon decoded together.
    """
    target: dict[str, Any] = {"max_stall_ms": None, "kv_pool_tokens": None}
    if kind == "heavy_hitter":
        target |= {"eviction": kind, "kv_budget": settings.retrieval.budget}
    else:
        target |= {"kv_pool_tokens": requests * length}
    given = settings.model_dump(exclude_defaults=True)
    given |= {"max_sequences": requests, "target": given.get("target", {}) | target}
    if kind != "triforce":
        given["speculation"] = {"tiers": "target"}
    return load_local_engine(Settings.model_validate(given))


def kv_bytes(engine: Engine) -> int:
    """What the caches of all its tiers take, H2O's queries included."""
    caches = [runner.kv for runner in runners_of(engine).values()]
    pools = [pool for kv in caches for name in ("keys", "values", "queries") for pool in getattr(kv, name, ())]
    return sum(pool.nbytes for pool in pools)


def decoding_rate(engine: Engine, requests: Sequence[Request]) -> float:
    """Tokens a second of all requests together."""
    waiting = {engine.submit(request) for request in requests}
    count, started = 0, 0.0
    while True:
        outputs = engine.run_once()
        now = time.perf_counter()
        if started:
            count += sum(len(output.tokens) for output in outputs)
        if any(output.finish_reason for output in outputs):
            assert started, "no request is decoded to its end before the last has begun"
            return count / (now - started)
        waiting -= {output.sequence_id for output in outputs if output.tokens}
        started = started or (0.0 if waiting else now)
