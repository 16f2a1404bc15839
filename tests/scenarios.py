"""The arrangements whose figures are known, as scenarios to simulate."""

from __future__ import annotations

from typing import Any

from triforce_core.messages import Tier
from triforce_core.simulate.scenario import PLACEMENTS, Scenario

# The table in docs/simulate.md: milliseconds of a step, acceptance, lookaheads; seconds that give some 3,000 blocks.
ROWS: dict[str, dict[str, Any]] = {
    "a100": {"ms": (0.7, 10.5, 54), "alphas": (0.6, 0.92), "lookaheads": (6, 1), "duration_s": 300},
    "h200": {"ms": (0.5, 4.6, 21), "alphas": (0.6, 0.92), "lookaheads": (8, 3), "duration_s": 120},
    "offload": {"ms": (1, 22, 900), "alphas": (0.6, 0.95), "lookaheads": (16, 1), "duration_s": 3000},
}
PLACES = list(PLACEMENTS)


def data_of(row: str, **changed: Any) -> dict[str, Any]:
    """A row as a scenario whose tiers are 0.2 ms apart. `users` requests are decoded at once, and each is followed by
    another.
    """
    given = ROWS[row] | changed
    alpha_draft, alpha_retrieval = given.pop("alphas")
    stages = {tier.name.lower(): [{"ms": ms}] for tier, ms in zip(Tier, given.pop("ms"), strict=True)}
    load = {"concurrency": given.pop("users", 1), "output_tokens": 3000}
    return {
        "stages": stages,
        "acceptance": {"retrieval": alpha_retrieval, "draft": alpha_draft},
        "hop_ms": {"target_retrieval": 0.2, "retrieval_draft": 0.2},
        "load": load,
        "seed": 1,
    } | given


def scenario_of(row: str, **changed: Any) -> Scenario:
    return Scenario.model_validate(data_of(row, **changed))
