"""The parts of a replica that its tiers share: requests, devices and the links between tiers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from math import ceil

import simpy

from triforce_core.messages import Tier
from triforce_core.simulate.measures import Arrival, Finished, Recorder
from triforce_core.simulate.requests import Block, Request
from triforce_core.simulate.scenario import Scenario, device_name
from triforce_core.simulate.stage_times import StageTimes
from triforce_core.simulate.stations import Device, Line


class SimulatedReplica:
    """One of the replicas that share the load; its tiers are in `tiers.Pipeline`."""

    def __init__(
        self,
        env: simpy.Environment,
        recorder: Recorder,
        scenario: Scenario,
        times: Mapping[Tier, StageTimes],
        index: int,
        on_finished: Callable[[], None],
    ) -> None:
        self.env, self.recorder, self.on_finished = env, recorder, on_finished
        self.scenario, self.times = scenario, times
        self.network = random.Random(f"{scenario.seed}/network/{index}")
        self.links = {upper: scenario.link_s(upper, Tier(upper - 1)) for upper in (Tier.RETRIEVAL, Tier.TARGET)}
        self.live: list[Request] = []
        self.queue: Line[Request] = Line(env, recorder.window)
        self.devices = [Device(env, f"{index}/{device_name(tiers)}") for tiers in scenario.devices]

    def device_of(self, tier: Tier) -> Device:
        """The device that runs the tier. Any device will do for a tier that the lookaheads skip, as it never runs."""
        for device, tiers in zip(self.devices, self.scenario.devices, strict=True):
            if tier in tiers:
                return device
        return self.devices[0]

    @property
    def sequential(self) -> bool:
        return self.scenario.micro_batches == 1

    @property
    def decoding(self) -> int:
        """Number of live requests whose prefill is done."""
        return sum(not request.unread for request in self.live)

    @property
    def micro_batch(self) -> int:
        """Most requests in a verification pass."""
        return ceil(self.decoding / self.scenario.micro_batches)

    @property
    def load(self) -> int:
        return len(self.live) + len(self.queue)

    def queue_up(self, request: Request) -> None:
        self.recorder.arrivals.append(Arrival(self.env.now, len(self.queue)))
        self.queue.add([request])

    def admit(self) -> list[Request]:
        """Let waiting requests go live in the order of their arrival while there is room; returns them."""
        room = self.scenario.max_sequences - len(self.live)
        admitted = self.queue.take(list(self.queue)[:room])
        self.live += admitted
        return admitted

    def release(self, request: Request) -> None:
        """Remove a request that is served."""
        self.live.remove(request)
        self.recorder.finished.append(
            Finished(request.arrived_s, request.first_token_s, self.env.now, request.output_tokens)
        )
        self.on_finished()

    def send(self, blocks: list[Block], one: Tier, other: Tier, receive: Callable[[list[Block]], None]) -> None:
        """Send blocks in one message over the link between two tiers, in either direction."""
        if not blocks:
            return
        seconds, jitter_s = self.links[max(one, other)]
        if jitter_s:
            seconds += self.network.uniform(0, jitter_s)
        if seconds:
            arrival = self.env.timeout(seconds)
            arrival.callbacks.append(lambda _: receive(blocks))
        else:
            receive(blocks)
