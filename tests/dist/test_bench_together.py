"""`triforce bench sweep --axis concurrency`: requests decoded together in tier actors, and the window measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.command_line import run
from tests.starting import LocalRay
from triforce_core.config import load_settings
from triforce_core.errors import InvalidValueError
from triforce_tools.bench.axes import Point
from triforce_tools.tiers.arrangement import Decoded
from triforce_tools.tiers.together import LEAD, Window, longest_output, roomy

POINT = Point(context=1000, budget=1024, chunk=8, dtype="float32", temperature=0.0, concurrency=3)


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


@pytest.mark.slow
def test_requests_decode_together_in_actors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, local_ray: LocalRay
) -> None:
    local_ray.end()
    out = str(tmp_path / "sweep.jsonl")
    tiny = ("--context", "120", "--output", "24", "--repeats", "2", "--dtype", "float32", "--threads", "1")
    arguments = ("--axis", "concurrency=1,2", "--plans", "4,2", *tiny, "--out", out, "--force", "--json")
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
