"""Runs loads through three tier actors under one schedule, and measures the runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any, TypeVar

import ray
from ray.util import remove_placement_group

from actors.pipeline import Pipeline
from actors.placement import place_tiers, reserve
from actors.tiers import RetrievalActor, TargetActor
from actors.warm_up import warm_up
from actors.wire import stats_from_proto
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import Settings
from triforce_core.doorbell import Doorbell
from triforce_core.engine.sequence import Stats
from triforce_core.messages import Proposal, Proposer, Span, Tally, Tier, Work
from triforce_tools.tiers.paced import PACED, Pace
from triforce_tools.tiers.timeline import Stage, start_recording, take_stages

T = TypeVar("T")


@dataclass
class Decoded:
    """One request as its client saw it."""

    prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # monotonic seconds, tokens
    stats: list[Stats] = field(default_factory=list)  # after each arrival


@dataclass
class Run:
    """Some requests decoded together. All of them were decoding from `begin` to `end`, in monotonic seconds."""

    decoded: list[Decoded]
    stages: list[Stage]
    link_bytes: int  # carried by both links, in both directions, from `begin` on

    @property
    def begin(self) -> float:
        return max(d.arrivals[0][0] for d in self.decoded)

    @property
    def end(self) -> float:
        return min(d.arrivals[-1][0] for d in self.decoded)

    @property
    def num_tokens(self) -> int:
        """Tokens decoded between `begin` and `end`."""
        return sum(n for d in self.decoded for moment, n in d.arrivals if self.begin < moment <= self.end)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / (self.end - self.begin)

    def tally(self, level: int) -> Tally:
        """The counts of a level over the whole run, summed over all requests; level 0 is the target."""
        return sum((d.stats[-1].tallies[level] for d in self.decoded), Tally())

    def within(self, tier: Tier) -> list[Stage]:
        return [s for s in self.stages if s.tier == tier and self.begin <= s.start and s.stop <= self.end]

    def stage_ms(self, tier: Tier) -> float | None:
        """Mean milliseconds of a pass, or of a step in the draft tier; None if there was none."""
        stages = self.within(tier)
        return 1e3 * mean(s.stop - s.start for s in stages) if stages else None

    def core_ms(self, tier: Tier) -> float | None:
        """Mean milliseconds for which the tier's thread had a core during a pass or step; None if there was none."""
        stages = self.within(tier)
        return 1e3 * mean(s.cpu for s in stages) if stages else None

    def mean_batch(self, tier: Tier) -> float:
        stages = self.within(tier)
        return mean(s.batch for s in stages) if stages else 1.0

    def busy_share(self, tier: Tier) -> float:
        return sum(s.stop - s.start for s in self.within(tier)) / (self.end - self.begin)


class Arrangement:
    """The tier actors of one schedule, which live until `stop`."""

    def __init__(self, settings: Settings, runner: asyncio.Runner, pace: Pace | None) -> None:
        self.runner = runner
        self.group = reserve(settings)
        actors = place_tiers(settings, self.group) if pace is None else place_tiers(settings, self.group, PACED, pace)
        self.pipeline = Pipeline(actors)
        self.wait(self.pipeline.connect())
        if pace is None:
            self.wait(warm_up(self.pipeline, settings))
        for actor in actors.each():
            ray.get(actor.__ray_call__.remote(lambda _: start_recording()))

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)

    def run(self, requests: list[pb.DecodeRequest]) -> Run:
        """Decode all requests together, each to its end."""
        self.take_stages()
        decoded = [Decoded() for _ in requests]
        bytes_at_begin = self.wait(self._decode(requests, decoded))
        return Run(decoded, self.take_stages(), self._link_bytes() - bytes_at_begin)

    async def _decode(self, requests: list[pb.DecodeRequest], decoded: list[Decoded]) -> int:
        """Returns how many bytes the links had carried when the last request had its first tokens."""
        waiting = len(requests)
        begun = asyncio.Event()

        async def one(request: pb.DecodeRequest, into: Decoded) -> None:
            nonlocal waiting
            async for event in self.pipeline.decode(request):
                if not into.arrivals:
                    waiting -= 1
                    if not waiting:
                        begun.set()
                into.arrivals.append((time.monotonic(), len(event.token_ids)))
                into.tokens += event.token_ids
                into.stats.append(stats_from_proto(event.stats))

        async def bytes_then() -> int:
            await begun.wait()
            return count_bytes(await self.pipeline.status())

        results = await asyncio.gather(bytes_then(), *map(one, requests, decoded))
        return int(results[0] or 0)

    def _link_bytes(self) -> int:
        return count_bytes(self.wait(self.pipeline.status()))

    def take_stages(self) -> list[Stage]:
        actors = self.pipeline.actors.each()
        taken: list[list[Any]] = ray.get([actor.__ray_call__.remote(lambda _: take_stages()) for actor in actors])
        return [Stage(Tier(tier), *rest) for stages in taken for tier, *rest in stages]

    def hop_ms(self, count: int = 500) -> float:
        """Milliseconds of a round trip of one block between idle target and retrieval actors, without handling time.

        It is the median trip less the median handling time.
        """
        actors = self.pipeline.actors
        ray.get(actors.retrieval.__ray_call__.remote(time_handling))
        trips: list[float] = ray.get(actors.target.__ray_call__.remote(ping, count))
        handled: list[float] = ray.get(actors.retrieval.__ray_call__.remote(handling_times))
        self.take_stages()  # the stages of the pings belong to no run
        return 1e3 * (median(trips) - median(handled))

    def stop(self) -> None:
        self.wait(self.pipeline.stop())
        remove_placement_group(self.group)


class Timed:
    """Wraps a tier's proposer and records, for each batch of work, the seconds from `submit` to its answers."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer
        self.begun = 0.0
        self.times: list[float] = []

    def submit(self, work: list[Work]) -> None:
        self.begun = time.monotonic()
        self.proposer.submit(work)

    def collect(self, timeout_s: float) -> list[Proposal]:
        if answers := self.proposer.collect(timeout_s):
            self.times.append(time.monotonic() - self.begun)
        return answers

    def release(self, sequence_ids: list[int]) -> None:
        self.proposer.release(sequence_ids)


def time_handling(retrieval: RetrievalActor) -> None:
    """Runs in the retrieval actor, whose worker must be idle: begin to record handling times."""
    retrieval.tier_server.proposer = Timed(retrieval.tier_server.proposer)


def handling_times(retrieval: RetrievalActor) -> list[float]:
    """Runs in the retrieval actor: end what `time_handling` began, and return the seconds of each batch."""
    timed = retrieval.tier_server.proposer
    assert isinstance(timed, Timed)
    retrieval.tier_server.proposer = timed.proposer
    return timed.times


def ping(target: TargetActor, count: int) -> list[float]:
    """Runs in the target actor: the seconds from sending a block to its answer, for `count` blocks.

    The retrieval tier answers at once, because it does not know the sequences.
    """
    link = target.connect(target.retrieval, 5.0, Doorbell())
    ids = [2**60 + n for n in range(count)]  # unknown ids: the answer is that the beginning is missing
    trips = []
    for sequence_id in ids:
        begin = time.monotonic()
        link.submit([Work(Span(sequence_id, 4096, tuple(range(9))), (8, 0))])
        answers: list[Proposal] = []
        while not answers:
            answers = link.collect(1.0)
        assert answers[0].missing_from == 0
        trips.append(time.monotonic() - begin)
    link.release(ids)
    link.close()
    return trips


def count_bytes(statuses: list[pb.TierStatus]) -> int:
    return sum(link.bytes_in + link.bytes_out for status in statuses for link in status.links)
