"""`triforce simulate` as its users meet it: what it prints, draws, plans and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command_line import Refusals, run
from tests.scenarios import PLACES, data_of, scenario_of
from triforce_core.errors import InvalidValueError
from triforce_core.simulate.bound import block_lengths, expected_tokens
from triforce_core.simulate.measures import Result
from triforce_core.simulate.model import simulate
from triforce_core.simulate.plan import Goal, plan
from triforce_core.simulate.scenario import Scenario, load_scenario

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
    assert run(monkeypatch, "simulate", *arguments, "--json") == 0
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
    blocks = block_lengths(6, 1, 0.5)
    tokens = sum(p * expected_tokens(0.9, length) for length, p in blocks.lengths.items())
    cycle_ms = blocks.rounds * (1.3 + 7 + 0.2) + 20 + 0.6
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
        ([], ["scenario: None was given: name a scenario file, or --calibrate"]),
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
        (["FILE", "--plan"], ["plan: True needs a limit"]),
        (["FILE", "--plan", "--p95-request-s", "1"], ["load", "concurrency", "must be a rate"]),
        (["FILE", "--plan", "--rate", "1", "--p95-request-s", "nan"], ["p95-request-s", "nan", "above 0"]),
        (["FILE", "--p95-request-s", "1"], ["plan", "add --plan"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    refusals: Refusals, scenario_file: str, arguments: list[str], named: list[str]
) -> None:
    refusals.check(named, "simulate", *(scenario_file if each == "FILE" else each for each in arguments))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"stages": {"target": [{"ms": 5}]}}, "stages.draft: .* must be given, because lookaheads .* use this tier"),
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
        assert run(monkeypatch, "simulate", "--calibrate", str(path), "--concurrency", "1") == 2
        assert named in capsys.readouterr().err
