"""The model of the protocol against what is known: formulas, conservation, queueing theory, and a table of facts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from triforce_core.cli import main
from triforce_core.errors import InvalidValueError
from triforce_core.messages import Tier
from triforce_core.simulate.bound import block_law, bound_tokens_per_s, expected_tokens
from triforce_core.simulate.measures import Result
from triforce_core.simulate.model import Block, RetrievalStation, simulate
from triforce_core.simulate.plan import Goal, plan
from triforce_core.simulate.scenario import PLACEMENTS, Scenario, StagePoint, load_scenario
from triforce_core.simulate.stage_times import StageTimes

# The table in docs/simulate.md: milliseconds of a step, acceptance, lookaheads; seconds that give some 3,000 blocks.
ROWS: dict[str, dict[str, Any]] = {
    "a100": {"ms": (0.7, 10.5, 54), "alphas": (0.6, 0.92), "lookaheads": (6, 1), "duration_s": 300},
    "h200": {"ms": (0.5, 4.6, 21), "alphas": (0.6, 0.92), "lookaheads": (8, 3), "duration_s": 120},
    "offload": {"ms": (1, 22, 900), "alphas": (0.6, 0.95), "lookaheads": (16, 1), "duration_s": 3000},
}
PLACES = list(PLACEMENTS)


def data_of(row: str, **changed: Any) -> dict[str, Any]:
    """A row as a scenario, whose tiers are 0.2 ms apart; `users` is short for a closed loop."""
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


def share_of_bound(scenario: Scenario) -> float:
    return simulate(scenario).tokens_per_s / bound_tokens_per_s(scenario)


# -- against the formulas ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookaheads", [(6, 1), (8, 3), (5, 0), (7, 4)])
def test_blocks_obey_wald_s_identity(lookaheads: tuple[int, int]) -> None:
    law = block_law(*lookaheads, 0.6)
    assert sum(law.lengths.values()) == pytest.approx(1)
    assert law.mean_length == pytest.approx(law.rounds * expected_tokens(0.6, lookaheads[1]))


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


@pytest.mark.parametrize("row", ROWS)
def test_run_ahead_of_one_request_is_its_formula(row: str) -> None:
    """Which takes the mean for each block's rounds, and no round of a wrong guess to be in the way."""
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
    [("a100", (54.7, 100, 72.7, 102)), ("h200", (137, 245, 170, 298)), ("offload", (10.5, 13.2, 11.2, None))],
)
def test_the_table_of_facts(row: str, expected: tuple[float | None, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made with rounds cut to the lookahead, as ours never are."""
    grow = RetrievalStation.grow

    def grow_to_the_lookahead(self: RetrievalStation, block: Block) -> None:
        grow(self, block)
        block.tokens = min(block.tokens, self.lookahead)

    monkeypatch.setattr(RetrievalStation, "grow", grow_to_the_lookahead)
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
    changed: dict[str, Any], colocate: str, arrivals: dict[str, float]
) -> None:
    if colocate == "all" and changed.get("run_ahead"):
        pytest.skip("refused")
    data = data_of("h200", **changed, colocate=colocate, duration_s=8)
    data["load"] |= {"output_tokens": [1, 40, 173], "prompt_tokens": [500, 2000]} | arrivals
    if arrivals:
        del data["load"]["concurrency"]
    result = simulate(Scenario.model_validate(data))
    finished = result.recorder.finished
    assert len(finished) == len(result.recorder.arrivals) > 0
    assert result.recorder.produced == sum(request.output_tokens for request in finished)
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


# -- planning ----------------------------------------------------------------------------------------------------------


def planned(**changed: Any) -> Scenario:
    load = {"rate_per_s": 12, "output_tokens": 100}
    return scenario_of("h200", load=load, micro_batches=3, duration_s=20, **changed)


def test_a_plan_is_the_smallest_that_serves() -> None:
    goal = Goal(p95_ms_per_token=12)
    chosen = plan(planned(), goal, 64)
    assert chosen.best is not None
    assert chosen.best.gpus == min(option.gpus for option in chosen.tried if option.serves)
    assert {option.scenario.colocate for option in chosen.tried} == set(PLACES)
    replicas = chosen.best.scenario.replicas
    fewer = [option for option in chosen.tried if option.scenario.replicas == replicas - 1]
    outcomes = [o.serves for o in fewer if o.scenario.colocate == chosen.best.scenario.colocate]
    assert outcomes == [False]
    figures = chosen.figures()
    assert figures["best"]["gpus"] == sum(figures["best"]["gpus_by_tier"].values())
    assert figures["best"]["ms_per_token"]["p95"] <= 12


def test_a_plan_that_nothing_meets_says_so() -> None:
    figures = plan(planned(), Goal(p95_ms_per_token=1), 6).figures()
    assert (figures["serves"], figures["best"]) == (False, None)
    assert figures["tried"]
    with pytest.raises(InvalidValueError, match=r"max-gpus: 1 .* 1200 tokens a second"):
        plan(planned(lookaheads=(0, 0)), Goal(p95_ms_per_token=1), 1)


def test_a_plan_counts_only_the_devices_of_tiers_that_take_part() -> None:
    chosen = plan(planned(lookaheads=(8, 0)), Goal(p95_request_s=60), 64)
    assert {tuple(option.figures()["gpus_by_tier"]) for option in chosen.tried} <= {
        ("retrieval", "target"),
        ("retrieval+target",),
    }


def test_a_queue_that_grows_is_not_served() -> None:
    load = {"rate_per_s": 12, "output_tokens": 100}
    assert not simulate(scenario_of("h200", load=load, duration_s=60)).keeps_up
    assert simulate(scenario_of("h200", load=load, duration_s=60, replicas=3)).keeps_up


# -- the command -------------------------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["triforce", "simulate", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


@pytest.fixture
def scenario_file(tmp_path: Path) -> str:
    path = tmp_path / "scenario.yaml"
    path.write_text(yaml.safe_dump(json.loads(scenario_of("a100", duration_s=5).model_dump_json(exclude_none=True))))
    return str(path)


@pytest.fixture
def bench_file(tmp_path: Path) -> str:
    path = tmp_path / "bench.json"
    figures = {
        "speedup": 2.0,
        "acceptance": {"retrieval": 0.9, "draft": 0.5},
        "calibration": {
            "stages": {
                "draft": [{"batch": 1, "tokens": 1, "ms": 1.3}],
                "retrieval": [{"batch": 1, "tokens": 4, "ms": 7.0}],
                "target": [{"batch": 1, "tokens": 9, "ms": 20.0}, {"batch": 4, "tokens": 9, "ms": 50.0}],
            },
            "hop_ms": {"target_retrieval": 0.3, "retrieval_draft": 0.1},
        },
    }
    path.write_text(json.dumps(figures))
    return str(path)


def simulated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(monkeypatch, *arguments, "--json") == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    return figures


def test_the_command_prints_what_the_library_finds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], scenario_file: str
) -> None:
    options = ("--concurrency", "4", "--micro-batches", "2", "--lookaheads", "8,2", "--alpha-draft", "0.7")
    more = ("--output", "300", "--replicas", "2", "--colocate", "draft_with_retrieval", "--seed", "5")
    load = {"concurrency": 4, "output_tokens": 300, "prompt_tokens": [1024]}
    expected: Result = simulate(
        scenario_of(
            "a100",
            load=load,
            micro_batches=2,
            lookaheads=(8, 2),
            alphas=(0.7, 0.92),
            replicas=2,
            colocate="draft_with_retrieval",
            seed=5,
            duration_s=5,
        )
    )
    printed = simulated(monkeypatch, capsys, scenario_file, *options, *more)
    assert printed == json.loads(json.dumps(expected.figures()))
    assert set(printed["utilisation"]) == {f"{i}/{name}" for i in (0, 1) for name in ("draft+retrieval", "target")}


def test_the_benchmark_s_figures_calibrate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bench_file: str, scenario_file: str
) -> None:
    options = ("--calibrate", bench_file, "--concurrency", "1", "--lookaheads", "6,1", "--micro-batches", "1")
    alone = simulated(monkeypatch, capsys, *options)
    law = block_law(6, 1, 0.5)
    tokens = sum(p * expected_tokens(0.9, length) for length, p in law.lengths.items())
    cycle_ms = law.rounds * (1.3 + 7 + 0.2) + 20 + 0.6
    assert alone["bound_tokens_per_s"] == pytest.approx(1e3 * tokens / cycle_ms, rel=1e-3)
    over_file = simulated(monkeypatch, capsys, scenario_file, *options)
    assert over_file["bound_tokens_per_s"] == alone["bound_tokens_per_s"]


@pytest.mark.parametrize(("name", "begins"), [("figure.svg", b"<?xml"), ("figure.png", b"\x89PNG")])
def test_figures_are_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], scenario_file: str, name: str, begins: bytes
) -> None:
    path = Path(scenario_file).with_name(name)
    simulated(monkeypatch, capsys, scenario_file, "--figure", str(path))
    assert path.read_bytes().startswith(begins)


def test_the_command_plans(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], scenario_file: str
) -> None:
    options = ("--plan", "--rate", "0.5", "--output", "100", "--p95-request-s", "10", "--duration", "60")
    figures = simulated(monkeypatch, capsys, scenario_file, *options)
    assert figures["serves"] is True
    assert figures["load"] == {"rate_per_s": 0.5, "prompt_tokens": [1024], "output_tokens": [100]}
    assert figures["best"]["request_latency_s"]["p95"] <= 10


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["/nowhere.yaml"], ["scenario", "/nowhere.yaml", "No such file"]),
        (["--calibrate", "/nowhere.json"], ["calibrate", "/nowhere.json", "No such file"]),
        ([], ["scenario", "None", "must be given"]),
        (["FILE", "--lookaheads", "8"], ["lookaheads", "8", "two whole numbers"]),
        (["FILE", "--lookaheads", "0,2"], ["lookaheads", "(0, 2)", "must have 0 for the draft tier"]),
        (["FILE", "--lookaheads", "65,2"], ["lookaheads", "(65, 2)", "between 0 and 64"]),
        (["FILE", "--micro-batches", "0"], ["micro_batches", "0", "greater than or equal to 1"]),
        (["FILE", "--micro-batches", "1", "--run-ahead"], ["run_ahead", "True", "micro_batches of 2"]),
        (["FILE", "--run-ahead", "--colocate", "all"], ["run_ahead", "device of its own"]),
        (["FILE", "--alpha-draft", "1.5"], ["acceptance.draft", "1.5", "less than or equal to 1"]),
        (["FILE", "--rate", "0"], ["load.rate_per_s", "0.0", "greater than 0"]),
        (["FILE", "--rate", "1", "--concurrency", "1"], ["rate", "1.0", "excludes --concurrency"]),
        (["FILE", "--colocate", "apart"], ["colocate", "apart", "none"]),
        (["FILE", "--duration", "inf"], ["duration_s", "inf", "finite"]),
        (["FILE", "--output", "0"], ["load.output_tokens", "0", "greater than or equal to 1"]),
        (["FILE", "--figure", "x.pdf"], ["figure", "x.pdf", ".svg, .png"]),
        (["FILE", "--figure", "/nowhere/x.svg"], ["figure", "/nowhere/x.svg", "directory"]),
        (["FILE", "--plan"], ["plan", "needs a latency"]),
        (["FILE", "--plan", "--p95-request-s", "1"], ["load", "concurrency", "must be a rate"]),
        (["FILE", "--plan", "--rate", "1", "--p95-request-s", "nan"], ["p95-request-s", "nan", "above 0"]),
        (["FILE", "--p95-request-s", "1"], ["plan", "add --plan"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    scenario_file: str,
    arguments: list[str],
    named: list[str],
) -> None:
    assert run(monkeypatch, *(scenario_file if each == "FILE" else each for each in arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    for part in named:
        assert part in captured.err


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"stages": {"target": [{"ms": 5}]}}, "stages.draft: .* must be given, for lookaheads"),
        ({"stages": {"target": [{"ms": 0}]}}, "stages.target.0.ms: 0 .* greater than 0"),
        ({"stages": {"target": []}}, "stages.target: .* at least 1 item"),
        ({"stages": {"target": [{"ms": 1}, {"ms": 2}]}}, "stages.target: .* once"),
        (
            {"stages": {"target": [{"ms": 1, "context": 8}, {"ms": 2}]}},
            "stages.target: .* all of its points or in none",
        ),
        ({"load": {"output_tokens": 5}}, "load: {} must state either"),
        ({"load": {"concurrency": 1, "users": 5}}, "load.users: 5 .* not permitted"),
        ({"warmup_s": 60, "duration_s": 60}, "warmup_s: 60.0 must be below duration_s 60.0"),
        ({"failures": {"draft": {"mtbf_s": 5}}}, "failures.draft.recovery_s: .* Field required"),
        ({"tiers": 3}, "tiers: 3 .* not permitted"),
    ],
)
def test_a_bad_scenario_names_field_value_and_rule(changed: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = tmp_path / "scenario.json"
    path.write_text(json.dumps(data_of("a100") | changed))
    with pytest.raises(InvalidValueError, match=named):
        load_scenario(path, {})


def test_a_bad_calibration_names_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "bench.json"
    for content, named in ("{}", "calibration: {} is refused: Field required"), ("nonsense", "is not valid JSON"):
        path.write_text(content)
        assert run(monkeypatch, "--calibrate", str(path), "--concurrency", "1") == 2
        assert named in capsys.readouterr().err
