"""TriForce equals plain decoding with the same seed, token for token, over a pairwise covering set of cases.

Plain decoding runs each request alone; TriForce runs them in one batch, with lookaheads of each request's own. Drafters
are the target with noise on its weights, so that proposals are accepted never, partly and always.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.conftest import HeldOut
from tests.exactness.cases import (
    CASES,
    COVERING,
    DEMO,
    FACTORS,
    PERFECT,
    Case,
    Outcome,
    decode_plainly,
    random_prompts,
    speculate,
)
from tests.pairwise import pairs_of
from triforce_core.messages import Tier

Prompts = Callable[[Case], tuple[int, ...]]
# Half of the cases; CI runs the others as well.
QUICK = [*COVERING[::2], DEMO[0], PERFECT]
LENGTHS = [60, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]  # output tokens
EVENTS = [
    *(
        f"{tier}: {kind}"
        for tier in ("TARGET", "RETRIEVAL")
        for kind in ("zero acceptance", "partial acceptance", "full acceptance with a bonus token")
    ),
    "RETRIEVAL: refresh in mid-stream",
    "RETRIEVAL: full tail",
]


@pytest.fixture(scope="module")
def prompts(held_out: HeldOut) -> Prompts:
    def prompts_of(case: Case) -> tuple[int, ...]:
        return held_out("turtle.py", 3 * case.budget + 100) if case.model == "demo" else random_prompts(case)

    return prompts_of


@functools.cache
def speculated(case: Case, num_tokens: int, text: tuple[int, ...]) -> Outcome:
    """Cached, so that counting events runs nothing again."""
    return speculate(case, num_tokens, text)


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=[] if case in QUICK else pytest.mark.ci) for case in CASES]
)
def test_speculation_changes_no_token(case: Case, num_tokens: int, prompts: Prompts) -> None:
    text = prompts(case)
    expected = decode_plainly(case, num_tokens, text)
    assert all(len(tokens) == num_tokens for tokens in expected)
    assert speculated(case, num_tokens, text).tokens == expected


@pytest.mark.ci
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_everything_that_can_happen_happened(num_tokens: int, prompts: Prompts) -> None:
    """Each kind of event happens at least 20 times. At each level acceptance ranges from below 0.2 to nearly 1."""
    outcomes = [speculated(case, num_tokens, prompts(case)) for case in CASES]
    events = sum((o.events for o in outcomes), Counter[str]())
    print(f"\n{num_tokens} output tokens:", *(f"{events[name]:7d}  {name}" for name in EVENTS), sep="\n")
    assert not [name for name in EVENTS if events[name] < 20]
    for level in (Tier.TARGET, Tier.RETRIEVAL):
        acceptances = [a for o in outcomes for a in o.acceptances(level)]
        print(f"acceptance at the {level.name} level: {min(acceptances):.3f} to {max(acceptances):.3f}")
        assert min(acceptances) < 0.2
        assert max(acceptances) > 0.95


def test_the_set_covers_every_pair() -> None:
    rows = [{name: getattr(case, name) for name in FACTORS} for case in COVERING]
    wanted = {(a, x, b, y) for a in FACTORS for x in FACTORS[a] for b in FACTORS for y in FACTORS[b] if a < b}
    assert wanted <= set().union(*map(pairs_of, rows))


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (1.0, 1.0), (1.0, 0.9)])
def test_drafters_that_are_the_target_and_see_everything_are_always_accepted(temperature: float, top_p: float) -> None:
    """Proposals could be rejected only if the KV of a tier were wrong, or if a tier drew by other rules. Snapshots,
    refreshes and growth must cause neither.
    """
    case = replace(PERFECT, temperature=temperature, top_p=top_p)
    outcome = speculate(case, 200, random_prompts(case))
    for request, levels in zip(case.requests(200, random_prompts(case)), outcome.tallies, strict=True):
        if len(request.prompt) + 200 <= case.budget:
            for level in levels[: sum(map(bool, request.lookaheads))]:  # the levels that judge proposals from below
                assert level.rejected == 0
                assert level.accepted > 50
    assert outcome.events["RETRIEVAL: refresh in mid-stream"] > 20
