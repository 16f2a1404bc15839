"""Requests that are decoded together, timed while all of them decode: prompts are not counted, nor is an end at which
fewer are left.
"""

from __future__ import annotations

import time

from triforce_core.engine.engine import Engine
from triforce_core.engine.sequence import Request, Stats
from triforce_core.errors import require
from triforce_tools.bench.alone import counters
from triforce_tools.bench.pairs import pooled


class Together:
    """From when the last request has its first token and one round more, until they have `output` more tokens each on
    average. That round is told apart (`first_round_s`), for with speculation it begins with the cut of a whole
    snapshot. The requests must have room for more tokens than that, for the first ones decode while the prompts of
    others are read; otherwise `InvalidValueError` is raised.
    """

    def __init__(self, engine: Engine, requests: list[Request], output: int) -> None:
        live = {engine.submit(request) for request in requests}
        started, stats = set[int](), dict[int, Stats]()
        self.requests, self.tokens = len(requests), 0
        rule = "are not decoded together for long enough: one had all its tokens before; give fewer or shorter prompts"

        def turn() -> int:
            """Run the engine once; the number of tokens that came."""
            outputs = engine.run_once()
            for each in outputs:
                require(each.finish_reason is None, "requests", len(requests), rule)
                stats[each.sequence_id] = each.stats
            started.update(each.sequence_id for each in outputs)
            return sum(len(each.tokens) for each in outputs)

        while len(started) < len(requests):
            turn()
        began = time.perf_counter()
        while not turn():
            pass
        self.first_round_s = time.perf_counter() - began
        began, before = time.perf_counter(), counters(engine)
        while self.tokens < output * len(requests):
            self.tokens += turn()
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
