"""The protocol of the three tiers as a discrete-event model: each tier a station on a device, messages between them.

Only counts of tokens are simulated. A request has one block outstanding: it goes down to the retrieval tier, grows
there by rounds of draft and verify, comes up to the target, is verified, and the next one is asked for.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import simpy

from triforce_core.messages import Tier
from triforce_core.simulate.bound import bound_tokens_per_s
from triforce_core.simulate.measures import Arrival, Finished, Recorder, Result, Window
from triforce_core.simulate.scenario import Failure, Scenario, device_name
from triforce_core.simulate.stage_times import StageTimes
from triforce_core.simulate.stations import Device, Events, Line, Station


@dataclass(eq=False, slots=True)
class Request:
    """One request; `chance` decides what is accepted of it, whatever its batch-mates and the placement."""

    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    chance: random.Random
    produced: int = 0
    unread: int = 0  # tokens that the target must prefill before it can decode
    block: Block | None = None  # the one outstanding
    first_token_s: float = 0.0

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.produced

    @property
    def finished(self) -> bool:
        return self.produced == self.output_tokens

    def accepted(self, proposed: int, alpha: float) -> int:
        """How many of the proposed tokens are, up to the first that is not."""
        for count in range(proposed):
            if self.chance.random() >= alpha:
                return count
        return proposed


@dataclass(eq=False, slots=True)
class Block:
    """What the retrieval tier has so far for a request; sent up empty, it is one plain decoding step."""

    request: Request
    asked_s: float
    tokens: int = 0
    drafted: int = 0  # by the draft tier, in the round that runs
    guessed: bool = False  # run-ahead guessed right what the target made of the block before this one
    ahead: bool = False  # nobody has asked for it yet: its first token is the guess of the target's own
    in_round: bool = False  # on its way through draft and retrieval
    void: bool = False  # replaced: whoever meets it drops it


@dataclass(frozen=True, slots=True)
class Blocks:
    """What a draft or a retrieval pass takes."""

    blocks: list[Block]

    @property
    def batch(self) -> int:
        return len(self.blocks)


@dataclass(frozen=True, slots=True)
class Verification:
    """What a target pass takes: blocks, and tokens of prompts beside them."""

    blocks: list[Block]
    chunks: list[tuple[Request, int]]

    @property
    def batch(self) -> int:
        return len(self.blocks) + len(self.chunks)


def mean_context(blocks: list[Block]) -> float:
    return sum(block.request.context for block in blocks) / len(blocks)


class DraftStation(Station[Blocks]):
    """Drafts γ1 tokens in γ1 steps, for all that wait at once. While it is down, rounds go on without it."""

    tier = Tier.DRAFT

    def __init__(self, pipeline: Pipeline, device: Device) -> None:
        super().__init__(pipeline.env, device)
        self.pipeline = pipeline
        self.line: Line[Block] = Line(pipeline.env, pipeline.recorder.window)

    def receive(self, blocks: list[Block]) -> None:
        live = [block for block in blocks if not block.void]
        if self.up:
            self.line.add(live)
            self.wake()
        else:
            self.pipeline.retrieval.drafted(live)

    def ready(self) -> bool:
        return len(self.line) > 0

    def take(self) -> Blocks:
        return Blocks(self.line.take(list(self.line)))

    def seconds(self, taken: Blocks) -> float:
        step_ms = self.pipeline.times[self.tier].ms(taken.batch, 1, mean_context(taken.blocks))
        return self.pipeline.scenario.lookaheads[1] * step_ms / 1e3

    def finish(self, taken: Blocks) -> None:
        for block in taken.blocks:
            block.drafted = self.pipeline.scenario.lookaheads[1]
        self.pipeline.send(taken.blocks, Tier.RETRIEVAL, Tier.DRAFT, self.pipeline.retrieval.drafted)

    def lose(self, taken: Blocks) -> None:
        self.pipeline.retrieval.drafted(taken.blocks)

    def failed(self) -> None:
        self.pipeline.retrieval.drafted(self.line.take(list(self.line)))


class RetrievalStation(Station[Blocks]):
    """Grows blocks round by round until they have γ2 tokens, and never cuts one. While it is down, blocks are empty."""

    tier = Tier.RETRIEVAL

    def __init__(self, pipeline: Pipeline, device: Device) -> None:
        super().__init__(pipeline.env, device)
        self.pipeline = pipeline
        self.line: Line[Block] = Line(
            pipeline.env, pipeline.recorder.window
        )  # drafted (or not), waiting to be verified
        self.growing: dict[Request, Block] = {}  # asked for and not handed up yet
        self.ahead: dict[Request, Block] = {}

    @property
    def lookahead(self) -> int:
        return self.pipeline.scenario.lookaheads[0]

    def receive(self, blocks: list[Block]) -> None:
        """The target asks for these."""
        asked = [block for block in blocks if not block.void]
        if not self.up:
            self.pipeline.target.receive(asked)
            return
        fresh = []
        for block in asked:
            head = self.ahead.pop(block.request, None)
            if head is None or not block.guessed or head.tokens < 1:  # with 0 it holds nothing but the guess
                if head is not None:
                    self._drop(head)
                fresh.append(block)
            else:
                fresh += self._kept(head, block)
        self.growing |= {block.request: block for block in fresh}
        self._go_on(fresh)

    def _kept(self, head: Block, block: Block) -> list[Block]:
        """The head start becomes the block that was asked for; none where its round still runs."""
        head.ahead, head.asked_s = False, block.asked_s
        block.void, block.request.block = True, head
        self.growing[block.request] = head
        return [] if head.in_round else [head]

    def _go_on(self, blocks: list[Block]) -> None:
        """Hand up those that are long enough, start a round of the others."""
        done = [block for block in blocks if block.tokens >= self.lookahead]
        for block in done:
            del self.growing[block.request]
            if self.pipeline.scenario.run_ahead:
                self.ahead[block.request] = Block(block.request, self.env.now, tokens=-1, ahead=True)
        if done:
            self.pipeline.send(done, Tier.TARGET, self.tier, self.pipeline.target.receive)
        self._start_round([block for block in blocks if block.tokens < self.lookahead])
        self._run_ahead()

    def _start_round(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.in_round, block.drafted = True, 0
        if not blocks:
            return
        if self.pipeline.scenario.lookaheads[1] and self.pipeline.draft.up:
            self.pipeline.send(blocks, self.tier, Tier.DRAFT, self.pipeline.draft.receive)
        else:
            self.drafted(blocks)

    def _run_ahead(self) -> None:
        """With nothing real to do and fewer requests than micro-batches, one round of each guess."""
        heads = list(self.ahead.values())
        if self.growing or any(head.in_round for head in heads):
            return
        if len(self.pipeline.live) < self.pipeline.scenario.micro_batches:
            self._start_round([head for head in heads if head.tokens < self.lookahead])

    def drafted(self, blocks: list[Block]) -> None:
        """The draft tier's answers, empty ones included."""
        self.line.add(block for block in blocks if not block.void)
        self.wake()

    def ready(self) -> bool:
        if self.pipeline.sequential and self.growing:
            return len(self.line) == len(self.growing)
        return len(self.line) > 0

    def take(self) -> Blocks:
        real = [block for block in self.line if not block.ahead]
        return Blocks(self.line.take((real or list(self.line))[: self.pipeline.micro_batch]))

    def seconds(self, taken: Blocks) -> float:
        tokens = 1 + sum(block.drafted for block in taken.blocks) / taken.batch
        return self.pipeline.times[self.tier].ms(taken.batch, tokens, mean_context(taken.blocks)) / 1e3

    def finish(self, taken: Blocks) -> None:
        blocks = [block for block in taken.blocks if not block.void]
        for block in blocks:
            block.in_round = False
            self.grow(block)
        self._go_on([block for block in blocks if not block.ahead])

    def grow(self, block: Block) -> None:
        """What the draft tier proposed was verified: the accepted tokens, and one of this tier's own."""
        block.tokens += 1 + block.request.accepted(block.drafted, self.pipeline.scenario.acceptance.draft)

    def failed(self) -> None:
        lost = list(self.growing.values())
        self.forget([*self.growing, *self.ahead])
        self.pipeline.target.receive([self.pipeline.new_block(block.request, block.asked_s) for block in lost])

    def forget(self, requests: list[Request]) -> None:
        """Drop what is here for these."""
        for request in requests:
            for blocks in self.growing, self.ahead:
                if request in blocks:
                    self._drop(blocks.pop(request))

    def _drop(self, block: Block) -> None:
        block.void = True
        for line in self.line, self.pipeline.draft.line:
            if block in line:
                line.take([block])


class TargetStation(Station[Verification]):
    """Verifies ready blocks and reads prompts, in the same passes. While it is down, everything waits."""

    tier = Tier.TARGET

    def __init__(self, pipeline: Pipeline, device: Device) -> None:
        super().__init__(pipeline.env, device)
        self.pipeline = pipeline
        self.line: Line[Block] = Line(pipeline.env, pipeline.recorder.window)

    def receive(self, blocks: list[Block]) -> None:
        self.line.add(block for block in blocks if not block.void)
        self.wake()

    @property
    def reading(self) -> list[Request]:
        return [request for request in self.pipeline.live if request.unread]

    def ready(self) -> bool:
        if self.pipeline.sequential and (decoding := self.pipeline.decoding):
            return len(self.line) == decoding
        return len(self.line) > 0 or bool(self.reading)

    def take(self) -> Verification:
        chunks, room = [], self.pipeline.scenario.prefill.chunk if self.pipeline.scenario.prefill else 0
        for request in self.reading:
            tokens = min(request.unread, room)
            room -= tokens
            if tokens:
                chunks.append((request, tokens))
        return Verification(self.line.take(list(self.line)[: self.pipeline.micro_batch]), chunks)

    def seconds(self, taken: Verification) -> float:
        seconds = 0.0
        if taken.blocks:
            size = len(taken.blocks)
            tokens = 1 + sum(block.tokens for block in taken.blocks) / size
            seconds += self.pipeline.times[self.tier].ms(size, tokens, mean_context(taken.blocks)) / 1e3
        if self.pipeline.scenario.prefill:
            seconds += sum(tokens for _, tokens in taken.chunks) / self.pipeline.scenario.prefill.tokens_per_s
        return seconds

    def finish(self, taken: Verification) -> None:
        next_blocks = []
        for request, tokens in taken.chunks:
            request.unread -= tokens
            if not request.unread:
                next_blocks.append(self.pipeline.new_block(request, self.env.now))
        for block in taken.blocks:
            guessed = self._verify(block)
            if block.request.finished:
                self.pipeline.release(block.request)
            else:
                next_block = self.pipeline.new_block(block.request, self.env.now)
                next_block.guessed = guessed
                next_blocks.append(next_block)
        self.pipeline.ask(next_blocks)
        self.pipeline.admit()

    def _verify(self, block: Block) -> bool:
        """Commit what is accepted and one token more; True where a guess of all this would have been right."""
        scenario, request = self.pipeline.scenario, block.request
        alpha = scenario.acceptance.retrieval
        accepted = request.accepted(block.tokens, alpha)
        guessed = accepted == block.tokens > 0 and request.accepted(1, alpha) == 1
        tokens = min(accepted + 1, request.output_tokens - request.produced)
        if not request.produced:
            request.first_token_s = self.env.now
        request.produced += tokens
        self.pipeline.recorder.commit(self.env.now, tokens, block.asked_s)
        return guessed

    def failed(self) -> None:
        """The KV of all live requests is gone, and with it whatever was drafted for them."""
        self.line.take(list(self.line))
        self.pipeline.retrieval.forget(self.pipeline.live)
        for request in self.pipeline.live:
            if request.block is not None:
                request.block.void = True

    def recovered(self) -> None:
        self.pipeline.enter(self.pipeline.live)


class Pipeline:
    """One replica: three stations on their devices, the requests that are live in it, and those that wait for that."""

    def __init__(self, simulation: Simulation, index: int) -> None:
        self.env, self.recorder = simulation.env, simulation.recorder
        self.scenario, self.times = simulation.scenario, simulation.times
        self.on_finished = simulation.finished
        self.network = random.Random(f"{self.scenario.seed}/network/{index}")
        self.links = {upper: self.scenario.link_s(upper, Tier(upper - 1)) for upper in (Tier.RETRIEVAL, Tier.TARGET)}
        self.live: list[Request] = []
        self.queue: Line[Request] = Line(self.env, self.recorder.window)
        self.devices = [Device(self.env, f"{index}/{device_name(tiers)}") for tiers in self.scenario.devices]
        # A tier that takes no part is a station that is never asked; which device it has does not matter.
        on = dict.fromkeys(Tier, self.devices[0])
        on |= {t: d for d, tiers in zip(self.devices, self.scenario.devices, strict=True) for t in tiers}
        self.draft = DraftStation(self, on[Tier.DRAFT])
        self.retrieval = RetrievalStation(self, on[Tier.RETRIEVAL])
        self.target = TargetStation(self, on[Tier.TARGET])

    @property
    def sequential(self) -> bool:
        return self.scenario.micro_batches == 1

    @property
    def decoding(self) -> int:
        """Live requests whose prompts are read."""
        return sum(not request.unread for request in self.live)

    @property
    def micro_batch(self) -> int:
        """Most requests in a verifying pass."""
        return ceil(self.decoding / self.scenario.micro_batches)

    @property
    def load(self) -> int:
        return len(self.live) + len(self.queue)

    def submit(self, request: Request) -> None:
        self.recorder.arrivals.append(Arrival(self.env.now, len(self.queue)))
        self.queue.add([request])
        self.admit()

    def admit(self) -> None:
        """Requests go live in the order of their arrival, as long as there is room."""
        room = self.scenario.max_sequences - len(self.live)
        admitted = self.queue.take(list(self.queue)[:room])
        self.live += admitted
        if admitted and self.target.up:
            self.enter(admitted)

    def enter(self, requests: list[Request]) -> None:
        """Have the target read all that there is of these; where that costs nothing, they decode at once."""
        if self.scenario.prefill:
            for request in requests:
                request.unread = request.context
            self.target.wake()
        else:
            self.ask([self.new_block(request, self.env.now) for request in requests])

    def new_block(self, request: Request, asked_s: float) -> Block:
        request.block = Block(request, asked_s)
        return request.block

    def ask(self, blocks: list[Block]) -> None:
        """One message down to the retrieval tier; where that takes no part or is down, the blocks stay empty."""
        if self.scenario.lookaheads[0] and self.retrieval.up:
            self.send(blocks, Tier.TARGET, Tier.RETRIEVAL, self.retrieval.receive)
        else:
            self.target.receive(blocks)

    def release(self, request: Request) -> None:
        self.live.remove(request)
        self.retrieval.forget([request])
        self.recorder.finished.append(
            Finished(request.arrived_s, request.first_token_s, self.env.now, request.output_tokens)
        )
        self.on_finished()

    def send(self, blocks: list[Block], one: Tier, other: Tier, receive: Callable[[list[Block]], None]) -> None:
        """One message over the link between two tiers, either way."""
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


class Simulation:
    """All replicas under one load. Runs until every request that arrived within the duration is served."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.env = simpy.Environment()
        self.times = {tier: StageTimes(scenario.stages.of(tier)) for tier in scenario.tiers}
        self.recorder = Recorder(Window(scenario.warmup_s, scenario.duration_s))
        self.lengths = random.Random(f"{scenario.seed}/lengths")
        self.unfinished, self.arrived = 0, 0
        self.drained = self.env.event()
        self.pipelines = [Pipeline(self, index) for index in range(scenario.replicas)]

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
        """One request to the replica with the fewest."""
        load = self.scenario.load
        request = Request(
            arrived_s=self.env.now,
            prompt_tokens=self.lengths.choice(load.prompt_tokens),
            output_tokens=self.lengths.choice(load.output_tokens),
            chance=random.Random(f"{self.scenario.seed}/request/{self.arrived}"),
        )
        self.arrived += 1
        self.unfinished += 1
        min(self.pipelines, key=lambda pipeline: pipeline.load).submit(request)

    def finished(self) -> None:
        """A request is served; in the closed loop its user sends the next."""
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
            queues[f"{index}/admission"] = pipeline.queue.mean_length
            for station in pipeline.draft, pipeline.retrieval, pipeline.target:
                name = station.tier.name.lower()
                if station.tier in self.scenario.tiers:
                    queues[f"{index}/{name}"] = station.line.mean_length
                if self.scenario.failures.of(station.tier) is not None:
                    failures[name] = failures.get(name, 0) + station.failures
        return Result(
            recorder=self.recorder,
            passes={device.name: device.passes for pipeline in self.pipelines for device in pipeline.devices},
            mean_queues=queues,
            failures=failures,
            bound_tokens_per_s=bound_tokens_per_s(self.scenario),
            with_prefill=self.scenario.prefill is not None,
        )


def simulate(scenario: Scenario) -> Result:
    """Run it; the same scenario gives the same result."""
    return Simulation(scenario).run()
