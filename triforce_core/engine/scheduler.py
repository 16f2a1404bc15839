"""The scheduler decides which requests go live, how they share the KV pool, and how they share one forward pass."""

import math
from bisect import bisect_left, bisect_right, insort
from typing import Protocol

from triforce_core.costs import Part, PassCosts
from triforce_core.engine.sequence import Sequence
from triforce_core.kv.prefix_tree import Cursor
from triforce_core.messages import SequenceSpec, Work, agreement
from triforce_core.plans import PLAIN


class Opened(Protocol):
    """A sequence in the pool."""

    cached: int  # tokens of its text of which the pool held KV already


class Pool(Protocol):
    """The part of the target's KV cache that scheduling needs. Sizes are in tokens."""

    @property
    def used_tokens(self) -> int:
        """Slots that sequences own or share."""
        ...

    @property
    def kept_tokens(self) -> int:
        """Slots that only texts of earlier sequences hold, for later ones with the same prefix."""
        ...

    @property
    def dropped_tokens(self) -> int:
        """Tokens of such texts that have been dropped so far."""
        ...

    def look(self, spec: SequenceSpec, text: list[int]) -> Cursor | None:
        """A cursor over the part of a text whose KV may be shared; None if none may."""
        ...

    def matched(self, cursor: Cursor) -> int:
        """How many tokens of that text, from its beginning, now have KV in the pool."""
        ...

    def can_open(self, spec: SequenceSpec, tokens: int, cursor: Cursor | None) -> bool: ...

    def open(self, sequence_id: int, spec: SequenceSpec, tokens: int, text: list[int]) -> Opened | None: ...

    def grow(self, sequence_id: int, tokens: int) -> bool: ...

    def keys_after(self, tokens: int) -> int:
        """The most keys that a token sees if it follows the first `tokens` tokens of a text."""
        ...

    def hemmed_in(self, sequence_id: int) -> bool:
        """Whether a sequence can grow in place only."""
        ...


FIRST_TOKEN = (1, 0, 0)  # lookaheads: the target draws one token, and no tier below is asked
CHUNK_UNIT = 64  # tokens; see `chunk_unit`
CHUNK_AT_FIRST = 256  # while no pass has shown yet what a chunk costs
STEP_AHEAD = 256  # tokens for which a new request reserves slots besides those of its prompt


class Scheduler:
    """Serves requests by priority, then in the order of their arrival. A request goes live when the target's pool has
    room for its prompt and a step ahead, and grows as it is decoded.

    When the pool is full, the least urgent and youngest request that was not preempted before is preempted. It then
    waits until its greatest length fits, so that none is preempted twice. While a waiting request does not fit, later
    ones may go live before it, until they have reserved as many slots as it needs. In the same way, shorter prompts may
    be prefilled before a long one. A request whose text begins like a prompt that is being read waits for that, to
    share it.
    """

    def __init__(
        self,
        kv: Pool,
        *,
        max_sequences: int,
        prefill_chunk: int,
        scored_chunk: int | None = None,
        costs: PassCosts | None = None,
        max_stall_s: float = math.inf,
        step_ahead: int = STEP_AHEAD,
        longest_block: int = 0,
    ) -> None:
        """`prefill_chunk`: most prompt tokens of a pass; `scored_chunk`: most of them whose logprobs are asked for.

        `longest_block`: the longest block that the target may have to verify for a request that sets no lookaheads.
        `max_stall_s`: most seconds of prompt chunks during any round of decoding, as predicted by `costs`, the costs of
        the target's passes. In a round that takes longer than 2 × `max_stall_s`, chunks may take half of its time, so
        that prompts do not starve under load. No chunk is so small that more than half of its pass is fixed cost,
        except the last chunk of a prompt.
        """
        self.kv, self.max_sequences, self.prefill_chunk = kv, max_sequences, prefill_chunk
        self.scored_chunk = scored_chunk or prefill_chunk
        self.costs, self.max_stall_s = costs or PassCosts(), max_stall_s
        self.step_ahead, self.longest_block = step_ahead, longest_block
        self.queue: list[Sequence] = []  # in the order in which they are served
        self.live: dict[int, Sequence] = {}  # by sequence id
        self.told = 0  # prompt tokens handed out so far

    @property
    def chunk_unit(self) -> int:
        """Chunks are multiples of this number of tokens, except the last chunk of a prompt."""
        return min(CHUNK_UNIT, self.prefill_chunk, self.scored_chunk)

    def add(self, sequence: Sequence) -> None:
        """Queue a request."""
        sequence.beginning = self.kv.look(sequence.spec, sequence.tokens)
        insort(self.queue, sequence, key=urgency)

    def admit(self) -> None:
        """Move requests from the queue to the live ones while there is room."""
        passed: list[Sequence] = []
        for sequence in [*self.queue]:
            enough = any(waiting.passed_by >= self._reserved(waiting) for waiting in passed)
            if len(self.live) >= self.max_sequences or enough:
                return
            if self._awaits_another(sequence):
                continue
            tokens = self._reserved(sequence)
            if self.kv.can_open(sequence.spec, tokens, sequence.beginning):
                self._go_live(sequence, tokens)
                for waiting in passed:
                    waiting.passed_by += tokens
            else:
                passed.append(sequence)

    def _go_live(self, sequence: Sequence, tokens: int) -> None:
        self.queue.remove(sequence)
        opened = self.kv.open(sequence.sequence_id, sequence.spec, tokens, sequence.tokens)
        assert opened is not None, "the pool has said that there is room"
        sequence.prefilled = opened.cached
        if not sequence.preempted:
            sequence.stats.cached_tokens = min(opened.cached, len(sequence.request.prompt))
        sequence.stats.queued_s += sequence.lap()
        sequence.due = self.told + sequence.given - sequence.prefilled
        sequence.beginning = None
        sequence.agreed.clear()
        self.live[sequence.sequence_id] = sequence

    def _awaits_another(self, sequence: Sequence) -> bool:
        """Whether to wait because a live request will soon have read the beginning that both texts share: if the
        other's `due` (see `_share_chunks`) is later than its own would be now by no more tokens than it need not read
        then.
        """
        cursor = sequence.beginning
        if cursor is None:
            return False
        known = self.kv.matched(cursor)
        due = self.told + sequence.given - known
        next_tokens = slice(known, known + CHUNK_UNIT)  # no less is worth waiting for
        for other in self.live.values():
            if not other.prefilling or other.request.priority > sequence.request.priority:
                continue
            if other.spec.prompt_logprobs is not None:
                continue  # `other` shares its KV only when it ends
            if other.tokens[next_tokens] != sequence.tokens[next_tokens]:
                continue  # most differ here, so that few texts are compared whole
            common = min(agreed_tokens(sequence, other), cursor.most)
            saved = common - known
            if other.prefilled < common and saved >= CHUNK_UNIT and other.due - due <= saved:
                return True
        return False

    def _reserved(self, sequence: Sequence) -> int:
        """The tokens for which a request reserves slots when it goes live: all, if it was preempted before."""
        greatest = sequence.spec.max_length
        return greatest if sequence.preempted else min(greatest, sequence.given + self.step_ahead)

    def to_preempt(self) -> Sequence | None:
        """Give the requests that are decoded room for their next round, the most urgent first. Returns None if all have
        it; otherwise the request to preempt: the least urgent that was not preempted before, or the one that lacks room
        if slots of others would not help it. Call again when it is gone.
        """
        for sequence in sorted(self.live.values(), key=urgency):
            if sequence.work is None and not sequence.prefilling and not self._grow(sequence):
                if self.kv.hemmed_in(sequence.sequence_id):
                    return sequence
                return max((s for s in self.live.values() if not s.preempted), key=urgency)
        return None

    def _grow(self, sequence: Sequence) -> bool:
        # The next block may still follow an earlier, longer plan, because the retrieval tier runs ahead.
        longest_block = max(self.longest_block, sum(sequence.plan.lookaheads))
        tokens = min(len(sequence.tokens) + longest_block + 1, sequence.spec.max_length)
        return self.kv.grow(sequence.sequence_id, tokens)

    def next_work(self) -> list[Work]:
        """Work for each live request that has none outstanding: a round of decoding, or its next prefill chunk."""
        idle = [sequence for sequence in self.live.values() if sequence.work is None]
        for sequence in idle:
            if not sequence.prefilling:
                sequence.work = next_round(sequence)
        self._share_chunks([sequence for sequence in idle if sequence.prefilling])
        return [sequence.work for sequence in idle if sequence.work is not None]

    def _share_chunks(self, sequences: list[Sequence]) -> None:
        """Give these requests their shares of this turn's chunk: each what it can use, in the order of priority and
        then of `due`, the prompt tokens handed out before it went live plus those that it then had to read. So the
        shortest of several prompts that go live together comes first, and only more urgent requests can keep one
        waiting for ever.
        """
        shares: list[Part] = []
        room, scored_room = self.prefill_chunk, self.scored_chunk
        for sequence in sorted(sequences, key=lambda s: (s.request.priority, s.due)):
            scored = sequence.spec.prompt_logprobs is not None
            tokens = self._share(sequence, shares, min(room, scored_room) if scored else room)
            if not tokens and not shares:
                return  # the first request waits for a turn with time for its smallest chunk; the others wait behind it
            if not tokens:
                continue
            sequence.work = next_chunk(sequence, tokens)
            shares.append(Part(tokens, self.kv.keys_after(sequence.prefilled)))
            self.told += tokens
            room -= tokens
            scored_room -= tokens * scored
        if shares:
            seconds = self.costs.seconds(shares)
            for sequence in self.live.values():
                sequence.stalled_s += seconds  # reset when the request gets tokens

    def _share(self, sequence: Sequence, shares: list[Part], room: int) -> int:
        """The tokens of its next chunk, as `room` and `max_stall_s` allow. `shares`: what others get of the pass."""
        left, before = sequence.given - sequence.prefilled, self.kv.keys_after(sequence.prefilled)
        decoding = self.decoding
        hurried = bool(decoding) and self.max_stall_s < math.inf
        if hurried and not self.costs.known:
            room = min(room, CHUNK_AT_FIRST - int(sum(share.tokens for share in shares)))
        sizes = [*range(self.chunk_unit, min(room, left) + 1, self.chunk_unit)]
        if left <= room and left % self.chunk_unit:
            sizes.append(left)
        if not hurried:
            return sizes[-1] if sizes else 0

        def cost(tokens: int) -> float:
            return self.costs.seconds([*shares, Part(tokens, before)])

        seconds = min(max(self.max_stall_s, other.round_s / 2) - other.stalled_s for other in decoding)
        allowed = bisect_right(sizes, seconds, key=cost)
        if not shares:
            least = min(bisect_left(sizes, self.costs.least_chunk(before)) + 1, len(sizes))
            fresh = not any(other.stalled_s for other in decoding)
            allowed = max(allowed, least) if fresh else allowed if allowed >= least else 0
        return sizes[min(allowed, len(sizes)) - 1] if allowed else 0

    def least_stall_s(self, context: int) -> float:
        """The seconds of a pass over the smallest chunk at the end of a context of this length; 0 while unknown."""
        before = self.kv.keys_after(context)
        least = max(CHUNK_UNIT, math.ceil(self.costs.least_chunk(before)))
        return self.costs.seconds([Part(least, before)])

    @property
    def asked_tokens(self) -> int:
        """An upper estimate of the tokens in the target's next pass: all new tokens in its unanswered work."""
        asked = [(s.work, s.prefilled) for s in self.live.values() if s.work is not None]
        return sum(w.span.end - prefilled + sum(w.lookaheads[1:]) for w, prefilled in asked)

    @property
    def decoding(self) -> list[Sequence]:
        """The live requests whose prompts are prefilled."""
        return [sequence for sequence in self.live.values() if not sequence.prefilling]

    def find(self, request_id: int) -> Sequence | None:
        """The record of a request, live or queued."""
        return next((s for s in (*self.live.values(), *self.queue) if s.request_id == request_id), None)

    def remove(self, sequence: Sequence) -> None:
        """Take a request out, live or queued."""
        if sequence in self.queue:
            self.queue.remove(sequence)
        self.live.pop(sequence.sequence_id, None)


def agreed_tokens(waiting: Sequence, live: Sequence) -> int:
    """How many tokens two texts begin with in common, if they may share any; computed once."""
    if live.sequence_id not in waiting.agreed:
        shares = waiting.spec.cache_salt == live.spec.cache_salt
        most = min(waiting.given, live.given) if shares else 0
        waiting.agreed[live.sequence_id] = agreement(waiting.tokens, 0, live.tokens, 0, most)
    return waiting.agreed[live.sequence_id]


def urgency(sequence: Sequence) -> tuple[int, int]:
    """Requests are served in ascending order of this: by priority, then by arrival."""
    return sequence.request.priority, sequence.request_id


def next_chunk(sequence: Sequence, tokens: int) -> Work:
    """The work for the next prefill chunk. The last chunk also yields the first token, from the target alone."""
    stop = sequence.prefilled + tokens
    span = sequence.span(sequence.prefilled, stop)
    return Work(span, FIRST_TOKEN) if stop == len(sequence.tokens) else Work(span, (1,), sample=False)


def next_round(sequence: Sequence) -> Work:
    """The work for one round of decoding. With a plain plan it states only the tokens that the target lacks."""
    plan = PLAIN if sequence.plan_waits else sequence.plan
    start = sequence.stated if plan.speculates else sequence.prefilled
    span = sequence.span(start, len(sequence.tokens))
    return Work(span, (1, *plan.lookaheads), True, plan.drafting, plan.nodes, plan.least_gain)
