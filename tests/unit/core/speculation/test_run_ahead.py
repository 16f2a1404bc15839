"""Run-ahead, message by message: what is guessed, what of it is used, and that work comes first."""

from __future__ import annotations

import random

import pytest

from tests.by_hand import SPEC, Below, Counting, Tokens, drafted
from triforce_core.messages import Proposal, Span, Verdict, Work, wait_in_turn
from triforce_core.speculation.decoder import SpeculativeDecoder, State
from triforce_core.speculation.run_ahead import RunAhead


@pytest.fixture
def ahead(below: Below, verifier: Counting) -> RunAhead:
    return RunAhead(SpeculativeDecoder(below, verifier, micro_batches=2), fewer_than=2)


def work(start: int, tokens: Tokens, sequence_id: int = 1) -> Work:
    return Work(Span(sequence_id, start, tokens, None if start else SPEC), (3, 2))


def answer(ahead: RunAhead, below: Below, *blocks: list[Proposal]) -> list[Proposal]:
    below.answers += blocks
    answers: list[Proposal] = []
    for _ in blocks:
        answers += ahead.collect(1.0)
    return answers


def begin(ahead: RunAhead, below: Below) -> None:
    """Hand up a block of the tokens 2, 3, 4."""
    ahead.submit([work(0, (10, 11))])
    assert not ahead.can_run_ahead
    [block] = answer(ahead, below, [drafted(2, (2, 3))])
    assert block.tokens == (2, 3, 4)
    assert ahead.can_run_ahead


def test_a_right_guess_is_answered_at_once(ahead: RunAhead, below: Below) -> None:
    begin(ahead, below)
    assert answer(ahead, below, [drafted(5, (5, 6))], [drafted(8, (8, 9))]) == []
    assert not ahead.can_run_ahead, "the guess is long enough"
    assert [w.span.start for w in below.asked] == [0, 2, 5], "each is told what is new"
    ahead.submit([work(2, (2, 3, 4, 5))])
    [block] = ahead.collect(1.0)
    assert (block.start, block.tokens) == (6, (6, 7, 8, 9, 10))
    assert len(block.origins) == 5
    assert len(below.asked) == 3, "nothing was asked for it"
    assert ahead.can_run_ahead, "and on it goes"


def test_a_guess_in_progress_is_gone_on_with(ahead: RunAhead, below: Below) -> None:
    begin(ahead, below)
    assert answer(ahead, below, [drafted(5, (5,))], []) == []
    assert len(below.asked) == 3
    ahead.submit([work(2, (2, 3, 4, 5))])
    assert len(below.asked) == 3, "what was asked for the guess is still wanted"
    [block] = answer(ahead, below, [drafted(7, (7, 8))])
    assert (block.start, block.tokens) == (6, (6, 7, 8, 9))


@pytest.mark.parametrize("settled", [(2, 3, 4, 99), (2, 99), (2, 3), (2, 3, 4, 5, 6, 7, 8)])
def test_a_wrong_or_short_guess_is_dropped(ahead: RunAhead, below: Below, verifier: Counting, settled: Tokens) -> None:
    """A guess is also dropped if it is no longer than the settled text, or if less was settled than was handed up."""
    begin(ahead, below)
    assert answer(ahead, below, [drafted(5, (5,))]) == []
    ahead.submit([work(2, settled)])
    end = 2 + len(settled)
    assert (below.asked[-1].span.start, below.asked[-1].span.tokens) == (2, settled)
    [block] = answer(ahead, below, [drafted(end, (end, end + 1))])
    assert (block.start, block.tokens) == (end, (end, end + 1, end + 2))


def test_work_of_others_comes_first(ahead: RunAhead, below: Below, verifier: Counting) -> None:
    begin(ahead, below)
    below.answers.append([])
    assert ahead.collect(0.0) == []
    ahead.submit([work(0, (20, 21), sequence_id=2)])
    assert not ahead.can_run_ahead
    judged = len(verifier.claims)
    answers = answer(ahead, below, [drafted(5, (5,)), drafted(2, (2, 3), sequence_id=2)])
    assert [a.sequence_id for a in answers] == [2]
    assert [c.span.sequence_id for c in verifier.claims[judged:]] == [2], "the guess waits"


def test_with_as_many_requests_as_micro_batches_nothing_is_guessed(ahead: RunAhead, below: Below) -> None:
    ahead.submit([work(0, (10, 11)), work(0, (20, 21), sequence_id=2)])
    answers = answer(ahead, below, [drafted(2, (2, 3))], [drafted(2, (2, 3), sequence_id=2)])
    assert [a.sequence_id for a in answers] == [1, 2]
    assert not ahead.can_run_ahead


def test_what_was_found_is_answered_whatever_else_comes_first(ahead: RunAhead, below: Below) -> None:
    """Work of several requests may come in several messages before anybody collects."""
    begin(ahead, below)
    assert answer(ahead, below, [drafted(5, (5, 6))], [drafted(8, (8, 9))]) == []
    ahead.submit([work(2, (2, 3, 4, 5))])
    ahead.submit([work(0, (20, 21), sequence_id=2)])
    [found] = ahead.collect(1.0)
    assert (found.sequence_id, found.start) == (1, 6)
    [other] = answer(ahead, below, [drafted(2, (2, 3), sequence_id=2)])
    assert other.sequence_id == 2
    assert not ahead.owed


def test_requests_that_nobody_drafts_for_count_too(below: Below, verifier: Counting) -> None:
    ahead = RunAhead(SpeculativeDecoder(below, verifier, micro_batches=1), fewer_than=1)
    ahead.submit([Work(Span(1, 0, (10, 11), SPEC), (1, 0))])
    assert [p.tokens for p in ahead.collect(1.0)] == [(2,)]
    assert not ahead.can_run_ahead, "tiers take turns"


def test_what_lacks_something_is_not_guessed_on(ahead: RunAhead, below: Below) -> None:
    begin(ahead, below)
    assert answer(ahead, below, [Proposal(1, 5, missing_from=1)]) == []
    assert not ahead.can_run_ahead


def test_a_guess_that_lacks_something_is_dropped(ahead: RunAhead, below: Below) -> None:
    """It is dropped even if the next work agrees with it, because only a statement from the level above can help."""
    begin(ahead, below)
    assert answer(ahead, below, [Proposal(1, 5, (5, 6), bytes(2), missing_from=1)]) == []
    ahead.submit([work(2, (2, 3, 4, 5))])
    assert below.asked[-1].span.tokens == (2, 3, 4, 5)


def test_an_ended_block_is_not_guessed_on(ahead: RunAhead, below: Below, verifier: Counting) -> None:
    verifier.verdict = Verdict((2, 3), num_accepted=2, ended=True)
    ahead.submit([work(0, (10, 11))])
    assert len(answer(ahead, below, [drafted(2, (2, 3))])) == 1
    assert not ahead.can_run_ahead


def test_a_guess_shorter_than_the_next_work_asks_for_goes_on(ahead: RunAhead, below: Below) -> None:
    begin(ahead, below)
    assert answer(ahead, below, [drafted(5, (5, 6))], [drafted(8, (8, 9))]) == []
    assert not ahead.can_run_ahead
    ahead.submit([Work(Span(1, 2, (2, 3, 4, 5)), (8, 2))])
    [block] = answer(ahead, below, [drafted(11, (11, 12))])
    assert (block.start, block.tokens) == (6, (6, 7, 8, 9, 10, 11, 12, 13))


def test_a_released_sequence_is_not_guessed_on(ahead: RunAhead, below: Below) -> None:
    begin(ahead, below)
    ahead.release([1])
    assert not ahead.can_run_ahead
    assert below.released == [1]


class Drafter:
    """A leaf by the align rule, in this process or, with a delay, behind a link: answers come some turns later."""

    def __init__(self, rng: random.Random, delay: int) -> None:
        self.rng, self.delay, self.turn = rng, delay, 0
        self.waiting: dict[int, Work] = {}
        self.held: dict[int, list[int]] = {}
        self.answers: list[tuple[int, Proposal]] = []  # with the turn in which they arrive
        self.drafted: list[int] = []  # for which sequences, in the last turn

    def submit(self, work: list[Work]) -> None:
        wait_in_turn(self.waiting, work)

    def collect(self, timeout_s: float) -> list[Proposal]:
        self.turn += 1
        work, self.waiting = list(self.waiting.values()), {}
        self.drafted = [w.span.sequence_id for w in work]
        self.answers += [(self.turn + self.rng.randint(0, self.delay), self.draft(w)) for w in work]
        due = [proposal for turn, proposal in self.answers if turn <= self.turn]
        self.answers = [(turn, proposal) for turn, proposal in self.answers if turn > self.turn]
        return due

    def draft(self, work: Work) -> Proposal:
        span = work.span
        held = self.held.setdefault(span.sequence_id, [])
        assert span.start <= len(held), "it was told what came before"
        held[span.start :] = span.tokens
        tokens = tuple(end if self.rng.random() < 0.7 else 99 for end in range(span.end, span.end + work.lookaheads[0]))
        held += tokens
        return drafted(span.end, tokens, span.sequence_id)

    def release(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            self.waiting.pop(sequence_id, None)
            self.held.pop(sequence_id, None)


class Requests:
    """What the level above does: some requests, whose blocks it judges after a while, and often accepts whole."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.texts: dict[int, list[int]] = {}
        self.stated: dict[int, int] = {}
        self.judged: dict[int, int] = {}  # in which turn the block that was handed up is
        self.lookahead, self.turn = rng.choice([1, 3, 5]), 0

    def arrive(self) -> None:
        sequence_id = max(self.stated, default=0) + 1
        self.texts[sequence_id], self.stated[sequence_id], self.judged[sequence_id] = [0, 1], 0, 0

    def leave(self) -> list[int]:
        gone = self.rng.choice(sorted(self.texts))
        del self.texts[gone]
        self.judged.pop(gone, None)
        return [gone]

    def work(self) -> list[Work]:
        """New work for a sequence that has been judged."""
        due = [i for i, turn in self.judged.items() if turn <= self.turn]
        if not due:
            return []
        sequence_id = self.rng.choice(due)
        del self.judged[sequence_id]
        start, text = self.stated[sequence_id], self.texts[sequence_id]
        self.stated[sequence_id] = len(text)
        return [Work(Span(sequence_id, start, tuple(text[start:]), None if start else SPEC), (self.lookahead, 2))]

    def take(self, proposal: Proposal) -> None:
        text = self.texts[proposal.sequence_id]
        assert proposal.start == len(text)
        accepted = len(proposal.tokens) if self.rng.random() < 0.6 else self.rng.randint(0, len(proposal.tokens))
        text += [*proposal.tokens[:accepted], proposal.start + accepted if self.rng.random() < 0.9 else 77]
        self.judged[proposal.sequence_id] = self.turn + self.rng.choice([1, 4, 10])


def guesses(ahead: RunAhead) -> set[int]:
    """The sequences for which something was found beyond what was handed up, and that nobody waits for."""
    return {i for i, block in ahead.decoder.blocks.items() if block.tokens and not block.owed}


def assert_in_step(ahead: RunAhead, drafter: Drafter) -> None:
    """Check that whatever is in progress waits for something that will come."""
    coming = {(w.span.sequence_id, w.span.end) for w in drafter.waiting.values()}
    coming |= {(p.sequence_id, p.start) for _, p in drafter.answers}
    for sequence_id, block in ahead.decoder.blocks.items():
        assert block.sequence_id == sequence_id
        assert block.state is not State.ASKED or (sequence_id, block.end) in coming
        assert (block.state is State.READY) == (block.proposal is not None)
        assert block.proposal is None or block.proposal.start == block.end
        assert (block.model_holds is None) <= (not block.tokens), "what was found was said to nobody else"


@pytest.mark.parametrize(
    ("micro_batches", "delay"), [(1, 0), (3, 0), (3, 3)], ids=["one process", "one process, shares", "over a link"]
)
def test_guesses_may_be_paused_at_any_time(micro_batches: int, delay: int) -> None:
    """Later they go on, are used or are dropped. While work waits, a drafter in the same process does nothing for them.

    A decoder over such a drafter has one micro-batch, however many the pipeline has.
    """
    paused = resumed = 0
    for seed in range(150):
        rng = random.Random(seed)
        drafter, above = Drafter(rng, delay), Requests(rng)
        decoder = SpeculativeDecoder(drafter, Counting(), micro_batches=micro_batches, hand_up_early=rng.random() < 0.5)
        ahead = RunAhead(decoder, fewer_than=rng.choice([2, 3, 3, 100]))
        for above.turn in range(100):
            before, at = guesses(ahead), rng.random()
            if at < 0.15 and len(above.texts) < 3:
                above.arrive()
            elif at < 0.17 and above.texts:
                ahead.release(above.leave())
            elif at < 0.5:
                ahead.submit(above.work())
                paused += len(guesses(ahead)) * bool(ahead.owed)
            elif ahead.owed or ahead.can_run_ahead:
                owed, drafter.drafted = {block.sequence_id for block in ahead.owed}, []
                for proposal in ahead.collect(0.0):
                    above.take(proposal)
                resumed += len(before & guesses(ahead)) * (not owed)
                assert delay or not owed or owed.issuperset(drafter.drafted), "work waits for the draft of a guess"
            assert_in_step(ahead, drafter)
    assert min(paused, resumed) > 15, "too rare to prove anything"
