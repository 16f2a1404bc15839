"""Requests through a running pipeline, and what comes of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from actors.pipeline import Pipeline
from actors.wire import stats_from_proto
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.engine.sequence import Stats


@dataclass
class Decoded:
    """What came of a request."""

    tokens: list[int] = field(default_factory=list)
    origins: bytes = b""
    finish_reason: int = gen.FINISH_REASON_UNSPECIFIED
    stats: list[Stats] = field(default_factory=list)  # of the last event, or of each


class Tiers:
    """A pipeline and the loop that it lives on."""

    def __init__(self, pipeline: Pipeline, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self.pipeline, self.run = pipeline, run

    def decode(self, *requests: pb.DecodeRequest) -> list[Decoded]:
        """Decode all requests at once."""

        async def every() -> list[Decoded]:
            return await asyncio.gather(*(self.collect(request) for request in requests))

        decoded: list[Decoded] = self.run(every())
        return decoded

    async def collect(self, request: pb.DecodeRequest) -> Decoded:
        decoded = Decoded()
        async for event in self.pipeline.decode(request):
            decoded.tokens += event.token_ids
            decoded.origins += event.origins
            decoded.finish_reason = event.finish_reason
            if event.HasField("stats"):
                decoded.stats.append(stats_from_proto(event.stats))
        return decoded

    def status(self) -> dict[str, pb.TierStatus]:
        return {status.tier: status for status in self.run(self.pipeline.status())}

    def links(self) -> dict[str, pb.LinkCounters]:
        return {link.link: link for status in self.status().values() for link in status.links}

    def live(self) -> dict[str, int]:
        return {tier: status.live_sequences for tier, status in self.status().items()}

    def wait_idle(self, timeout_s: float = 5.0) -> None:
        until = time.monotonic() + timeout_s
        while any((live := self.live()).values()):
            assert time.monotonic() < until, f"still held after {timeout_s} s: {live}"
            time.sleep(0.02)
