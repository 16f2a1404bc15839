"""What a round of a plan is expected to be, against rounds that are played."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from triforce_core.messages import Drafting
from triforce_core.plans import PLAIN, Acceptance, Plan, expected_round, plans


def acceptance_of(plan: Plan) -> Acceptance:
    """Each token of a draft of the model has the chance .5, or .6 where the retrieval tier verifies it."""
    means = (sum(chance**n for n in range(1, plan.draft + 1)) for chance in (0.5, 0.6))
    return Acceptance(0.9, *means, 2.0, 2.4, lookup_first=0.5, lookup=0.8, lookup_long=0.95, found=0.4)


ACCEPTANCE = acceptance_of(PLAIN)
PLANS = [PLAIN, Plan(0, 3), Plan(0, 8, Drafting.LOOKUP), Plan(0, 2, Drafting.BOTH), Plan(8, 0), Plan(1, 1)]
PLANS += [Plan(8, 3, drafting) for drafting in Drafting]


def accepted(rng: random.Random, chance: float, proposed: int) -> int:
    return next((n for n in range(proposed) if rng.random() >= chance), proposed)


def played(plan: Plan, rng: random.Random) -> tuple[float, ...]:
    """A round as the tiers run it: tokens, proposed to the target, passes of retrieval, steps of the model."""

    def drafted(chance: float, passes: float) -> tuple[int, int, int]:
        """Accepted and proposed tokens, and the model's steps."""
        if not plan.draft:
            return 0, 0, 0
        found = plan.drafting is not Drafting.MODEL and rng.random() < ACCEPTANCE.found
        if found:
            chances = [ACCEPTANCE.lookup_first, *[ACCEPTANCE.lookup] * 3, *[ACCEPTANCE.lookup_long] * plan.draft]
            wrong = (n for n, chance in enumerate(chances[: plan.draft]) if rng.random() >= chance)
            return next(wrong, plan.draft), plan.draft, 0
        if plan.drafting is Drafting.LOOKUP:
            return 0, 0, 0
        passes = min(passes, plan.draft)
        steps = int(passes) + (rng.random() < passes % 1)
        return accepted(rng, chance, plan.draft), steps, steps

    if not plan.speculates:
        return 1, 0, 0, 0
    if not plan.retrieval:
        right, proposed, steps = drafted(0.5, ACCEPTANCE.steps)
        return right + 1, proposed, 0, steps
    block = passes = steps = 0
    while block < plan.retrieval:
        right, _, more = drafted(0.6, ACCEPTANCE.steps_below)
        block, passes, steps = block + right + 1, passes + 1, steps + more
    return accepted(rng, ACCEPTANCE.retrieval, block) + 1, block, passes, steps


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_expected_rounds_are_the_means_of_rounds(plan: Plan) -> None:
    rng = random.Random(0)
    means = [fmean(values) for values in zip(*(played(plan, rng) for _ in range(20_000)), strict=True)]
    assert [*expected_round(plan, acceptance_of(plan))] == pytest.approx(means, rel=0.03)


def test_a_plan_without_drafts_runs_no_drafting_model() -> None:
    for accepted in (0.1, 2.0):
        alone = expected_round(Plan(8, 0), ACCEPTANCE._replace(accepted_below=accepted))
        assert (alone.passes, alone.steps) == (8, 0)


def test_plans_keep_to_the_lookaheads_and_tiers() -> None:
    every = plans((8, 3), tuple(Drafting), 16)
    assert len(set(every)) == len(every)
    assert max(sum(plan.lookaheads) for plan in every) == 11, "what a pass of the target is made for"
    assert max(plan.draft for plan in every if plan.retrieval) == 3
    assert {plan.nodes for plan in every if plan.retrieval and plan.draft and plan.drafting != Drafting.LOOKUP} == {16}
    assert {plan.nodes for plan in every if not plan.retrieval or plan.drafting == Drafting.LOOKUP} == {0}
    assert {plan.drafting for plan in plans((8, 3), (Drafting.LOOKUP,), 16) if plan.draft} == {Drafting.LOOKUP}
    assert {plan.draft for plan in plans((8, 0), tuple(Drafting), 16)} == {0}
    assert plans((0, 0), tuple(Drafting), 16) == [PLAIN]
