"""`triforce bench pipeline`: what it promises to print, on stages that sleep."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command_line import run
from triforce_core.config import load_settings
from triforce_core.errors import InvalidValueError
from triforce_core.messages import Tier
from triforce_tools.tiers.arrangement import Run
from triforce_tools.tiers.paced import VOCAB_SIZE, Pace
from triforce_tools.tiers.pipeline import Rounds


@pytest.mark.slow
def test_paced_stages_give_the_figures_and_the_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace, figure = tmp_path / "trace.json", tmp_path / "trace.svg"
    load = ["--requests", "2", "--micro-batches", "2", "--context", "32", "--output", "60", "--repeats", "1"]
    load += ["--seed", "-1"]
    paced = ["--paced", "0.5,3,6,0.7,0.9", "--lookaheads", "4,2", "--trace", str(trace), "--figure", str(figure)]
    assert run(monkeypatch, "bench", "pipeline", *load, *paced, "--force", "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["identical"] is True
    assert figures["paced"]["ms"] == [0.5, 3, 6]
    assert figures["speedup"] == figures["pipelined_tokens_per_s"] / figures["sequential_tokens_per_s"]
    assert 0.3 < figures["share_of_bound"] < 1.1
    for tier, ms in zip(("draft", "retrieval", "target"), (0.5, 3, 6), strict=True):
        assert figures["stage_ms"][tier] >= ms * 0.99
        assert 0 < figures["busy_share"][tier] <= 1
    assert figures["acceptance"]["retrieval"] == pytest.approx(0.9, abs=0.12)
    assert figures["acceptance"]["draft"] == pytest.approx(0.7, abs=0.15)
    assert figures["mean_batch"]["target"] <= 1.0
    assert 0 < figures["bytes_per_token"] < 64
    assert figures["hop_ms_p50"] > 0
    events = json.loads(trace.read_text())["traceEvents"]
    lanes = {event["tid"] for event in events if event["ph"] == "X"}
    assert lanes == {int(tier) for tier in Tier}
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"draft", "retrieval", "target"}
    assert figure.stat().st_size > 1000


@pytest.mark.slow
def test_requests_decode_together_though_prompts_are_read_one_after_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without kept KV, the first of these requests would end before the last begins."""
    load = ("--requests", "3", "--context", "3000", "--output", "24", "--repeats", "1", "--dtype", "float32")
    assert run(monkeypatch, "bench", "pipeline", *load, "--force", "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["identical"] is True
    assert figures["speedup"] > 0


@pytest.mark.slow
def test_requests_that_never_decode_together_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Run, "end", property(lambda ran: ran.begin))
    load = ("--requests", "2", "--context", "64", "--output", "16", "--repeats", "1", "--paced", "0.5,3,6,0.7,0.9")
    assert run(monkeypatch, "bench", "pipeline", *load, "--force") == 2
    assert "output: 16 must be more: the requests never decoded together" in capsys.readouterr().err


def test_the_bound_is_the_formula() -> None:
    """By hand: E2 = 4, n = 2, D = 2 (1 + 3 + .5) = 9 ms, t3 = 10 ms, L = 19.5 ms."""
    rounds = Rounds(
        tokens=4,
        inner=2,
        acceptance=0.8,
        draft=1e-3,
        retrieval=3e-3,
        shared=5e-3,
        target=10e-3,
        hop=0.5e-3,
        batches=(1, 1, 1),
    )
    assert rounds.bound(1, shared=False) == pytest.approx(4 / 19.5e-3), "one request: its latency"
    assert rounds.bound(2, shared=False) == pytest.approx(4 / 10e-3), "two: the slowest stage, the target"
    assert rounds.bound(9, shared=True) == pytest.approx(4 / 10e-3), "draft and retrieval together need 10 ms as well"
    settings = load_settings(speculation={"lookaheads": [3, 1]})
    guessed = 0.8**4
    expected = 4 / (guessed * 10e-3 + (1 - guessed) * 19.5e-3)
    assert rounds.run_ahead_bound(settings) == pytest.approx(expected)


def test_paced_tiers_agree_as_often_as_told() -> None:
    pace = Pace.parse(".5,4.6,21,.6,.92")
    count = 4000
    target, retrieval, draft = ([pace.token(tier, seed=1, position=n) for n in range(count)] for tier in reversed(Tier))
    assert sum(a == b for a, b in zip(target, retrieval, strict=True)) / count == pytest.approx(0.92, abs=0.02)
    assert sum(a == b for a, b in zip(retrieval, draft, strict=True)) / count == pytest.approx(0.6, abs=0.03)
    assert len(set(target)) > VOCAB_SIZE / 2


@pytest.mark.parametrize("text", ["1,2,3", "a,b,c,d,e", "1,2,3,4,0.5", "-1,2,3,0.5,0.5", "1,2,3,0.5,0.5,6"])
def test_a_wrong_pace_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidValueError, match="paced"):
        Pace.parse(text)
