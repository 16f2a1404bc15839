"""What a round of a plan is expected to be, against rounds that are played; and the choice between plans."""

from __future__ import annotations

import random
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triforce_core.messages import Drafting
from triforce_core.plans import (
    CHANGE,
    PLAIN,
    WORTHWHILE,
    Acceptance,
    Candidates,
    Costs,
    Floats,
    Plan,
    Round,
    Situation,
    Usual,
    choose,
    expected_rounds,
    plans,
)

ACCEPTANCE = Acceptance(0.9, model=0.5, model_below=0.6, lookup_first=0.5, lookup=0.8, lookup_long=0.95, found=0.4)
PLANS = [PLAIN, Plan(0, 3), Plan(0, 8, Drafting.LOOKUP), Plan(0, 2, Drafting.BOTH), Plan(8, 0), Plan(1, 1)]
PLANS += [Plan(8, 3, drafting) for drafting in Drafting]


def accepted(rng: random.Random, chance: float, proposed: int) -> int:
    return next((n for n in range(proposed) if rng.random() >= chance), proposed)


def played(plan: Plan, rng: random.Random) -> tuple[float, ...]:
    """A round as the tiers run it: tokens, proposed to the target, passes of retrieval, tokens that these verify, steps
    of the model, and whether anything is proposed.
    """

    def drafted(model: float) -> tuple[int, int, int]:
        """Accepted and proposed tokens, and the model's steps."""
        found = plan.drafting is not Drafting.MODEL and rng.random() < ACCEPTANCE.found
        if found:
            chances = [ACCEPTANCE.lookup_first, *[ACCEPTANCE.lookup] * 3, *[ACCEPTANCE.lookup_long] * plan.draft]
            wrong = (n for n, chance in enumerate(chances[: plan.draft]) if rng.random() >= chance)
            return next(wrong, plan.draft), plan.draft, 0
        if plan.drafting is Drafting.LOOKUP:
            return 0, 0, 0
        return accepted(rng, model, plan.draft), plan.draft, plan.draft

    if not plan.retrieval:
        right, proposed, steps = drafted(ACCEPTANCE.model)
        return right + 1, proposed, 0, 0, steps, proposed > 0
    block = passes = verified = steps = 0
    while block < plan.retrieval:
        right, below, more = drafted(ACCEPTANCE.model_below)
        block, passes, verified, steps = block + right + 1, passes + 1, verified + below, steps + more
    return accepted(rng, ACCEPTANCE.retrieval, block) + 1, block, passes, verified, steps, True


@pytest.fixture(scope="module")
def expected() -> Round:
    return expected_rounds(Candidates(PLANS), ACCEPTANCE)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_expected_rounds_are_the_means_of_rounds(plan: Plan, expected: Round) -> None:
    rng = random.Random(0)
    means = [fmean(values) for values in zip(*(played(plan, rng) for _ in range(20_000)), strict=True)]
    tokens, proposed, passes, verified, steps, drafts = np.array(expected)[:, Candidates(PLANS).index[plan]]
    assert [tokens, proposed * drafts, passes, passes * verified, steps, drafts] == pytest.approx(means, rel=0.03)


def round_s(costs: Costs, plan: Plan, acceptance: Acceptance = ACCEPTANCE) -> float:
    return float(costs.round_s(expected_rounds(Candidates([plan]), acceptance))[0])


def costs(*, groups: int = 1, overlapping: bool = False) -> Costs:
    return Costs(10.0, lambda tokens: 8 + 2 * tokens, lambda tokens: 3 + tokens, lambda _: 1.0, groups, overlapping)


def test_a_draft_that_finds_nothing_leaves_a_pass_over_one_token() -> None:
    """Such a pass takes less time than the line through longer passes predicts."""

    def verify(tokens: Floats) -> Floats:
        return 10 + tokens + 8 * (tokens > 1)

    costs = Costs(10 + 1, verify, verify, lambda tokens: 0.0)
    found = ACCEPTANCE.found
    expected = found * verify(1 + 8) + (1 - found) * verify(1)
    assert round_s(costs, Plan(0, 8, Drafting.LOOKUP)) == pytest.approx(expected)


def test_a_round_takes_the_sum_of_its_tiers_or_the_slowest_sets_the_pace() -> None:
    plan, right = Plan(4, 0), Acceptance(1, *[0] * 6)  # four passes of 4, then one over five tokens
    assert round_s(costs(), plan, right) == 4 * 4 + 18
    assert round_s(costs(groups=3), plan, right) == 3 * (4 * 4 + 18), "groups take turns on the same cores"
    assert round_s(costs(groups=3, overlapping=True), plan, right) == 3 * 18, "the target is never idle"
    assert round_s(costs(groups=1, overlapping=True), plan, right) == 4 * 4 + 18, "nothing else is there to do"
    assert round_s(costs(groups=3), PLAIN) == 10, "all plain requests are in one pass"


def test_plans_that_are_compared_at_once_cost_what_each_costs_by_itself() -> None:
    """A long draft among the candidates changes nothing for the short ones."""
    every = Candidates(PLANS)
    corrections = dict.fromkeys(every.kinds, 1.0)
    situation = Situation(costs(), ACCEPTANCE, corrections, {}, Usual(0, 0), cut_s=3.0, renewal_s=0.1, remaining=10)
    alone = [situation.seconds(Candidates([plan]))[0] for plan in every.each]
    assert situation.seconds(every) == pytest.approx(alone)
    cuts = [0.4 * (plan.retrieval > 0) for plan in every.each]
    assert situation._replace(cut_s=0, renewal_s=0).seconds(every) + cuts == pytest.approx(alone)


chances = st.floats(0, 1)


@settings(deadline=None, max_examples=60)
@given(
    st.builds(Acceptance, *[chances] * len(Acceptance._fields)),
    st.floats(1e-3, 1),
    st.floats(0, 0.2),
    st.floats(1e-3, 1),
    st.sampled_from([PLAIN, Plan(8, 3), Plan(0, 2, Drafting.LOOKUP)]),
)
def test_the_choice_is_plain_or_pays_and_nothing_is_clearly_better(
    acceptance: Acceptance, target: float, token: float, retrieval: float, present: Plan
) -> None:
    known = Costs(target + token, lambda n: target + token * n, lambda n: retrieval + 0.01 * n, lambda _: 0.1)
    candidates = Candidates(plans((8, 3), tuple(Drafting)))
    corrections = dict.fromkeys(candidates.kinds, 1.0)
    situation = Situation(known, acceptance, corrections, {}, Usual(0, 0), cut_s=1.0, renewal_s=0.001, remaining=100)
    choice, seconds = choose(candidates, situation, present), situation.seconds(candidates)
    assert choice.plain_s == seconds[candidates.index[PLAIN]]
    assert choice.seconds == seconds[candidates.index[choice.plan]]
    assert choice.plan == PLAIN or choice.seconds <= WORTHWHILE * choice.plain_s
    assert choice.seconds * min(CHANGE, WORTHWHILE) <= seconds.min()
    without = situation._replace(by_lookup=False)
    assert not choose(candidates, without, present).plan.by_lookup
    assert all(without.seconds(candidates)[candidates.by_lookup] == np.inf)
    assert without.seconds(candidates)[~candidates.by_lookup] == pytest.approx(seconds[~candidates.by_lookup])


@pytest.mark.parametrize(
    ("lookup", "model", "present", "chosen"),
    [
        (0.91, 2.0, "plain", "lookup"),
        (0.93, 2.0, "plain", "plain"),
        (0.93, 2.0, "lookup", "plain"),
        (0.90, 0.86, "lookup", "lookup"),
        (0.90, 0.85, "lookup", "model"),
        (0.93, 0.91, "lookup", "model"),
    ],
)
def test_a_plan_must_be_clearly_better_than_plain_decoding_and_than_the_present_plan(
    lookup: float, model: float, present: str, chosen: str
) -> None:
    by_kind = {"plain": PLAIN, "lookup": Plan(0, 1, Drafting.LOOKUP), "model": Plan(0, 1)}
    seconds = {"plain": 1.0, "lookup": lookup, "model": model}
    known = Costs(1.0, lambda tokens: 1.0, lambda tokens: 1.0, lambda tokens: 0.0)
    situation = Situation(known, Acceptance(*[0.0] * 7), seconds, {}, Usual(0, 0), 0.0, 0.0, 100)
    choice = choose(Candidates(by_kind.values()), situation, by_kind[present])
    assert (choice.plan.kind, choice.seconds) == (chosen, seconds[chosen])


def test_what_begins_to_draft_with_snapshots_pays_for_the_first() -> None:
    candidates = Candidates([PLAIN, Plan(8, 0)])
    acceptance, corrections = Acceptance(0.95, *[0] * 6), {"plain": 1.0, "retrieval": 1.0}
    cheap = Costs(1.0, lambda _: 1.0, lambda _: 0.1, lambda _: 0.0)

    def plan(cut_s: float, remaining: int) -> Plan:
        return choose(
            candidates, Situation(cheap, acceptance, corrections, {}, Usual(0, 0), cut_s, 0.0, remaining)
        ).plan

    assert plan(0.0, 10).retrieval
    assert plan(50.0, 200).retrieval
    assert plan(50.0, 10) == PLAIN, "too few tokens are left"


def test_what_rounds_take_beyond_their_passes_is_expected_of_other_kinds() -> None:
    passes_s = np.array([0.01, 0.02, 0.1])
    assert Usual(0.02, 0.004).seconds(passes_s) == pytest.approx([0.012, 0.024, 0.104])
    assert Usual(0.02, -0.004).seconds(passes_s) == pytest.approx(passes_s), "other kinds may gain nothing"
    assert Usual(0.0, 0.0).seconds(passes_s) == pytest.approx(passes_s)


def test_what_a_kind_has_shown_counts_by_its_weight() -> None:
    candidates = Candidates([PLAIN, Plan(8, 0)])
    corrections = {"plain": 1.0, "retrieval": 2.0}
    cheap = Costs(1.0, lambda _: 1.0, lambda _: 0.1, lambda _: 0.0)

    def seconds(doubt: float) -> float:
        usual = Usual(1.0, 0.9)
        situation = Situation(cheap, ACCEPTANCE, corrections, {"retrieval": doubt}, usual, 0.0, 0.0, 100)
        return float(situation.seconds(candidates)[candidates.index[Plan(8, 0)]])

    assert seconds(0.0) / seconds(1.0) == pytest.approx(2 * 1.8 / (1.8 + 0.9))
    assert seconds(0.5) == pytest.approx((seconds(0.0) + seconds(1.0)) / 2)


def test_plans_keep_to_the_lookaheads_and_tiers() -> None:
    every = [*plans((8, 3), tuple(Drafting))]
    assert len(set(every)) == len(every)
    assert max(sum(plan.lookaheads) for plan in every) == 11, "what a pass of the target is made for"
    assert max(plan.draft for plan in every if plan.retrieval) == 3
    assert {plan.drafting for plan in plans((8, 3), (Drafting.LOOKUP,)) if plan.draft} == {Drafting.LOOKUP}
    assert {plan.draft for plan in plans((8, 0), tuple(Drafting))} == {0}
    assert [*plans((0, 0), tuple(Drafting))] == [PLAIN]
