"""The lowest tier: who drafts, what its model is told, and how prompt lookup is scored whoever drafts."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.random_models import random_pair, random_tokens
from tests.stating import full_runner
from tests.unit.core.speculation.test_lookup import searched
from triforce_core.messages import GREEDY, SCORED, Drafting, Origin, Proposal, SequenceSpec, Span, Tally, Work
from triforce_core.speculation.drafting import ModelProposer
from triforce_core.speculation.leaf import Leaf

Tokens = tuple[int, ...]
STOP = 9
SPEC = SequenceSpec(GREEDY, seed=0, prompt_length=1, max_length=1000, stop_token_ids=(STOP,))
REPEATS: Tokens = (1, 2, 3, 4, 5, 1, 2)  # lookup finds 3, 4, …
NEW: Tokens = (1, 2, 3, 4, 5)  # it finds nothing


class Model:
    """Drafts 100, 101, …; records what it is told, and holds the texts as a cache does, with what it has drafted."""

    runner = object()

    def __init__(self) -> None:
        self.waiting: list[Work] = []
        self.batches: list[list[Work]] = []
        self.held: dict[int, list[int]] = {}
        self.texts: dict[int, Tokens] = {}  # by sequence id: what it last continued
        self.lacks_all = False

    def submit(self, work: list[Work]) -> None:
        self.waiting += work

    def collect(self, timeout_s: float) -> list[Proposal]:
        work, self.waiting = self.waiting, []
        self.batches.append(work)
        return [self.draft(w) for w in work]

    def draft(self, work: Work) -> Proposal:
        span, (count,) = work.span, work.lookaheads
        if span.start == 0 and not self.lacks_all:
            assert span.spec is not None
            self.held.setdefault(span.sequence_id, [])
        held = self.held.get(span.sequence_id)
        if held is None or span.start > len(held):
            return Proposal(span.sequence_id, span.end, missing_from=len(held or ()), tallies=(Tally(),))
        held[span.start :] = span.tokens
        self.texts[span.sequence_id] = tuple(held)
        tokens = tuple(range(100, 100 + count))
        held += tokens
        tally = Tally(passes=count, busy_s=0.5 * count)
        return Proposal(span.sequence_id, span.end, tokens, bytes(count), tallies=(tally,))

    def release(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            self.held.pop(sequence_id, None)

    @property
    def told(self) -> list[tuple[int, Tokens]]:
        return [(w.span.start, w.span.tokens) for batch in self.batches for w in batch]


def work(
    tokens: Tokens, drafting: Drafting = Drafting.MODEL, *, start: int = 0, sequence_id: int = 1, lookahead: int = 2
) -> Work:
    return Work(Span(sequence_id, start, tokens, None if start else SPEC), (lookahead,), drafting=drafting)


def ask(leaf: Leaf, *asked: Work) -> list[Proposal]:
    leaf.submit([*asked])
    return leaf.collect(0.0)


@pytest.mark.parametrize(
    ("drafting", "text", "tokens", "origin"),
    [
        (Drafting.MODEL, REPEATS, (100, 101), Origin.DRAFT),
        (Drafting.MODEL, NEW, (100, 101), Origin.DRAFT),
        (Drafting.LOOKUP, REPEATS, (3, 4), Origin.LOOKUP),
        (Drafting.LOOKUP, NEW, (), None),
        (Drafting.BOTH, REPEATS, (3, 4), Origin.LOOKUP),
        (Drafting.BOTH, NEW, (100, 101), Origin.DRAFT),
    ],
)
def test_the_work_says_who_drafts(drafting: Drafting, text: Tokens, tokens: Tokens, origin: Origin | None) -> None:
    model = Model()
    [answer] = ask(Leaf(model), work(text, drafting))
    assert (answer.sequence_id, answer.start, answer.missing_from) == (1, len(text), None)
    assert (answer.tokens, [*answer.origins]) == (tokens, [origin] * len(tokens))
    by_model = origin is Origin.DRAFT
    assert model.told == ([(0, text)] if by_model else [])
    assert answer.tallies == ((Tally(passes=2, busy_s=1.0) if by_model else Tally()),)


@pytest.mark.parametrize("drafting", Drafting)
def test_without_a_model_lookup_drafts_whatever_the_work_says(drafting: Drafting) -> None:
    leaf = Leaf()
    assert leaf.runner is None
    found, nothing = ask(leaf, work(REPEATS, drafting), work(NEW, drafting, sequence_id=2))
    assert (found.tokens, [*found.origins]) == ((3, 4), [Origin.LOOKUP] * 2)
    assert (nothing.tokens, nothing.origins) == ((), b"")


def test_the_model_drafts_in_one_batch_for_all_that_need_it() -> None:
    model = Model()
    leaf = Leaf(model)
    asked = [
        work(NEW, Drafting.BOTH),
        work(REPEATS, Drafting.BOTH, sequence_id=2),
        work(REPEATS, Drafting.MODEL, sequence_id=3, lookahead=4),
        work(NEW, Drafting.LOOKUP, sequence_id=4),
        work(NEW, Drafting.MODEL, sequence_id=5, lookahead=0),
    ]
    answers = {answer.sequence_id: answer.tokens for answer in ask(leaf, *asked)}
    assert answers == {1: (100, 101), 2: (3, 4), 3: (100, 101, 102, 103), 4: (), 5: ()}
    assert [[w.span.sequence_id for w in batch] for batch in model.batches] == [[1, 3]]
    assert leaf.runner is model.runner


@pytest.mark.parametrize("drafting", Drafting)
@pytest.mark.parametrize(("max_length", "count"), [(12, 4), (10, 2), (8, 0), (7, 0)])
def test_no_more_is_drafted_than_there_is_room_for(drafting: Drafting, max_length: int, count: int) -> None:
    """The target draws the last token itself."""
    model = Model()
    span = Span(1, 0, REPEATS, replace(SPEC, max_length=max_length))
    [answer] = ask(Leaf(model), Work(span, (4,), drafting=drafting))
    assert len(answer.tokens) == count
    assert bool(model.batches) == (drafting is Drafting.MODEL and count > 0)


def test_the_model_is_told_what_it_missed_while_lookup_drafted() -> None:
    model = Model()
    leaf = Leaf(model)
    ask(leaf, work(NEW))
    ask(leaf, work((1, 2), Drafting.LOOKUP, start=5))
    ask(leaf, work((3,), Drafting.BOTH, start=7))
    assert len(model.told) == 1
    [answer] = ask(leaf, work((8,), start=8))
    assert (answer.start, answer.tokens, answer.missing_from) == (9, (100, 101), None)
    assert model.told[1:] == [(5, (1, 2, 3, 8))]
    ask(leaf, work((7, 6), start=9))
    assert model.told[2:] == [(9, (7, 6))], "and from then on only what is new"


def test_the_model_is_told_of_changes_in_what_it_holds() -> None:
    model = Model()
    leaf = Leaf(model)
    ask(leaf, work((1, 2, 3, 4, 5, 6)))
    ask(leaf, work((3, 8, 5, 6), Drafting.LOOKUP, start=2))  # the token at 3 has been replaced
    ask(leaf, work((7,), Drafting.LOOKUP, start=6))
    ask(leaf, work((7, 4), start=6))
    assert model.told[1:] == [(3, (8, 5, 6, 7, 4))]
    assert model.texts[1] == (1, 2, 3, 8, 5, 6, 7, 4)


def test_of_a_text_that_was_cut_the_model_keeps_what_is_left() -> None:
    """The model drafted 100 and 101 after the end. When a shorter text is stated, they must not stay in the model's
    text.
    """
    model = Model()
    leaf = Leaf(model)
    ask(leaf, work((1, 2, 3, 4)))
    ask(leaf, work((2,), Drafting.LOOKUP, start=1))
    ask(leaf, work((3, 4, 6), start=2))
    assert model.told[1:] == [(2, (3, 4, 6))]
    assert model.texts[1] == (1, 2, 3, 4, 6)


@pytest.mark.parametrize("kept", [0, 2])
def test_what_the_model_has_lost_it_is_told_again_without_asking_above(kept: int) -> None:
    model = Model()
    leaf = Leaf(model)
    ask(leaf, work(NEW), work(NEW, sequence_id=2))
    model.held[1] = model.held[1][:kept]
    answers = ask(leaf, work((6, 7), start=5), work((8,), start=5, sequence_id=2))
    assert [(a.sequence_id, a.tokens, a.missing_from) for a in answers] == [
        (1, (100, 101), None),
        (2, (100, 101), None),
    ]
    assert [[w.span.sequence_id for w in batch] for batch in model.batches] == [[1, 2], [1, 2], [1]]
    assert model.told[-1] == (kept, (*NEW, 6, 7)[kept:])
    assert model.texts == {1: (*NEW, 6, 7), 2: (*NEW, 8)}


def test_a_model_that_goes_on_lacking_text_is_asked_twice_and_nobody_above_hears_of_it() -> None:
    model = Model()
    leaf = Leaf(model)
    ask(leaf, work(NEW))
    model.held.clear()
    model.lacks_all = True
    [answer] = ask(leaf, work((6,), start=5))
    assert (answer.start, answer.tokens, answer.missing_from) == (6, (), None)
    assert [start for start, _ in model.told] == [0, 5, 0]
    model.lacks_all = False
    ask(leaf, work((7,), start=6))
    assert model.told[3:] == [(0, (*NEW, 6, 7))]


def test_text_that_the_leaf_lacks_is_asked_of_the_tier_above() -> None:
    model = Model()
    leaf = Leaf(model)
    [unknown] = ask(leaf, work((7, 8), start=5))
    assert (unknown.start, unknown.tokens, unknown.missing_from) == (7, (), 0)
    ask(leaf, work((1, 2, 3)))
    [gap] = ask(leaf, work((7, 8), start=5))
    assert (gap.start, gap.tokens, gap.missing_from) == (7, (), 3)
    assert len(model.told) == 1, "the model cannot help"


def test_release_forgets_in_both_halves() -> None:
    model = Model()
    leaf = Leaf(model)
    ask(leaf, work(NEW), work(NEW, sequence_id=2))
    leaf.submit([work((1,), start=5)])
    leaf.release([1, 77])
    assert leaf.collect(0.0) == []
    assert set(leaf.held) == set(model.held) == {2}
    assert ask(leaf, work((1,), start=5))[0].missing_from == 0
    ask(leaf, work(REPEATS))
    assert model.told[-1] == (0, REPEATS), "it is a new text, of which the model has been told nothing"


tokens = st.lists(st.sampled_from([1, 2, 3, STOP]), max_size=10).map(tuple)
# A statement is (how far before the end of the text it starts, what it says from there on, who drafts).
statements = st.lists(st.tuples(st.integers(0, 8), tokens, st.sampled_from(Drafting)), max_size=15)


@given(first=tokens, statements=statements)
def test_the_model_always_continues_the_stated_text_and_is_told_no_more_than_it_must(
    first: Tokens, statements: list[tuple[int, Tokens, Drafting]]
) -> None:
    model = Model()
    leaf = Leaf(model)
    text, unchanged = first, 0
    ask(leaf, work(first))
    assert model.texts[1] == text
    unchanged = len(text)
    for back, said, drafting in statements:
        start = max(0, len(text) - back)
        stated = text[:start] + said
        same = [a == b for a, b in zip(text, stated, strict=False)]
        unchanged = min(unchanged, [*same, False].index(False))
        text, asked = stated, len(model.told)
        [answer] = ask(leaf, work(said, drafting, start=start))
        assert answer.missing_from is None
        if drafting is Drafting.MODEL or (drafting is Drafting.BOTH and not searched(text, 2, SPEC)):
            assert model.told[asked:] == [(unchanged, text[unchanged:])]
            assert model.texts[1] == text
            unchanged = len(text)
        else:
            assert len(model.told) == asked
            assert answer.tokens == searched(text, 2, SPEC)


# -- the score of prompt lookup ----------------------------------------------------------------------------------------


def scores(leaf: Leaf, *stated: tuple[int, Tokens], drafting: Drafting = Drafting.MODEL) -> list[Tally]:
    """What is scored after each statement of (start, tokens). The model's passes are left out."""
    tallies = [ask(leaf, work(said, drafting, start=start))[0].tallies for start, said in stated]
    return [tally._replace(passes=0, busy_s=0.0) for (tally,) in tallies]


CYCLE: Tokens = (1, 2, 3, 4, 1, 2, 3, 4)  # lookup guesses 1, 2, 3, 4


@pytest.mark.parametrize("leaf_has_a_model", [True, False])
@pytest.mark.parametrize("drafting", Drafting)
@pytest.mark.parametrize(
    ("text", "follows", "score"),
    [
        (CYCLE, (1, 2, 3, 4), Tally(1, 4, 4, 0)),
        (CYCLE, (1, 2, 3, 4, 7, 7), Tally(1, 4, 4, 0)),  # no more was guessed
        (CYCLE, (1, 2, 3, 7), Tally(1, 4, 3, 1)),
        (CYCLE, (1, 7, 3, 4), Tally(1, 4, 1, 1)),  # up to the first difference
        (CYCLE, (7, 2, 3, 4), Tally(1, 4, 0, 1)),
        (NEW, (6, 7, 8, 1), Tally(1, 0, 0, 0)),
        ((1, 2, 3, STOP, 1, 2), (3, STOP, 5, 5), Tally(1, 2, 2, 0)),  # a guess ends with a stop token
        ((1, 2, 3, STOP, 1, 2), (3, 5, 5, 5), Tally(1, 2, 1, 1)),
    ],
)
def test_lookup_is_scored_by_what_is_stated_next(
    text: Tokens, follows: Tokens, score: Tally, drafting: Drafting, leaf_has_a_model: bool
) -> None:
    leaf = Leaf(Model() if leaf_has_a_model else None)
    assert scores(leaf, (0, text), (len(text), follows), drafting=drafting) == [Tally(), score]


@pytest.mark.parametrize("follows", [(1, 2, 3, 4), (7, 5, 5, 7)])
@pytest.mark.parametrize("text", [CYCLE, NEW])
def test_every_guess_waits_until_the_text_has_grown_by_as_many_tokens(text: Tokens, follows: Tokens) -> None:
    """A guess that found nothing, or is wrong at once, waits as well. Otherwise such guesses would be made more
    often.
    """
    at = len(text)
    found = scores(Leaf(Model()), (0, text), *[(at + i, (token,)) for i, token in enumerate(follows)])
    assert [tally.rounds for tally in found] == [0, 0, 0, 0, 1]
    assert found == scores(Leaf(Model()), (0, text), *[(at, follows[:i]) for i in range(1, 5)])


def test_the_next_guess_is_made_from_the_end_of_the_text_that_scored_the_last() -> None:
    """The tokens of the cycle are stated by three. The first three guesses are made after 0, 6 and 12 of them."""
    pieces = [(8 + 3 * i, (CYCLE * 5)[3 * i : 3 * i + 3]) for i in range(6)]
    assert [tally.rounds for tally in scores(Leaf(), (0, CYCLE), *pieces)] == [0, 0, 1, 0, 1, 0, 1]
    assert sum(scores(Leaf(), (0, CYCLE), *pieces), Tally()) == Tally(3, 12, 12, 0)


def test_a_guess_is_compared_with_the_text_that_stands_when_it_is_covered() -> None:
    assert scores(Leaf(), (0, CYCLE), (8, (1, 7, 3)), (9, (2, 3, 4))) == [Tally(), Tally(), Tally(1, 4, 4, 0)]
    assert scores(Leaf(), (0, CYCLE), (8, (1, 2, 3)), (9, (7, 3, 4))) == [Tally(), Tally(), Tally(1, 4, 1, 1)]


def test_a_guess_whose_context_was_replaced_counts_for_nothing() -> None:
    """Another guess is made from the end of the text that took its place."""
    leaf = Leaf()
    assert scores(leaf, (0, CYCLE), (7, (5, 6, 1, 2, 3)), (12, (5, 6, 7))) == [Tally()] * 3
    assert scores(leaf, (15, (7,))) == [Tally(1, 4, 2, 1)], "5, 6, 1, 2 was guessed"


def test_a_repeated_statement_changes_nothing() -> None:
    leaf = Leaf()
    assert scores(leaf, (0, CYCLE), (0, CYCLE), (8, (1, 2)), (8, (1, 2)), (8, (1, 2, 3, 4))) == [
        *[Tally()] * 4,
        Tally(1, 4, 4, 0),
    ]
    assert scores(leaf, (8, (1, 2, 3, 4))) == [Tally()], "nor does it count twice"


@given(
    text=st.lists(st.sampled_from([1, 2, 3, STOP]), min_size=1, max_size=60).map(tuple),
    cuts=st.sets(st.integers(1, 60), min_size=1),
)
def test_the_score_is_that_of_searches_at_the_same_places(text: Tokens, cuts: set[int]) -> None:
    ends = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    expected, at = Tally(), ends[1]
    for end in ends[2:]:
        if end >= at + SCORED:
            guess = searched(text[:at], SCORED, SPEC)
            right = 0
            while right < len(guess) and guess[right] == text[at + right]:
                right += 1
            expected += Tally(1, len(guess), right, int(right < len(guess)))
            at = end
    pieces = [(start, text[start:end]) for start, end in pairwise(ends)]
    assert sum(scores(Leaf(), *pieces), Tally()) == expected


# -- with a real model ------------------------------------------------------------------------------------------------


def test_passes_and_seconds_are_counted_for_each_work_that_took_part() -> None:
    leaf = Leaf(ModelProposer(full_runner(random_pair(), 2500)))
    text = random_tokens(20, seed=1)
    asked = [work(text, lookahead=3), work(text, sequence_id=2, lookahead=1), work(CYCLE, Drafting.BOTH, sequence_id=3)]
    [three], [one], [none] = (answer.tallies for answer in ask(leaf, *asked))
    assert (three.passes, one.passes, none.passes) == (3, 1, 0)
    assert 0 == none.busy_s < one.busy_s < three.busy_s < 60
    assert leaf.runner is not None
    assert leaf.runner.passes == 3
    assert leaf.runner.seconds < three.busy_s, "drawing counts too"


def test_a_sequence_for_which_the_cache_has_no_room_takes_part_in_no_pass() -> None:
    leaf = Leaf(ModelProposer(full_runner(random_pair(), 1010)))  # one of these sequences may become 1000 tokens long
    text = random_tokens(20, seed=1)
    first, second = ask(leaf, work(text), work(text, sequence_id=2))
    assert (len(first.tokens), first.tallies[0].passes) == (2, 2)
    assert (second.tokens, second.missing_from, second.tallies) == ((), None, (Tally(),))


def test_what_a_real_cache_has_lost_costs_one_more_pass_and_no_token() -> None:
    leaf, lossless = (Leaf(ModelProposer(full_runner(random_pair(), 2500))) for _ in range(2))
    text = random_tokens(20, seed=1)
    for each in (leaf, lossless):
        ask(each, work(text))
    assert leaf.runner is not None
    leaf.runner.release([1])
    [answer], [expected] = (ask(each, work((5, 6), start=20)) for each in (leaf, lossless))
    assert (answer.tokens, answer.missing_from) == (expected.tokens, None)
    assert len(answer.tokens) == answer.tallies[0].passes == 2


def test_prompt_lookup_loads_no_model_code() -> None:
    code = """
import sys
from triforce_core.config import load_settings
from triforce_core.building.drafters import drafter_for
drafter_for(load_settings(draft={"model": "ngram"}), None)
assert "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
