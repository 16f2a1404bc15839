"""Requests that are decoded together, timed while all of them decode: prompts are not counted, nor is an end at which
fewer are left.
"""

from __future__ import annotations

import time

from triforce_core.bench.decode import Steps, counters
from triforce_core.bench.pairs import pooled
from triforce_core.engine.engine import Engine
from triforce_core.engine.sequence import Request, Stats
from triforce_core.errors import require


class Together:
    """From when the last request has its first token, until they have `output` more tokens each on average. The
    requests must have room for more tokens than that, for the first ones decode while the prompts of others are read;
    otherwise `InvalidValueError` is raised.
    """

    def __init__(self, engine: Engine, requests: list[Request], output: int) -> None:
        live = {engine.submit(request) for request in requests}
        began, before, started = 0.0, Steps(), set[int]()
        stats: dict[int, Stats] = {}
        self.requests, self.tokens = len(requests), 0
        rule = "are not decoded together for long enough: one had all its tokens before; give fewer or shorter prompts"
        while self.tokens < output * len(requests):
            all_decode = len(started) == len(requests)
            if all_decode and not before:
                began, before = time.perf_counter(), counters(engine)
            for each in engine.run_once():
                require(each.finish_reason is None, "requests", len(requests), rule)
                stats[each.sequence_id] = each.stats
                started.add(each.sequence_id)
                self.tokens += len(each.tokens) if all_decode else 0
        self.taken_s = time.perf_counter() - began
        self.passes = {tier: passes - before[tier][0] for tier, (passes, _) in counters(engine).items()}
        self.stats = pooled(stats.values())  # of all their rounds, those before included
        finish(engine, live)

    @property
    def ms_per_token(self) -> float:
        """From one token of a request to its next."""
        return 1e3 * self.taken_s * self.requests / self.tokens


def finish(engine: Engine, request_ids: set[int]) -> None:
    """End these requests, so that others have their room."""
    for each in request_ids:
        engine.cancel(each)
    while not engine.idle:
        engine.run_once()
