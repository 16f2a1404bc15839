"""Prompt lookup: what it proposes, by hand and against a search of the whole text; and the protocol's rules."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triforce_core.engine.engine import scored
from triforce_core.engine.sequence import Request, Sequence
from triforce_core.messages import GREEDY, SCORED, Drafting, Origin, Proposal, SequenceSpec, Span, Tally, Work
from triforce_core.plans import Plan
from triforce_core.speculation.leaf import Leaf
from triforce_core.speculation.lookup import MOST_REST, Shadow

Tokens = tuple[int, ...]
STOP = 9
SPEC = SequenceSpec(GREEDY, seed=0, prompt_length=1, max_length=1000, stop_token_ids=(STOP,))


def ask(
    proposer: Leaf,
    tokens: Tokens,
    lookahead: int = 4,
    *,
    start: int = 0,
    sequence_id: int = 1,
    spec: SequenceSpec = SPEC,
) -> Proposal:
    """State `tokens` from `start` on; the answer."""
    proposer.submit([Work(Span(sequence_id, start, tokens, None if start else spec), (lookahead,))])
    [answer] = proposer.collect(0.0)
    assert (answer.sequence_id, answer.start) == (sequence_id, start + len(tokens))
    assert answer.origins == bytes([Origin.LOOKUP]) * len(answer.tokens)
    assert len(answer.tallies) == 1
    return answer


@pytest.mark.parametrize(
    ("text", "lookahead", "expected"),
    [
        ((1, 2, 3, 4, 5, 1, 2), 3, (3, 4, 5)),
        ((1, 2, 3, 4, 5, 1, 2), 1, (3,)),
        ((1, 2, 3, 4, 5, 1, 2), 0, ()),
        ((1, 2, 3, 4, 5, 1, 2), 7, (3, 4, 5, 1, 2, 3, 4)),  # on through its own words
        ((7, 7, 7), 4, (7, 7, 7, 7)),
        ((1, 2, 3, 1, 2, 4, 1, 2), 1, (4,)),  # the most recent place
        ((5, 1, 2, 3, 1, 2, 4, 5, 1, 2), 1, (3,)),  # the longest run
        ((1, 2, 3, 2), 4, ()),  # one token is no run
        ((1, 2, 3, 4), 4, ()),
        ((1,), 4, ()),
        ((1, 2, STOP, 3, 1, 2), 4, (STOP,)),
        ((1, 2, 3, STOP, 1, 2), 4, (3, STOP)),
        ((256, 0, 0, 7, 8, 1, 0), 4, ()),  # the bytes of 1 and 0 are there, beginning within a token
        ((1, 0, 5, 256, 0, 0, 7, 8, 1, 0), 1, (5,)),
        ((1, 0, 0, 256, 7, 0, 0), 1, (256,)),  # the bytes of 0 and 0 are there twice, overlapping
    ],
)
def test_what_followed_the_last_tokens_before(text: Tokens, lookahead: int, expected: Tokens) -> None:
    assert ask(Leaf(), text, lookahead).tokens == expected


@pytest.mark.parametrize(("max_length", "count"), [(12, 4), (11, 3), (9, 1), (8, 0), (7, 0)])
def test_the_last_token_is_left_to_the_target(max_length: int, count: int) -> None:
    text = (1, 2, 3, 4, 5, 1, 2)
    assert len(ask(Leaf(), text, 4, spec=replace(SPEC, max_length=max_length)).tokens) == count


def test_a_statement_beyond_what_is_held_is_answered_by_what_is_missing() -> None:
    proposer = Leaf()
    assert ask(proposer, (1, 2), start=5).missing_from == 0
    assert not proposer.held
    assert ask(proposer, (1, 2, 3)).missing_from is None
    answer = ask(proposer, (1, 2), start=5)
    assert (answer.missing_from, answer.tokens) == (3, ())
    assert ask(proposer, (7, 1, 2), start=3).tokens == (3, 7, 1, 2)


def test_work_that_is_replaced_still_states_what_it_stated() -> None:
    proposer = Leaf()
    proposer.submit([Work(Span(1, 0, (1, 2, 3), SPEC), (4,))])
    proposer.submit([Work(Span(1, 3, (1, 2)), (1,))])
    assert [p.tokens for p in proposer.collect(0.0)] == [(3,)]
    assert proposer.collect(0.0) == []


def test_release_is_idempotent_and_forgets() -> None:
    proposer = Leaf()
    ask(proposer, (1, 2, 3, 1, 2))
    ask(proposer, (1, 2, 4, 1, 2), sequence_id=2)
    proposer.submit([Work(Span(1, 5, (3,)), (1,))])
    for _ in range(2):
        proposer.release([1, 77])
    assert proposer.collect(0.0) == []
    assert set(proposer.held) == {2}
    assert ask(proposer, (3,), start=5).missing_from == 0
    assert ask(proposer, (1, 2, 8, 1, 2)).tokens[0] == 8
    assert ask(proposer, (), start=5, sequence_id=2).tokens[0] == 4


def searched(text: Tokens, lookahead: int, spec: SequenceSpec) -> Tokens:
    """The same by searching the text from its end, for each length of run and for each token anew."""
    drafted: Tokens = ()
    for n in (3, 2):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                while len(drafted) < min(lookahead, spec.max_length - 1 - len(text)):
                    drafted += ((text + drafted)[end + len(drafted)],)
                    if drafted[-1] in spec.stop_token_ids:
                        break
                return drafted
    return drafted


# The bytes of two tokens may also begin within another token, as those of 1 and 0 do in 256, 0 and 0.
tokens = st.lists(st.sampled_from([0, 1, 2, 256, 1 << 24, STOP]), max_size=12).map(tuple)
# A statement is (how far before the end of the text it starts, what it says from there on, how far to look ahead).
statements = st.lists(st.tuples(st.integers(0, 15), tokens, st.integers(0, 6)), min_size=1, max_size=12)


@given(first=tokens, statements=statements, max_length=st.integers(1, 60))
def test_any_statements_find_what_a_search_finds(
    first: Tokens, statements: list[tuple[int, Tokens, int]], max_length: int
) -> None:
    proposer, spec = Leaf(), replace(SPEC, max_length=max_length)
    text = first
    assert ask(proposer, text, 3, spec=spec).tokens == searched(text, 3, spec)
    for back, said, lookahead in statements:
        start = max(0, len(text) - back)
        text = text[:start] + said
        found = ask(proposer, said, lookahead, start=start, spec=spec)
        assert found.missing_from is None
        assert found.tokens == searched(text, lookahead, spec)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 5))
def test_a_shadow_scores_as_the_leaf_does(text: list[int], step: int) -> None:
    """Until a guess is wrong at once: then it rests."""
    leaf, shadow = Leaf(), Shadow(SPEC)
    for end in range(step, len(text) + 1, step):
        answer = ask(leaf, tuple(text[end - step : end]), start=end - step)
        scored = shadow.score(text[:end])
        assert scored == answer.tallies[0]
        if scored.rounds and not scored.accepted:
            return


def test_a_shadow_rests_longer_and_longer_while_nothing_repeats() -> None:
    """Then plain decoding costs next to nothing more. As soon as a guess is right, it guesses all the time."""
    shadow, text = Shadow(SPEC), [*range(200, 700), *[1, 2, 3, 4, 5, 6] * 40]
    scored_at = []
    for end in range(1, len(text) + 1):
        if shadow.due(end) and shadow.score(text[:end]).rounds:
            scored_at.append(end)
    apart = [after - before for before, after in pairwise(scored_at)]
    resting = [min(MOST_REST, rest) + SCORED for rest in (4, 12, 28, 60, 64, 64)]
    assert apart[: len(resting)] == resting
    assert apart[-20:] == [SCORED] * 20


def test_a_guess_from_before_rounds_of_the_draft_tier_is_not_scored_after_them() -> None:
    """The text repeats itself, the draft tier drafts for a while, and then the text is new."""
    sequence = Sequence(1, Request((1,), 200, GREEDY, 0, None), SPEC, [1])
    text, answer = iter([*[2, 3, 4] * 20, *range(20, 60)]), Proposal(1, 0, (), b"", tallies=(Tally(1),))

    def score(plan: Plan, tokens: int) -> Tally:
        """Of a round of this plan that has given so many tokens."""
        sequence.tokens += islice(text, tokens)
        return (*scored(sequence, answer, plan).tallies, Tally(), Tally())[2]

    plain, lookup = Plan(0, 0), Plan(0, 8, Drafting.LOOKUP)
    before = sum((score(plain, 1) for _ in range(20)), Tally())
    assert before.accepted == before.proposed > 0, "once it has seen the text before"
    assert [score(lookup, 8) for _ in range(5)] == [Tally()] * 5
    after = sum((score(plain, 1) for _ in range(20)), Tally())
    assert (after.rounds > 0, after.proposed) == (True, 0)
