"""What stands below and beside a decoder whose messages a test gives by hand, one by one."""

from __future__ import annotations

from triforce_core.engine.scheduler import Opened
from triforce_core.kv.prefix_tree import Cursor
from triforce_core.messages import GREEDY, Claim, Proposal, SequenceSpec, Tally, Tier, Verdict, Work

SPEC = SequenceSpec(GREEDY, seed=0, prompt_length=1, max_length=1000)
Tokens = tuple[int, ...]


def drafted(start: int, tokens: Tokens, sequence_id: int = 1) -> Proposal:
    return Proposal(sequence_id, start, tokens, bytes([Tier.DRAFT]) * len(tokens), tallies=(Tally(),))


class Below:
    """A proposer whose answers the test gives by hand."""

    def __init__(self) -> None:
        self.asked: list[Work] = []
        self.answers: list[list[Proposal]] = []
        self.released: list[int] = []

    def submit(self, work: list[Work]) -> None:
        self.asked += work

    def collect(self, timeout_s: float) -> list[Proposal]:
        assert self.answers, "waits for an answer that nobody owes"
        return self.answers.pop(0)

    def release(self, sequence_ids: list[int]) -> None:
        self.released += sequence_ids


class NoProposer:
    """A proposer whose proposals are all empty."""

    def __init__(self) -> None:
        self.waiting: list[Work] = []

    def submit(self, work: list[Work]) -> None:
        self.waiting += work

    def collect(self, timeout_s: float) -> list[Proposal]:
        work, self.waiting = self.waiting, []
        return [Proposal(w.span.sequence_id, w.span.end) for w in work]

    def release(self, sequence_ids: list[int]) -> None:
        self.waiting = [w for w in self.waiting if w.span.sequence_id not in sequence_ids]


class Counting:
    """A verifier whose own next token is always the position that it stands at."""

    tier = Tier.RETRIEVAL

    def __init__(self) -> None:
        self.claims: list[Claim] = []
        self.verdict: Verdict | None = None  # given in place of a judgement

    def verify(self, claims: list[Claim]) -> list[Verdict]:
        self.claims += claims
        return [self.verdict or self.judge(c) for c in claims]

    def judge(self, claim: Claim) -> Verdict:
        accepted = 0
        while claim.proposed[accepted : accepted + 1] == (claim.span.end + accepted,):
            accepted += 1
        return Verdict(tuple(range(claim.span.end, claim.span.end + accepted + 1)), accepted)

    def release(self, sequence_ids: list[int]) -> None:
        """This verifier holds nothing."""


class NothingCached:
    """A sequence in a pool that shares nothing."""

    cached = 0


class Slots:
    """A pool of so many tokens, which shares nothing."""

    kept_tokens = dropped_tokens = 0

    def __init__(self, free: int) -> None:
        self.free = free
        self.opened: list[int] = []
        self.owned: dict[int, int] = {}  # by sequence id
        self.hemmed = set[int]()  # sequences that have used up their ranges, as the test says

    @property
    def used_tokens(self) -> int:
        return sum(self.owned.values())

    def look(self, spec: SequenceSpec, text: list[int]) -> Cursor | None:
        return None

    def matched(self, cursor: Cursor) -> int:
        raise AssertionError("nothing was looked for")

    def can_open(self, spec: SequenceSpec, tokens: int, cursor: Cursor | None = None) -> bool:
        return tokens <= self.free

    def open(self, sequence_id: int, spec: SequenceSpec, tokens: int, text: list[int]) -> Opened:
        assert self.can_open(spec, tokens), "admitted without room"
        self.free -= tokens
        self.owned[sequence_id] = tokens
        self.opened.append(sequence_id)
        return NothingCached()

    def grow(self, sequence_id: int, tokens: int) -> bool:
        more = max(0, tokens - self.owned[sequence_id])
        if more > self.free:
            return False
        self.free -= more
        self.owned[sequence_id] += more
        return True

    def keys_after(self, tokens: int) -> int:
        return tokens

    def hemmed_in(self, sequence_id: int) -> bool:
        return sequence_id in self.hemmed

    def release(self, sequence_id: int) -> None:
        self.free += self.owned.pop(sequence_id)
