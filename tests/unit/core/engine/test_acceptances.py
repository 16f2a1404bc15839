"""What scored guesses and drafts of prompt lookup tell of their first token and of the later ones."""

from __future__ import annotations

import random

import pytest

from triforce_core.engine.acceptances import Acceptances
from triforce_core.messages import SCORED, Drafting, Tally
from triforce_core.plans import PLAIN, Plan


def guess(right: int) -> Tally:
    """A guess that found something, of which so many tokens are right."""
    return Tally(rounds=1, proposed=SCORED, accepted=right, rejected=int(right < SCORED))


def learned(*tallies: Tally) -> dict[str, tuple[float, float]]:
    """By the name of a chance: how often it happened, and how often it could have happened. Nothing is
    forgotten here.
    """
    known = Acceptances()
    for tally in tallies:
        known.add(PLAIN, (Tally(), Tally(), tally))
    return {name: (known.chances[name].happened, known.chances[name].times) for name in ("lookup_first", "lookup")}


@pytest.mark.parametrize(
    ("right", "first", "later"),
    [(0, (0, 1), (0, 0)), (1, (1, 1), (0, 1)), (3, (1, 1), (2, 3)), (SCORED, (1, 1), (3, 3))],
)
def test_a_guess(right: int, first: tuple[int, int], later: tuple[int, int]) -> None:
    assert learned(guess(right)) == {"lookup_first": first, "lookup": later}


def test_a_guess_that_found_nothing_says_nothing_of_tokens() -> None:
    assert learned(Tally(rounds=1)) == {"lookup_first": (0, 0), "lookup": (0, 0)}


@pytest.mark.parametrize("right", [0, 1, 3])
def test_guesses_that_come_together_count_as_those_that_come_apart(right: int) -> None:
    """A round with a retrieval tier sends the sum of several guesses; it is unambiguous if at most one is wrong."""
    apart = [guess(SCORED), guess(right), guess(SCORED)]
    assert learned(apart[0] + apart[1] + apart[2]) == learned(*apart)


def test_several_wrong_guesses_are_taken_to_have_two_right_tokens_each_if_they_began_well() -> None:
    assert learned(guess(0) + guess(0)) == {"lookup_first": (0, 2), "lookup": (0, 0)}
    assert learned(guess(1) + guess(0)) == {"lookup_first": (1, 2), "lookup": (0, 1)}
    assert learned(guess(2) + guess(2)) == {"lookup_first": (2, 2), "lookup": (2, 4)}
    assert learned(guess(3) + guess(3) + guess(0)) == {"lookup_first": (3, 3), "lookup": (3, 6)}


@pytest.mark.parametrize(("length", "right"), [(1, 0), (2, 0), (2, 1)])
def test_a_wrong_guess_that_a_stop_token_ends_early_counts_as_a_whole_one(length: int, right: int) -> None:
    short = guess(right)._replace(proposed=length)
    assert learned(short) == learned(guess(right))
    assert learned(guess(SCORED), short) == learned(guess(SCORED) + short)


def test_counts_that_no_guess_gives_take_nothing_away() -> None:
    for tally in (Tally(1, 8), Tally(2, 3, 9, 1)):
        for happened, times in learned(tally).values():
            assert 0 <= happened <= times


def test_drafts_that_are_all_wrong_or_all_right_promise_long_ones() -> None:
    """One chance for all tokens would be .8 here: a draft of eleven would be worth 3.7 tokens, and is worth 5.5."""
    known, rng = Acceptances(), random.Random(0)
    for _ in range(400):
        known.add(PLAIN, (Tally(), Tally(), guess(rng.choice([0, SCORED]))))
    given = known.given()
    assert given.lookup_first == pytest.approx(0.5, abs=0.06)
    assert given.lookup > 0.99


LOOKED_UP = Plan(0, 11, Drafting.LOOKUP)
BOTH = Plan(0, 11, Drafting.BOTH)


@pytest.mark.parametrize(
    ("plan", "target", "first", "later"),
    [
        (LOOKED_UP, Tally(1, 11, 0, 1, 0, 1), (0, 1), (0, 0)),
        (LOOKED_UP, Tally(1, 11, 1, 1, 1, 1), (1, 1), (0, 1)),
        (LOOKED_UP, Tally(1, 11, 3, 1, 3, 1), (1, 1), (2, 3)),
        (LOOKED_UP, Tally(1, 11, SCORED, 1, SCORED, 1), (1, 1), (3, 3)),
        (LOOKED_UP, Tally(1, 11, 11, 0, 11, 0), (1, 1), (3, 3)),
        (LOOKED_UP, Tally(1, 1, 1, 0, 1, 0), (1, 1), (0, 0)),
        (LOOKED_UP, Tally(1, 0), (0, 0), (0, 0)),  # nothing was found, or the lowest tier did not answer
        (BOTH, Tally(1, 11, 3, 1, 3, 1), (1, 1), (2, 3)),
        (BOTH, Tally(1, 11, 3, 1), (0, 0), (0, 0)),  # the model's draft
        (Plan(8, 11, Drafting.LOOKUP), Tally(1, 11, 3, 1, 3, 1), (0, 0), (0, 0)),  # several drafts
    ],
    ids=str,
)
def test_every_draft_of_prompt_lookup_that_the_target_checks_tells_of_its_tokens(
    plan: Plan, target: Tally, first: tuple[int, int], later: tuple[int, int]
) -> None:
    """A guess that is scored in the same round counts too. It alone shows whether anything is found; and a draft of one
    token tells nothing of the next ones.
    """
    for guesses, right in ((Tally(), 0), (guess(2), 1)):
        known = Acceptances()
        known.add(plan, (target, Tally(), guesses))
        seen = [
            (known.chances[name].happened, known.chances[name].times) for name in ("lookup_first", "lookup", "found")
        ]
        assert seen == [
            (first[0] + right, first[1] + right),
            (later[0] + right, later[1] + 2 * right),
            (right, right),
        ]


@pytest.mark.parametrize(
    ("accepted", "rejected", "long"),
    [(2, 1, (0, 0)), (SCORED, 1, (0, 1)), (SCORED, 0, (0, 0)), (7, 1, (3, 4)), (11, 0, (7, 7))],
)
@pytest.mark.parametrize("plan", [LOOKED_UP, BOTH], ids=str)
def test_what_a_draft_tells_of_its_tokens_beyond_a_guess(
    plan: Plan, accepted: int, rejected: int, long: tuple[int, int]
) -> None:
    known = Acceptances()
    known.add(plan, (Tally(1, 11, accepted, rejected, accepted, rejected), Tally(), Tally()))
    assert (known.chances["lookup_long"].happened, known.chances["lookup_long"].times) == long


@pytest.mark.parametrize(
    ("plan", "tallies"),
    [
        (BOTH, (Tally(1, 11, 7, 1), Tally(), Tally())),  # the model's draft
        (Plan(8, 11, Drafting.LOOKUP), (Tally(1, 8, 8, 0, 8), Tally(2, 22, 18, 2, 18, 2), Tally())),
        (LOOKED_UP, (Tally(1, 0), Tally(), guess(SCORED) + guess(SCORED))),
    ],
    ids=str,
)
def test_only_a_draft_of_prompt_lookup_that_the_target_checks_tells_of_its_long_run(
    plan: Plan, tallies: tuple[Tally, ...]
) -> None:
    known = Acceptances()
    known.add(plan, tallies)
    assert known.chances["lookup_long"].times == 0


def test_until_long_drafts_were_made_they_are_expected_to_go_on_as_they_begin() -> None:
    """Short drafts show nothing of long ones, so a low estimate would never be corrected."""
    known = Acceptances()
    for _ in range(100):
        known.add(PLAIN, (Tally(), Tally(), guess(SCORED)))
    assert known.given().lookup_long == pytest.approx(known.given().lookup)
    assert known.given().lookup > 0.9
    assert Acceptances().given().lookup_long == pytest.approx(0.9), "also while nothing is known"
    for _ in range(100):
        known.add(LOOKED_UP, (Tally(1, 11, 5, 1, 5, 1), Tally(), guess(SCORED)))
    assert known.given().lookup_long < 0.6
    new_request = Acceptances().given(known.given())
    assert new_request == pytest.approx(known.given()), "it begins with what the server knows"
