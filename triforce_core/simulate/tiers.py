"""The three tiers as stations, and the pipeline that they make.

A request has one block outstanding: it goes down to the retrieval tier, grows there by rounds of draft and verify,
comes up to the target, is verified, and the next one is asked for.
"""

from __future__ import annotations

from triforce_core.messages import Tier
from triforce_core.simulate.replica import SimulatedReplica
from triforce_core.simulate.requests import Block, Blocks, Request, Verification, mean_context
from triforce_core.simulate.stations import Line, Station, Taken


class TierStation(Station[Taken]):
    """A tier of a pipeline, through which it reaches the other two, and the blocks that wait for a pass."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline, self.replica = pipeline, pipeline.replica
        self.line: Line[Block] = Line(self.replica.env, self.replica.recorder.window)
        super().__init__(self.replica.env, self.replica.device_of(self.tier))


class DraftStation(TierStation[Blocks]):
    """Drafts γ1 tokens in γ1 steps, for all that wait at once. While it is down, rounds go on without it."""

    tier = Tier.DRAFT

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
        step_ms = self.replica.times[self.tier].ms(taken.batch, 1, mean_context(taken.blocks))
        return self.replica.scenario.lookaheads[1] * step_ms / 1e3

    def finish(self, taken: Blocks) -> None:
        for block in taken.blocks:
            block.drafted = self.replica.scenario.lookaheads[1]
        self.replica.send(taken.blocks, Tier.RETRIEVAL, Tier.DRAFT, self.pipeline.retrieval.drafted)

    def lose(self, taken: Blocks) -> None:
        self.pipeline.retrieval.drafted(taken.blocks)

    def failed(self) -> None:
        self.pipeline.retrieval.drafted(self.line.take(list(self.line)))


class RetrievalStation(TierStation[Blocks]):
    """Grows blocks round by round until they have γ2 tokens, or half of them where the target idles, and never cuts
    one. While it is down, blocks are empty.
    """

    tier = Tier.RETRIEVAL

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline)
        self.growing: dict[Request, Block] = {}  # asked for and not handed up yet
        self.ahead: dict[Request, Block] = {}

    @property
    def lookahead(self) -> int:
        return self.replica.scenario.lookaheads[0]

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
        done = [block for block in blocks if block.tokens >= self.lookahead] or self.early(blocks)
        for block in done:
            del self.growing[block.request]
            if self.replica.scenario.run_ahead:
                self.ahead[block.request] = Block(block.request, self.env.now, tokens=-1, ahead=True)
        if done:
            self.replica.send(done, Tier.TARGET, self.tier, self.pipeline.target.receive)
        self._start_round([block for block in blocks if block not in done])
        self._run_ahead()

    def early(self, blocks: list[Block]) -> list[Block]:
        """The longest, if half done, where all of several requests grow here: the target has nothing to judge then."""
        alone = [Tier.TARGET] in map(list, self.replica.scenario.devices)  # elsewhere it would take turns with this one
        if not blocks or not alone or self.replica.sequential:
            return []
        if not 1 < len(self.replica.live) == len(self.growing):
            return []
        longest = max(blocks, key=lambda block: block.tokens)
        return [longest] if 2 * longest.tokens >= self.lookahead else []

    def _start_round(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.in_round, block.drafted = True, 0
        if not blocks:
            return
        if self.replica.scenario.lookaheads[1] and self.pipeline.draft.up:
            self.replica.send(blocks, self.tier, Tier.DRAFT, self.pipeline.draft.receive)
        else:
            self.drafted(blocks)

    def _run_ahead(self) -> None:
        """With nothing real to do and fewer requests than micro-batches, one round of each guess."""
        heads = list(self.ahead.values())
        if self.growing or any(head.in_round for head in heads):
            return
        if len(self.replica.live) < self.replica.scenario.micro_batches:
            self._start_round([head for head in heads if head.tokens < self.lookahead])

    def drafted(self, blocks: list[Block]) -> None:
        """The draft tier's answers, empty ones included."""
        self.line.add(block for block in blocks if not block.void)
        self.wake()

    def ready(self) -> bool:
        if self.replica.sequential and self.growing:
            return len(self.line) == len(self.growing)
        return len(self.line) > 0

    def take(self) -> Blocks:
        real = [block for block in self.line if not block.ahead]
        return Blocks(self.line.take((real or list(self.line))[: self.replica.micro_batch]))

    def seconds(self, taken: Blocks) -> float:
        tokens = 1 + sum(block.drafted for block in taken.blocks) / taken.batch
        return self.replica.times[self.tier].ms(taken.batch, tokens, mean_context(taken.blocks)) / 1e3

    def finish(self, taken: Blocks) -> None:
        blocks = [block for block in taken.blocks if not block.void]
        for block in blocks:
            block.in_round = False
            self.grow(block)
        self._go_on([block for block in blocks if not block.ahead])

    def grow(self, block: Block) -> None:
        """What the draft tier proposed was verified: the accepted tokens, and one of this tier's own."""
        block.tokens += 1 + block.request.accepted(block.drafted, self.replica.scenario.acceptance.draft)

    def failed(self) -> None:
        lost = list(self.growing.values())
        self.forget([*self.growing, *self.ahead])
        self.pipeline.target.receive([block.request.new_block(block.asked_s) for block in lost])

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


class TargetStation(TierStation[Verification]):
    """Verifies ready blocks and reads prompts, in the same passes. While it is down, everything waits."""

    tier = Tier.TARGET

    def receive(self, blocks: list[Block]) -> None:
        self.line.add(block for block in blocks if not block.void)
        self.wake()

    @property
    def reading(self) -> list[Request]:
        return [request for request in self.replica.live if request.unread]

    def ready(self) -> bool:
        if self.replica.sequential and (decoding := self.replica.decoding):
            return len(self.line) == decoding
        return len(self.line) > 0 or bool(self.reading)

    def take(self) -> Verification:
        chunks, room = [], self.replica.scenario.prefill.chunk if self.replica.scenario.prefill else 0
        for request in self.reading:
            tokens = min(request.unread, room)
            room -= tokens
            if tokens:
                chunks.append((request, tokens))
        return Verification(self.line.take(list(self.line)[: self.replica.micro_batch]), chunks)

    def seconds(self, taken: Verification) -> float:
        seconds = 0.0
        if taken.blocks:
            size = len(taken.blocks)
            tokens = 1 + sum(block.tokens for block in taken.blocks) / size
            seconds += self.replica.times[self.tier].ms(size, tokens, mean_context(taken.blocks)) / 1e3
        if self.replica.scenario.prefill:
            seconds += sum(tokens for _, tokens in taken.chunks) / self.replica.scenario.prefill.tokens_per_s
        return seconds

    def finish(self, taken: Verification) -> None:
        next_blocks = []
        for request, tokens in taken.chunks:
            request.unread -= tokens
            if not request.unread:
                next_blocks.append(request.new_block(self.env.now))
        for block in taken.blocks:
            guessed = self._verify(block)
            if block.request.finished:
                self.pipeline.release(block.request)
            else:
                next_block = block.request.new_block(self.env.now)
                next_block.guessed = guessed
                next_blocks.append(next_block)
        self.pipeline.ask(next_blocks)
        self.pipeline.admit()

    def _verify(self, block: Block) -> bool:
        """Commit what is accepted and one token more; True where a guess of all this would have been right."""
        scenario, request = self.replica.scenario, block.request
        alpha = scenario.acceptance.retrieval
        accepted = request.accepted(block.tokens, alpha)
        guessed = accepted == block.tokens > 0 and request.accepted(1, alpha) == 1
        tokens = min(accepted + 1, request.output_tokens - request.produced)
        if not request.produced:
            request.first_token_s = self.env.now
        request.produced += tokens
        self.replica.recorder.commit(self.env.now, tokens, block.asked_s)
        return guessed

    def failed(self) -> None:
        """The KV of all live requests is gone, and with it whatever was drafted for them."""
        self.line.take(list(self.line))
        self.pipeline.retrieval.forget(self.replica.live)
        for request in self.replica.live:
            if request.block is not None:
                request.block.void = True

    def recovered(self) -> None:
        self.pipeline.enter(self.replica.live)


class Pipeline:
    """The three stations of one replica, and what they do with its requests."""

    def __init__(self, replica: SimulatedReplica) -> None:
        self.replica = replica
        self.draft = DraftStation(self)
        self.retrieval = RetrievalStation(self)
        self.target = TargetStation(self)

    def submit(self, request: Request) -> None:
        self.replica.queue_up(request)
        self.admit()

    def admit(self) -> None:
        """Requests go live where there is room; where the target is down, it reads them once it is back."""
        admitted = self.replica.admit()
        if admitted and self.target.up:
            self.enter(admitted)

    def enter(self, requests: list[Request]) -> None:
        """Have the target read all that there is of these; where that costs nothing, they decode at once."""
        if self.replica.scenario.prefill:
            for request in requests:
                request.unread = request.context
            self.target.wake()
        else:
            self.ask([request.new_block(self.replica.env.now) for request in requests])

    def ask(self, blocks: list[Block]) -> None:
        """One message down to the retrieval tier; where that takes no part or is down, the blocks stay empty."""
        if self.replica.scenario.lookaheads[0] and self.retrieval.up:
            self.replica.send(blocks, Tier.TARGET, Tier.RETRIEVAL, self.retrieval.receive)
        else:
            self.target.receive(blocks)

    def release(self, request: Request) -> None:
        """It is served."""
        self.retrieval.forget([request])
        self.replica.release(request)
