"""Run-ahead, message by message: what is guessed, what of it is used, and that work comes first."""

from __future__ import annotations

import pytest

from tests.by_hand import SPEC, Below, Counting, Tokens, drafted
from triforce_core.decoder import SpeculativeDecoder
from triforce_core.messages import Proposal, Span, Work
from triforce_core.run_ahead import RunAhead


@pytest.fixture
def ahead(below: Below, verifier: Counting) -> RunAhead:
    return RunAhead(SpeculativeDecoder(below, verifier, micro_batches=2), below=2)


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
    """Also one that ends where the settled text does, and one of which less was settled than handed up."""
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
    ahead = RunAhead(SpeculativeDecoder(below, verifier, micro_batches=1), below=1)
    ahead.submit([Work(Span(1, 0, (10, 11), SPEC), (1, 0))])
    assert [p.tokens for p in ahead.collect(1.0)] == [(2,)]
    assert not ahead.can_run_ahead, "tiers take turns"


def test_what_lacks_something_is_not_guessed_on(ahead: RunAhead, below: Below) -> None:
    begin(ahead, below)
    assert answer(ahead, below, [Proposal(1, 5, missing_from=1)]) == []
    assert not ahead.can_run_ahead


def test_a_released_sequence_is_not_guessed_on(ahead: RunAhead, below: Below) -> None:
    begin(ahead, below)
    ahead.release([1])
    assert not ahead.can_run_ahead
    assert below.released == [1]
