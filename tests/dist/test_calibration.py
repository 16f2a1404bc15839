"""What the benchmark hands the simulator: passes as long as they are in actors, and what lies between them."""

from __future__ import annotations

from typing import Any

import pytest

from actors.bench.calibration import calibration
from triforce_core.messages import Tier
from triforce_core.simulate.model import simulate
from triforce_core.simulate.scenario import Scenario
from triforce_core.timeline import Stage

ALONE = {"draft": 2.0, "retrieval": 8.0, "target": 40.0}  # ms of a pass over one request; over two, half as much again


def table() -> dict[str, list[dict[str, Any]]]:
    return {
        tier: [{"batch": n, "tokens": 1, "ms": ms * (1 + (n - 1) / 2)} for n in (1, 2)] for tier, ms in ALONE.items()
    }


def sequential_run(batch: int, rounds: int = 3, blocks: int = 20, steps: int = 1) -> list[Stage]:
    """The passes of a run, in no particular order. Each pass takes 1.25 times as long as alone.

    A message between the drafting tiers takes 0.4 ms up and 0.6 ms down. A message up to the target takes 1 ms. After
    its pass the target is busy with other things for 2 ms a request, and its answer then takes 1.5 ms to the draft
    tier. Between two draft steps there are 0.1 ms.
    """
    stages, now = list[Stage](), 0.0

    def run(tier: Tier, tokens: int) -> None:
        nonlocal now
        ms = 1.25 * ALONE[tier.name.lower()] * (1 + (batch - 1) / 2)
        stages.append(Stage(tier, now / 1e3, (now + ms) / 1e3, ms / 1e3, batch, tokens * batch))
        now += ms

    for _ in range(blocks):
        for _ in range(rounds):
            for step in range(steps):
                now += 0.1 * (step > 0)
                run(Tier.DRAFT, 1)
            now += 0.4
            run(Tier.RETRIEVAL, 1)
            now += 0.6
        now += 0.4
        run(Tier.TARGET, 1)
        now += 1.0 + 0.5 + 2.0 * batch
    return stages[1::2] + stages[::2]


def ms_of(found: dict[str, Any], tier: str, batch: int) -> float:
    [point] = [p for p in found["stages"][tier] if p["batch"] == batch]
    return float(point["ms"])


@pytest.mark.parametrize("batch", [1, 2])
def test_the_parts_of_a_run_are_found(batch: int) -> None:
    found = calibration(table(), [sequential_run(batch), sequential_run(batch)], 9.0, shared_core=False)
    assert found["hop_ms"]["target_retrieval"] == pytest.approx(1.0)
    assert found["hop_ms"]["retrieval_draft"] == pytest.approx(0.5)
    for n in (1, 2):
        assert ms_of(found, "draft", n) == pytest.approx(1.25 * 2.0 * (1 + (n - 1) / 2))
        assert ms_of(found, "retrieval", n) == pytest.approx(1.25 * 8.0 * (1 + (n - 1) / 2))
        assert ms_of(found, "target", n) == pytest.approx(1.25 * 40.0 * (1 + (n - 1) / 2) + 2.0 * n)


def test_messages_within_a_shared_core_are_its_work() -> None:
    found = calibration(table(), [sequential_run(1)], 9.0, shared_core=True)
    assert found["hop_ms"]["retrieval_draft"] == 0
    assert ms_of(found, "draft", 1) == pytest.approx(1.25 * 2.0 + 2 * 0.5)


def test_tiers_that_took_no_part_are_as_alone() -> None:
    passes = [Stage(Tier.TARGET, 0.052 * n, 0.052 * n + 0.05, 0.05, 1, 1) for n in range(9)]
    found = calibration(table(), [passes], 0.2, shared_core=False)
    assert found["hop_ms"] == {"target_retrieval": 0.2, "retrieval_draft": 0.2}
    assert ms_of(found, "draft", 2) == pytest.approx(3.0)
    assert ms_of(found, "target", 1) == pytest.approx(50.0 + 2.0), "what it does between its passes"


def test_draft_steps_include_what_is_between_them() -> None:
    found = calibration(table(), [sequential_run(1, steps=3)], 9.0, shared_core=False)
    assert ms_of(found, "draft", 1) == pytest.approx(1.25 * 2.0 + 0.1 * 2 / 3)
    found = calibration(table(), [sequential_run(1, steps=3)], 9.0, shared_core=True)
    assert ms_of(found, "draft", 1) == pytest.approx(1.25 * 2.0 + 0.1 * 2 / 3 + 2 * 0.5 / 3)


def test_one_point_stands_for_every_batch() -> None:
    alone = {tier: points[:1] for tier, points in table().items()}
    found = calibration(alone, [sequential_run(2)], 9.0, shared_core=False)
    measured = 1.25 * 40.0 * 1.5
    assert ms_of(found, "target", 1) == pytest.approx(measured + 2.0 * 2)


@pytest.mark.parametrize("shared_core", [False, True])
def test_a_simulation_of_the_run_takes_as_long(shared_core: bool) -> None:
    """All drafts are accepted. So every block has three rounds of one draft step, in the run and in the simulation."""
    run = sequential_run(1, blocks=50)
    found = calibration(table(), [run], 9.0, shared_core=shared_core)
    scenario = Scenario.model_validate(
        {
            **found,
            "acceptance": {"retrieval": 1.0, "draft": 1.0},
            "lookaheads": (6, 1),
            "micro_batches": 1,
            "colocate": "draft_with_retrieval" if shared_core else "none",
            "load": {"concurrency": 1, "output_tokens": 70_000},
            "duration_s": 20,
        }
    )
    block_s = (max(stage.stop for stage in run) + 3.5e-3 - min(stage.start for stage in run)) / 50
    assert simulate(scenario).tokens_per_s == pytest.approx(7 / block_s, rel=0.02)
