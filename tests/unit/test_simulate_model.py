"""The model of the protocol against what is known: formulas, conservation, queueing theory, and a table of facts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from tests.scenarios import PLACES, ROWS, data_of, scenario_of
from triforce_core.messages import Tier
from triforce_core.simulate.bound import block_lengths, bound_tokens_per_s, expected_tokens
from triforce_core.simulate.measures import Recorder
from triforce_core.simulate.model import simulate
from triforce_core.simulate.requests import Block
from triforce_core.simulate.scenario import Scenario, StagePoint
from triforce_core.simulate.stage_times import StageTimes
from triforce_core.simulate.tiers import RetrievalStation


def share_of_bound(scenario: Scenario) -> float:
    return simulate(scenario).tokens_per_s / bound_tokens_per_s(scenario)


# -- against the formulas ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookaheads", [(6, 1), (8, 3), (5, 0), (7, 4)])
def test_blocks_obey_wald_s_identity(lookaheads: tuple[int, int]) -> None:
    blocks = block_lengths(*lookaheads, 0.6)
    assert sum(blocks.lengths.values()) == pytest.approx(1)
    assert blocks.mean_length == pytest.approx(blocks.rounds * expected_tokens(0.6, lookaheads[1]))


@pytest.mark.parametrize("users", [1, 3])
def test_sequential_mode_is_exactly_the_formula_where_nothing_is_rejected(users: int) -> None:
    """Three rounds of two tokens; seven tokens a block; each way 0.2 ms."""
    load = {"concurrency": users, "output_tokens": 700}
    scenario = scenario_of("a100", alphas=(1, 1), micro_batches=1, load=load, duration_s=1)
    cycle_s = (3 * (0.7 + 10.5 + 0.4) + 54 + 0.4) / 1e3
    assert bound_tokens_per_s(scenario) == pytest.approx(users * 7 / cycle_s, rel=1e-12)
    result = simulate(scenario)
    assert len(result.recorder.finished) == users
    for request in result.recorder.finished:
        assert request.latency_s == pytest.approx(100 * cycle_s, rel=1e-9)


@pytest.mark.parametrize("row", ROWS)
def test_sequential_mode_is_the_formula_in_expectation(row: str) -> None:
    assert share_of_bound(scenario_of(row, micro_batches=1)) == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize(
    ("row", "micro_batches", "share"),
    [
        ("a100", 2, 0.95),
        ("a100", 3, 0.95),
        # Retrieval is nearly as busy as the target here, and its rounds vary: two in turn cannot hide each other.
        ("h200", 2, 0.88),
        ("h200", 3, 0.94),
    ],
)
def test_micro_batches_come_near_the_bound(row: str, micro_batches: int, share: float) -> None:
    scenario = scenario_of(row, micro_batches=micro_batches, users=micro_batches)
    assert share <= share_of_bound(scenario) <= 1.02


@pytest.mark.parametrize(("row", "micro_batches"), [("a100", 2), ("h200", 2), ("h200", 3)])
def test_micro_batches_keep_the_busiest_device_busy_where_rounds_do_not_vary(row: str, micro_batches: int) -> None:
    scenario = scenario_of(row, alphas=(1, 0.92), micro_batches=micro_batches, users=micro_batches)
    assert 0.97 <= share_of_bound(scenario) <= 1.02


@pytest.mark.parametrize("row", ["h200", *(pytest.param(row, marks=pytest.mark.slow) for row in ("a100", "offload"))])
def test_run_ahead_of_one_request_is_its_formula(row: str) -> None:
    """The formula gives every block the mean number of rounds. It also assumes that no round of a wrong guess delays
    the next work.
    """
    scenario = scenario_of(row, micro_batches=2, run_ahead=True)
    shares = [share_of_bound(scenario.model_copy(update={"seed": seed})) for seed in range(3)]
    assert sum(shares) / 3 == pytest.approx(1, rel=0.05)
    assert bound_tokens_per_s(scenario) > 1.05 * bound_tokens_per_s(scenario_of(row, micro_batches=2))


def test_run_ahead_stays_away_beside_micro_batches() -> None:
    without, with_it = (
        simulate(scenario_of("h200", users=3, micro_batches=3, run_ahead=on, duration_s=10)) for on in (False, True)
    )
    for device, passes in without.passes.items():  # in the end, when users leave, it may come in
        busy = [each for each in passes if each.end_s < 10]
        assert busy == with_it.passes[device][: len(busy)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("a100", (54.7, 100, 72.7, 102)),
        ("h200", (137, 245, 170, 298)),
        pytest.param("offload", (10.5, 13.2, 11.2, None), marks=pytest.mark.slow),
    ],
)
def test_the_table_of_facts(row: str, expected: tuple[float | None, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made with rounds cut to the lookahead, as ours never are, and no block handed up early, as ours are."""
    grow = RetrievalStation.grow

    def grow_to_the_lookahead(self: RetrievalStation, block: Block) -> None:
        grow(self, block)
        block.tokens = min(block.tokens, self.lookahead)

    monkeypatch.setattr(RetrievalStation, "grow", grow_to_the_lookahead)
    monkeypatch.setattr(RetrievalStation, "early", lambda *_: [])
    settings: list[dict[str, Any]] = [
        {"micro_batches": 1},
        {"micro_batches": 2, "users": 2},
        {"micro_batches": 2, "run_ahead": True},
        {"micro_batches": 3, "users": 3},
    ]
    for changed, value in zip(settings, expected, strict=True):
        if value is not None:
            assert simulate(scenario_of(row, **changed)).tokens_per_s == pytest.approx(value, rel=0.04)


def test_plain_decoding_takes_the_target_alone() -> None:
    scenario = scenario_of("a100", lookaheads=(0, 0), micro_batches=1, duration_s=54)
    result = simulate(scenario)
    assert list(result.passes) == ["0/target"]
    assert result.tokens_per_s == pytest.approx(1e3 / 54, rel=0.002)


def test_arrivals_and_queue_are_those_of_an_m_d_1_station() -> None:
    """One request at a time of one token and one second: Pollaczek–Khinchine gives the mean latency."""
    load = {"rate_per_s": 0.6, "output_tokens": 1}
    changed = {"lookaheads": (0, 0), "max_sequences": 1, "load": load, "duration_s": 20_000, "warmup_s": 100}
    result = simulate(scenario_of("a100", ms=(1, 1, 1000), **changed))
    latencies = [request.latency_s for request in result.measured]
    assert sum(latencies) / len(latencies) == pytest.approx(1 + 0.6 / (2 * (1 - 0.6)), rel=0.05)
    assert result.mean_queues["0/admission"] == pytest.approx(0.6 * 0.6 / (2 * (1 - 0.6)), rel=0.1)  # Little
    assert result.utilisation["0/target"] == pytest.approx(0.6, rel=0.03)


def test_prompts_are_read_in_chunks_before_the_first_token() -> None:
    load = {"concurrency": 1, "prompt_tokens": 5000, "output_tokens": 7}
    prefill = {"tokens_per_s": 10_000, "chunk": 2048}
    result = simulate(scenario_of("a100", alphas=(1, 1), load=load, prefill=prefill, duration_s=0.1))
    (request,) = result.recorder.finished
    block_s = (3 * (0.7 + 10.5 + 0.4) + 54 + 0.4) / 1e3
    assert request.first_token_s == pytest.approx(0.5 + block_s)
    assert [round(each.end_s - each.start_s, 6) for each in result.passes["0/target"][:3]] == [0.2048, 0.2048, 0.0904]


# -- what holds whatever the scenario ----------------------------------------------------------------------------------

FAILING = {tier: {"mtbf_s": mtbf, "recovery_s": 1} for tier, mtbf in (("draft", 4), ("retrieval", 5), ("target", 9))}
WILD: list[dict[str, Any]] = [
    {"users": 5, "micro_batches": 2, "replicas": 2},
    {"users": 5, "micro_batches": 1, "max_sequences": 3},
    {"users": 7, "micro_batches": 3, "jitter_ms": 5, "failures": FAILING},
    {"users": 1, "micro_batches": 2, "run_ahead": True, "jitter_ms": 2, "failures": FAILING},
    {"users": 4, "micro_batches": 1, "failures": FAILING, "prefill": {"tokens_per_s": 5000, "chunk": 300}},
    {"users": 4, "micro_batches": 6, "run_ahead": True, "failures": FAILING, "prefill": {"tokens_per_s": 5000}},
    {"lookaheads": (4, 0), "users": 3, "micro_batches": 2, "failures": FAILING},
    {"lookaheads": (0, 0), "users": 3, "micro_batches": 2, "failures": FAILING},
]


@pytest.mark.parametrize("colocate", PLACES)
@pytest.mark.parametrize("changed", WILD, ids=[str(i) for i in range(len(WILD))])
@pytest.mark.parametrize("arrivals", [{}, {"rate_per_s": 1.0}], ids=["closed", "poisson"])
def test_every_token_is_produced_and_no_two_passes_overlap(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], colocate: str, arrivals: dict[str, float]
) -> None:
    if colocate == "all" and changed.get("run_ahead"):
        pytest.skip("refused")
    produced, commit = list[int](), Recorder.commit

    def counted(recorder: Recorder, now_s: float, tokens: int, since_s: float) -> None:
        produced.append(tokens)
        commit(recorder, now_s, tokens, since_s)

    monkeypatch.setattr(Recorder, "commit", counted)
    data = data_of("h200", **changed, colocate=colocate, duration_s=8)
    data["load"] |= {"output_tokens": [1, 40, 173], "prompt_tokens": [500, 2000]} | arrivals
    if arrivals:
        del data["load"]["concurrency"]
    result = simulate(Scenario.model_validate(data))
    finished = result.recorder.finished
    assert len(finished) == len(result.recorder.arrivals) > 0
    assert sum(produced) == sum(request.output_tokens for request in finished)
    assert all(request.arrived_s < request.first_token_s <= request.finished_s for request in finished)
    for passes in result.passes.values():
        assert all(earlier.end_s <= later.start_s for earlier, later in pairwise(passes))
    assert all(0 <= share <= 1 for share in result.utilisation.values())


@pytest.mark.parametrize("changed", WILD, ids=[str(i) for i in range(len(WILD))])
def test_the_same_seed_gives_the_same_result(changed: dict[str, Any]) -> None:
    one, again, other = (simulate(scenario_of("h200", **changed, duration_s=5, seed=seed)) for seed in (1, 1, 2))
    assert one == again
    if changed.get("lookaheads") != (0, 0) or "failures" in changed:
        assert one.passes != other.passes


def test_tiers_on_one_device_take_turns() -> None:
    apart, together = (
        simulate(scenario_of("h200", users=3, micro_batches=3, colocate=colocate, duration_s=30))
        for colocate in ("none", "all")
    )
    (passes,) = together.passes.values()
    assert {each.tier for each in passes} == set(Tier)
    assert together.tokens_per_s < 0.6 * apart.tokens_per_s
    assert together.utilisation["0/draft+retrieval+target"] > 0.99


def test_no_pass_takes_more_than_its_micro_batch_and_sequential_ones_take_all() -> None:
    for micro_batches, largest in (1, 6), (2, 3), (4, 2):
        result = simulate(scenario_of("h200", users=6, micro_batches=micro_batches, duration_s=5))
        batches = [each.batch for each in result.passes["0/target"] if each.end_s < 5]
        assert max(batches) == largest
        assert micro_batches > 1 or set(batches) == {6}


@pytest.mark.parametrize("tier", [tier.name.lower() for tier in Tier])
def test_failures_cost_throughput(tier: str) -> None:
    failures = {tier: {"mtbf_s": 5, "recovery_s": 5}}
    healthy, failing = (
        simulate(scenario_of("a100", users=2, micro_batches=2, failures=given, duration_s=100))
        for given in ({}, failures)
    )
    assert failing.tokens_per_s < 0.95 * healthy.tokens_per_s
    assert failing.failures[tier] > 3


def test_a_retrieval_tier_that_stays_down_leaves_plain_decoding() -> None:
    failures = {"retrieval": {"mtbf_s": 1e-6, "recovery_s": 1e6}}
    result = simulate(scenario_of("a100", micro_batches=1, failures=failures, duration_s=54))
    assert result.tokens_per_s == pytest.approx(1e3 / 54, rel=0.01)


def test_a_draft_tier_that_stays_down_leaves_rounds_of_one_token() -> None:
    failures = {"draft": {"mtbf_s": 1e-6, "recovery_s": 1e6}}
    down = simulate(scenario_of("a100", micro_batches=1, failures=failures, duration_s=100))
    skipped = simulate(scenario_of("a100", micro_batches=1, lookaheads=(6, 0), duration_s=100))
    assert down.tokens_per_s == pytest.approx(skipped.tokens_per_s, rel=0.01)


# -- stage times -------------------------------------------------------------------------------------------------------


def table(value: Callable[[int, int], float]) -> StageTimes:
    return StageTimes([StagePoint(batch=b, tokens=t, ms=value(b, t)) for b in (1, 4, 8) for t in (1, 9)])


def test_stage_times_are_bilinear_between_points_and_rise_beyond() -> None:
    times = table(lambda batch, tokens: 3 + 2 * batch + 0.5 * tokens + 0.25 * batch * tokens)
    for batch, tokens in (1, 1), (8, 9), (3, 4.5), (6, 2), (16, 20):
        assert times.ms(batch, tokens, 0) == pytest.approx(3 + 2 * batch + 0.5 * tokens + 0.25 * batch * tokens)
    assert table(lambda batch, tokens: 10 - batch).ms(80, 1, 0) == 2  # a wider pass is never faster than measured


def test_one_point_is_a_constant_and_contexts_are_interpolated() -> None:
    assert StageTimes([StagePoint(ms=7)]).ms(99, 99, 99) == 7
    times = StageTimes([StagePoint(context=1000, ms=10), StagePoint(context=3000, ms=30)])
    assert [times.ms(1, 1, context) for context in (500, 1000, 2000, 4000)] == [10, 10, 20, 40]


def test_a_target_that_idles_gets_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are two requests, and rounds vary. A target that shares its device with the drafting tiers gains nothing,
    because they take turns.
    """
    settings: dict[str, Any] = {"users": 2, "micro_batches": 2, "duration_s": 60}
    apart, together = (simulate(scenario_of("h200", **settings, colocate=c)) for c in ("none", "all"))
    monkeypatch.setattr(RetrievalStation, "early", lambda *_: [])
    waiting, same = (simulate(scenario_of("h200", **settings, colocate=c)) for c in ("none", "all"))
    assert apart.tokens_per_s > 1.03 * waiting.tokens_per_s
    assert together.tokens_per_s == same.tokens_per_s


def test_guesses_that_are_dropped_in_their_round_leave_nothing() -> None:
    stages = {tier: [{"ms": ms}] for tier, ms in (("draft", 1), ("retrieval", 8), ("target", 20))}
    scenario = Scenario.model_validate(
        {
            "stages": stages,
            "acceptance": {"retrieval": 0.5, "draft": 0.7},
            "lookaheads": (4, 3),
            "micro_batches": 3,
            "run_ahead": True,
            "load": {"concurrency": 2, "output_tokens": 300},
            "duration_s": 20,
        }
    )
    assert simulate(scenario).tokens_per_s > 0
