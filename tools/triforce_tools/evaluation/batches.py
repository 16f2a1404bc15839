"""Tokens a second by batch, with the same memory for each cache: what H2O gains is a larger batch (arXiv 2306.14048).

Only decoding is timed. While the prompts of a batch are read, requests that have begun decode a little; so requests may
write more than is timed, and the clock runs from the moment when all have begun.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from triforce_core.building.inspection import runners_of
from triforce_core.building.loading import load_local_engine
from triforce_core.config import Settings
from triforce_core.engine.engine import Engine, run_to_end
from triforce_core.engine.sequence import Request
from triforce_core.errors import require
from triforce_core.kv.base import KVCache
from triforce_core.kv.full import FullKV
from triforce_core.kv.heavy_hitter import HeavyHitterKV
from triforce_core.messages import GREEDY, Tier

FULL_REQUESTS = 4  # the memory is that of so many full caches
TIMED = 96  # tokens of each request that are timed, in the mean
OUTPUT = 384  # tokens that each request may have, so that none ends before the clock stops
WARM_UP = 256  # tokens of a prompt that is decoded before, with the same engine
KINDS = ("full", "heavy_hitter", "triforce")


def check_batches(settings: Settings, context: int, longest: int) -> None:
    """Raises `InvalidValueError` for settings that the three caches cannot share."""
    require(settings.target.offload == "none", "target.offload", settings.target.offload, "must be none for batches")
    require(settings.target.audit == 0, "target.audit", settings.target.audit, "must be 0 for batches")
    drafts = any(settings.speculation.effective)
    require(drafts, "speculation", settings.speculation.effective, "must draft: TriForce is measured too")
    most = longest - 2 * OUTPUT
    require(context <= most, "context", context, f"must be at most {most} tokens, to leave room for outputs")


def measure_batches(
    settings: Settings, prompts: Sequence[tuple[int, ...]], begin: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A row for each cache and batch that fits: 1, 2, 4 … requests, and as many as there is room for; measured once.

    Args:
        settings: those of TriForce. The other caches have the same models and precision, and H2O's budget is that of
            the retrieval tier.
        prompts: token ids, all of one length. Requests take them in turn.
    """
    length, memory, rows = len(prompts[0]) + OUTPUT, 0, []
    for kind in KINDS:
        begin(f"batches, {kind}")
        each = kv_bytes(kind, engine_for(kind, settings, 1, length))
        memory = memory or FULL_REQUESTS * each
        for batch in up_to(memory // each):
            some = [prompts[number % len(prompts)] for number in range(batch)]
            # A large batch begins late, and H2O's cache has room for any length.
            output = 2 * OUTPUT if kind == "heavy_hitter" else OUTPUT
            rate = decoding_rate(engine_for(kind, settings, batch, length), some, output)
            rows.append(
                {"cache": kind, "batch": batch, "kv_bytes": batch * each, "memory": memory, "tokens_per_s": rate}
            )
    return rows


def up_to(most: int) -> list[int]:
    """Powers of two below `most`, and `most` itself; none if that is 0."""
    return [2**n for n in range(most.bit_length()) if 2**n < most] + [most] * (most > 0)


def engine_for(kind: str, settings: Settings, requests: int, length: int) -> Engine:
    """An engine with room for so many requests of `length` tokens. Its turns are not bounded in time, so that all
    requests are soon decoded together.
    """
    target: dict[str, Any] = {"max_stall_ms": None, "kv_pool_tokens": requests * length}
    if kind == "heavy_hitter":
        target |= {"kv_pool_tokens": None, "eviction": kind, "kv_budget": settings.retrieval.budget}
    given = settings.model_dump(exclude_defaults=True)
    given |= {"max_sequences": requests, "target": given.get("target", {}) | target}
    if kind != "triforce":
        given["speculation"] = {"tiers": "target"}
    free_memory(settings)
    return load_local_engine(Settings.model_validate(given))


def free_memory(settings: Settings) -> None:
    """Give back the memory of an engine that nobody uses any more: its parts refer to each other, and hold it."""
    gc.collect()
    if settings.device_type == "cuda":
        torch.cuda.empty_cache()


def kv_bytes(kind: str, engine: Engine) -> int:
    """The bytes of the caches, H2O's queries included. The caches of the lower tiers count for TriForce alone."""
    used = [runner.kv for tier, runner in runners_of(engine).items() if kind == "triforce" or tier is Tier.TARGET]
    tensors = [pool for kv in used if isinstance(kv, KVCache) for pool in kv.pools]
    for kv in used:
        if isinstance(kv, FullKV) and kv.landmarks:
            tensors += kv.landmarks.layers
        elif isinstance(kv, HeavyHitterKV):
            tensors += kv.queries
    return sum(tensor.nbytes for tensor in tensors)


def decoding_rate(engine: Engine, prompts: Sequence[tuple[int, ...]], output: int) -> float:
    """Tokens a second of all requests together, while each writes `TIMED` tokens in the mean, or until one has written
    the `output` tokens that it may have.
    """
    list(run_to_end(engine, [Request(prompts[0][:WARM_UP], TIMED // 2, GREEDY, 0, lookaheads=None)]))
    waiting = {
        engine.submit(Request(prompt, output, GREEDY, number, lookaheads=None)) for number, prompt in enumerate(prompts)
    }
    count, started = 0, 0.0
    while count < TIMED * len(prompts):
        outputs = engine.run_once()
        now = time.perf_counter()
        if started:
            count += sum(len(each.tokens) for each in outputs)
        waiting -= {each.sequence_id for each in outputs if each.tokens}
        started = started or (0.0 if waiting else now)
        if any(each.finish_reason for each in outputs):
            break
    return count / (now - started) if count else 0.0
