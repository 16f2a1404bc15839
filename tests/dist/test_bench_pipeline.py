"""`triforce bench pipeline` and the axis concurrency of a sweep: requests decoded together in tier actors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.command_line import run
from tests.starting import LocalRay
from triforce_core.config import load_settings
from triforce_core.errors import InvalidValueError
from triforce_core.messages import Tier
from triforce_tools.bench.axes import Point
from triforce_tools.tiers.bound import Rounds
from triforce_tools.tiers.together import LEAD, Decoded, Run, Window, longest_output, roomy

POINT = Point(context=1000, budget=1024, chunk=8, dtype="float32", temperature=0.0, concurrency=3)
SMALL = ("--output", "24", "--repeats", "2", "--dtype", "float32", "--threads", "1", "--force", "--json")


@pytest.fixture(autouse=True)
def _own_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """These tests time nothing, so they need not wait for benchmarks of other processes."""
    monkeypatch.setattr("triforce_tools.bench.machine.LOCK", tmp_path / "bench.lock")


def test_the_window_opens_with_the_last_first_token_and_closes_when_enough_is_decoded() -> None:
    window, early, late = Window(2, 10), Decoded(), Decoded()

    def arrive(decoded: Decoded, tokens: int) -> bool:
        window.take(decoded, tokens)
        decoded.arrivals.append((0.0, tokens))
        return window.closed

    assert not arrive(early, 1)
    assert not arrive(early, 50), "the other has no token yet"
    assert not arrive(late, 1), "a first token is not decoded"
    assert not arrive(late, 4)
    assert not arrive(early, 5)
    assert arrive(late, 1)
    assert arrive(early, 1), "and it stays closed"


def test_what_is_measured_lies_between_the_last_first_token_and_the_first_end() -> None:
    early = Decoded([1] * 9, [(1.0, 1), (2.0, 4), (4.0, 4)])
    late = Decoded([2] * 7, [(3.0, 1), (3.5, 2), (5.0, 4)])
    measured = Run(0.5, [early, late]).measured(output=4)
    assert measured.ms_per_token == pytest.approx(1e3 / 6), "4 tokens of the one and 2 of the other in a second"
    assert measured.prefill_s == 2.5
    ended = Decoded([1] * 5, [(1.0, 1), (2.0, 4)])
    with pytest.raises(InvalidValueError, match="output: 4 is too short for 2 requests"):
        Run(0.5, [ended, late]).measured(output=4)


def test_each_request_has_room_for_a_lead() -> None:
    settings = load_settings()
    assert longest_output(settings, 1000, 100) == 100 + LEAD
    assert longest_output(settings, 16_000, 100) == 384, "as far as the context goes"
    two = [POINT, replace(POINT, context=4000)]
    wide = roomy(settings, two, 100)
    assert (wide.max_sequences, wide.target.kv_pool_tokens) == (3, 3 * 5128)  # 4000 + 100 + LEAD in whole chunks
    assert wide.target.max_stall_ms is None
    with pytest.raises(InvalidValueError, match="max_sequences 3 must be 1 where deterministic"):
        roomy(load_settings(deterministic=True), two, 100)


def test_the_bound_is_the_formula() -> None:
    """By hand: E2 = 4, n = 2, D = 2 (1 + 3.5) = 9 ms, t3 = 10.5 ms, L = 19.5 ms."""
    rounds = Rounds(
        tokens=4,
        inner=2,
        acceptance=0.8,
        draft=1e-3,
        retrieval=3.5e-3,
        shared=5.25e-3,
        target=10.5e-3,
        batches=(1, 1, 1),
    )
    assert rounds.bound(1, shared=False) == pytest.approx(4 / 19.5e-3), "one request: its latency"
    assert rounds.bound(2, shared=False) == pytest.approx(4 / 10.5e-3), "two: the slowest stage, the target"
    slow = replace(rounds, shared=6e-3)
    assert slow.bound(9, shared=True) == pytest.approx(4 / 12e-3), "draft and retrieval together need 12 ms"
    guessed = 0.8**4
    expected = 4 / (guessed * 10.5e-3 + (1 - guessed) * 19.5e-3)
    assert rounds.run_ahead_bound(3) == pytest.approx(expected)


@pytest.mark.slow
def test_a_pipeline_is_measured_and_traced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, local_ray: LocalRay
) -> None:
    local_ray.end()
    trace = tmp_path / "trace.json"
    load = ("--requests", "2", "--context", "200", "--lookaheads", "4,1", "--seed", "-1", "--trace", str(trace))
    assert run(monkeypatch, "bench", "pipeline", *load, *SMALL) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["identical"] is True
    assert figures["speedup"] > 0
    assert 0.1 < figures["share_of_bound"] < 1.2
    for tier in ("draft", "retrieval", "target"):
        assert figures["stage_ms"][tier] > 0
        assert 0 < figures["busy_share"][tier] <= 1
    assert figures["mean_batch"]["target"] <= 1, "a request per micro-batch"
    assert figures["tokens_per_round"] > 1
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["tid"] for event in events if event["ph"] == "X"} == {int(tier) for tier in Tier}
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"draft", "retrieval", "target"}


@pytest.mark.slow
def test_a_sweep_of_concurrency_decodes_requests_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, local_ray: LocalRay
) -> None:
    local_ray.end()
    out = str(tmp_path / "sweep.jsonl")
    arguments = ("--axis", "concurrency=1,2", "--plans", "4,2", "--context", "120", *SMALL, "--out", out)
    assert run(monkeypatch, "bench", "sweep", *arguments) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [figures["point"]["concurrency"] for figures in points] == [1, 2]
    for figures in points:
        assert list(figures["modes"]) == ["plain", "auto", "4,2"]
        for name, mode in figures["modes"].items():
            assert mode["identical_share"] == 1, name
            assert mode["tokens_per_s"] == pytest.approx(1e3 / mode["ms_per_token"])
        assert figures["modes"]["plain"]["speculative_share"] == 0
        assert figures["modes"]["4,2"]["tokens_per_round"] > 1
        assert figures["engine"] == {"micro_batches": 3, "colocate": "none"}
