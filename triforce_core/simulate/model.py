"""The protocol of the three tiers as a discrete-event model: each tier is a station on a device and sends messages.

This module runs a scenario: it creates the arrivals and failures, and collects the result.
"""

from __future__ import annotations

import random

import simpy

from triforce_core.simulate.bound import bound_tokens_per_s
from triforce_core.simulate.measures import Recorder, Result, Window
from triforce_core.simulate.replica import SimulatedReplica
from triforce_core.simulate.requests import Blocks, Request, Verification
from triforce_core.simulate.scenario import Failure, Scenario
from triforce_core.simulate.stage_times import StageTimes
from triforce_core.simulate.stations import Events, Station
from triforce_core.simulate.tiers import Pipeline


class Simulation:
    """All replicas under one load. A simulation runs until every request that arrived within the duration is served."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.env = simpy.Environment()
        self.times = {tier: StageTimes(scenario.stages.of(tier)) for tier in scenario.tiers}
        self.recorder = Recorder(Window(scenario.warmup_s, scenario.duration_s))
        self.lengths = random.Random(f"{scenario.seed}/lengths")
        self.unfinished, self.arrived = 0, 0
        self.drained = self.env.event()
        self.pipelines = [
            Pipeline(SimulatedReplica(self.env, self.recorder, scenario, self.times, index, self.finished))
            for index in range(scenario.replicas)
        ]

    def run(self) -> Result:
        self.env.process(self._arrivals())
        for index, pipeline in enumerate(self.pipelines):
            for station in pipeline.draft, pipeline.retrieval, pipeline.target:
                failure = self.scenario.failures.of(station.tier)
                if failure is not None and station.tier in self.scenario.tiers:
                    self.env.process(self._failures(station, failure, index))
        self.env.run(until=self.drained)
        return self._result()

    def _arrivals(self) -> Events:
        rate = self.scenario.load.rate_per_s
        if rate is None:
            for _ in range(self.scenario.load.concurrency or 0):
                self._submit()
            yield self.env.timeout(self.scenario.duration_s)
        else:
            gaps = random.Random(f"{self.scenario.seed}/arrivals")
            while self.env.now + (gap := gaps.expovariate(rate)) < self.scenario.duration_s:
                yield self.env.timeout(gap)
                self._submit()
            yield self.env.timeout(self.scenario.duration_s - self.env.now)
        self._close_when_drained()

    def _submit(self) -> None:
        """Send a new request to the replica with the fewest requests."""
        load = self.scenario.load
        request = Request(
            arrived_s=self.env.now,
            prompt_tokens=self.lengths.choice(load.prompt_tokens),
            output_tokens=self.lengths.choice(load.output_tokens),
            chance=random.Random(f"{self.scenario.seed}/request/{self.arrived}"),
        )
        self.arrived += 1
        self.unfinished += 1
        min(self.pipelines, key=lambda pipeline: pipeline.replica.load).submit(request)

    def finished(self) -> None:
        """Note that a request is served; in a closed loop its user then sends the next."""
        self.unfinished -= 1
        if self.env.now < self.scenario.duration_s:
            if self.scenario.load.concurrency is not None:
                self._submit()
        else:
            self._close_when_drained()

    def _close_when_drained(self) -> None:
        if not self.unfinished and not self.drained.triggered:
            self.drained.succeed()

    def _failures(self, station: Station[Blocks] | Station[Verification], failure: Failure, index: int) -> Events:
        clock = random.Random(f"{self.scenario.seed}/failures/{index}/{station.tier.name}")
        while True:
            yield self.env.timeout(clock.expovariate(1 / failure.mtbf_s))
            station.fail()
            yield self.env.timeout(failure.recovery_s)
            station.recover()

    def _result(self) -> Result:
        queues: dict[str, float] = {}
        failures: dict[str, int] = {}
        for index, pipeline in enumerate(self.pipelines):
            queues[f"{index}/admission"] = pipeline.replica.queue.mean_length
            for station in pipeline.draft, pipeline.retrieval, pipeline.target:
                name = station.tier.name.lower()
                if station.tier in self.scenario.tiers:
                    queues[f"{index}/{name}"] = station.line.mean_length
                if self.scenario.failures.of(station.tier) is not None:
                    failures[name] = failures.get(name, 0) + station.failures
        return Result(
            recorder=self.recorder,
            passes={device.name: device.passes for pipeline in self.pipelines for device in pipeline.replica.devices},
            mean_queues=queues,
            failures=failures,
            bound_tokens_per_s=bound_tokens_per_s(self.scenario),
            with_prefill=self.scenario.prefill is not None,
        )


def simulate(scenario: Scenario) -> Result:
    """Run a scenario; the same scenario gives the same result."""
    return Simulation(scenario).run()
