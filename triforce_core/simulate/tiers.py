"""The three tiers as stations, and the pipeline that they form.

A request has one block outstanding. The block goes down to the retrieval tier, grows there by rounds of drafting and
verifying, and comes up to the target, which verifies it and asks for the next block.
"""

from __future__ import annotations

from triforce_core.messages import Tier
from triforce_core.simulate.replica import SimulatedReplica
from triforce_core.simulate.requests import Block, Blocks, Request, Verification, mean_context
from triforce_core.simulate.stations import Line, Station, Taken


class TierStation(Station[Taken]):
    """A tier of a pipeline, with its queue of blocks; it reaches the other two tiers through the pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline, self.replica = pipeline, pipeline.replica
        self.line: Line[Block] = Line(self.replica.env, self.replica.recorder.window)
        super().__init__(self.replica.env, self.replica.device_of(self.tier))


class DraftStation(TierStation[Blocks]):
    """Drafts γ1 tokens in γ1 steps for all waiting blocks at once. While it is down, rounds go on without drafts."""

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
    """Grows blocks round by round until they have at least γ2 tokens, or half as many if the target is idle. Blocks are
    never cut. While it is down, blocks stay empty.
    """

    tier = Tier.RETRIEVAL

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline)
        self.growing: dict[Request, Block] = {}  # blocks asked for and not handed up yet
        self.ahead: dict[Request, Block] = {}  # head starts of run-ahead

    @property
    def lookahead(self) -> int:
        return self.replica.scenario.lookaheads[0]

    def receive(self, blocks: list[Block]) -> None:
        """Take the blocks that the target asks for."""
        asked = [block for block in blocks if not block.void]
        if not self.up:
            self.pipeline.target.receive(asked)
            return
        fresh = []
        for block in asked:
            head = self.ahead.pop(block.request, None)
            if head is None or not block.guessed or head.tokens < 1:  # with 0 tokens it holds only the guess
                if head is not None:
                    self._drop(head)
                fresh.append(block)
            else:
                fresh += self._kept(head, block)
        self.growing |= {block.request: block for block in fresh}
        self._go_on(fresh)

    def _kept(self, head: Block, block: Block) -> list[Block]:
        """Let the head start replace the block that was asked for. Returns it, or nothing while its round runs."""
        head.ahead, head.asked_s = False, block.asked_s
        block.void, block.request.block = True, head
        self.growing[block.request] = head
        return [] if head.in_round else [head]

    def _go_on(self, blocks: list[Block]) -> None:
        """Hand up the blocks that are long enough, and start a round of the others."""
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
        """The longest block, if it has half of γ2 and the target is idle because the blocks of all requests are growing
        here.

        Only with two or more live requests, a target on its own device, and pipelined mode.
        """
        alone = [Tier.TARGET] in map(list, self.replica.scenario.devices)  # on a shared device nothing is idle
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
        """Start a round of each head start, if no block is asked for and fewer requests are live than micro-batches."""
        heads = list(self.ahead.values())
        if self.growing or any(head.in_round for head in heads):
            return
        if len(self.replica.live) < self.replica.scenario.micro_batches:
            self._start_round([head for head in heads if head.tokens < self.lookahead])

    def drafted(self, blocks: list[Block]) -> None:
        """Take the draft tier's answers; `drafted` is 0 in blocks for which it drafted nothing."""
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
        """Add the accepted tokens of the draft tier, and one of this tier's own, to the block."""
        block.tokens += 1 + block.request.accepted(block.drafted, self.replica.scenario.acceptance.draft)

    def failed(self) -> None:
        lost = list(self.growing.values())
        self.forget([*self.growing, *self.ahead])
        self.pipeline.target.receive([block.request.new_block(block.asked_s) for block in lost])

    def forget(self, requests: list[Request]) -> None:
        """Drop all blocks of these requests."""
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
    """Verifies blocks and prefills prompts in the same passes. While it is down, everything waits."""

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
        """Commit the accepted tokens and one of the target's own; returns whether run-ahead would have guessed them
        all.
        """
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
        """Drop everything drafted for the live requests, because the target has lost their KV."""
        self.line.take(list(self.line))
        self.pipeline.retrieval.forget(self.replica.live)
        for request in self.replica.live:
            if request.block is not None:
                request.block.void = True

    def recovered(self) -> None:
        self.pipeline.enter(self.replica.live)


class Pipeline:
    """The three stations of one replica, and the path of its requests through them."""

    def __init__(self, replica: SimulatedReplica) -> None:
        self.replica = replica
        self.draft = DraftStation(self)
        self.retrieval = RetrievalStation(self)
        self.target = TargetStation(self)

    def submit(self, request: Request) -> None:
        self.replica.queue_up(request)
        self.admit()

    def admit(self) -> None:
        """Let requests go live while there is room. If the target is down, it prefills them once it is back."""
        admitted = self.replica.admit()
        if admitted and self.target.up:
            self.enter(admitted)

    def enter(self, requests: list[Request]) -> None:
        """Have the target prefill the whole context of these requests; without `prefill` they decode at once."""
        if self.replica.scenario.prefill:
            for request in requests:
                request.unread = request.context
            self.target.wake()
        else:
            self.ask([request.new_block(self.replica.env.now) for request in requests])

    def ask(self, blocks: list[Block]) -> None:
        """Send blocks down to the retrieval tier in one message. If that tier takes no part or is down, they stay
        empty.
        """
        if self.replica.scenario.lookaheads[0] and self.retrieval.up:
            self.replica.send(blocks, Tier.TARGET, Tier.RETRIEVAL, self.retrieval.receive)
        else:
            self.target.receive(blocks)

    def release(self, request: Request) -> None:
        """Remove a request that is served."""
        self.retrieval.forget([request])
        self.replica.release(request)
