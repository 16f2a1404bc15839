"""`triforce bench serve`, and the load generator that the documentation names, against our own server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import run
from tests.serve.conftest import Server

ROOT = Path(__file__).parents[2]
LOAD = ROOT / "docs" / "examples" / "load.sh"
DOORS, MODES = ("grpc", "http"), ("plain", "speculating")


@pytest.fixture
def rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], server: Server, request: pytest.FixtureRequest
) -> list[dict[str, Any]]:
    """The rows that `triforce bench serve` measures with the test's options."""
    where = ("--url", server.url, "--grpc", server.grpc_address, "--json")
    assert run(monkeypatch, "bench", "serve", *where, *request.param.split()) == 0
    measured: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    return measured


@pytest.mark.parametrize("rows", ["--context 300 --output 24 --repeats 2 --streams 2"], indirect=True)
def test_each_door_is_measured_plain_and_speculating(rows: list[dict[str, Any]]) -> None:
    assert [(row["door"], row["mode"]) for row in rows] == list(product(DOORS, MODES))
    for row in rows:
        # A gap is not longer than its stream, nor its stream than both, of 23 tokens each after the first.
        assert 0 < row["longest_gap_ms"] <= 2 * 23 * row["ms_per_token"] + 1
        assert row["beside"] is None


@pytest.mark.parametrize("rows", ["--context 300 --output 24 --repeats 1 --beside bodies"], indirect=True)
def test_streams_are_measured_beside_large_bodies(rows: list[dict[str, Any]], server: Server) -> None:
    assert [(row["door"], row["mode"], row["beside"]) for row in rows] == list(product(DOORS, MODES, [None, "bodies"]))


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["--context 1000 --output 400 --repeats 1 --beside long-prompts"], indirect=True)
def test_the_gaps_of_streams_beside_long_prompts_are_measured(rows: list[dict[str, Any]]) -> None:
    for alone, beside in zip(rows[::2], rows[1::2], strict=True):
        assert (alone["beside"], beside["beside"]) == (None, "long-prompts")
        assert alone["short_prompt_first_text_ms"] is None
        assert beside["short_prompt_first_text_ms"] > 0


@pytest.mark.parametrize("rows", ["--context 600 --output 24 --shared-document"], indirect=True)
def test_questions_on_one_document_share_its_kv(rows: list[dict[str, Any]]) -> None:
    one, eight = rows
    assert (one["documents"], eight["documents"]) == (1, 8)
    assert one["same_answers"] == eight["same_answers"] == 1
    assert 600 < one["most_kv_tokens"] < 1200 < eight["most_kv_tokens"]
    assert all(row[name] > 0 for row in rows for name in ("acceptance", "plain_tokens_per_s", "drafted_tokens_per_s"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("aiperf") is None, reason="aiperf, a load generator, is not installed")
def test_the_load_that_the_documentation_names_is_answered(server: Server, tmp_path: Path) -> None:
    command = LOAD.read_text()
    for written, here in (
        ("http://127.0.0.1:8000", server.url),
        ("--request-count 200", "--request-count 8"),
        ("--isl 2048 --osl 128", "--isl 300 --osl 24"),
    ):
        assert written in command
        command = command.replace(written, here)
    # With this variable, aiperf looks for a folder's name in the model hub's cache.
    variables = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    command = f"{command.rstrip()} --output-artifact-dir {tmp_path}"
    subprocess.run(command, shell=True, cwd=ROOT, env=variables, check=True, timeout=240)
    figures = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert figures["request_count"]["avg"] == 8
    assert figures["error_summary"] == []
    assert figures["usage_prompt_tokens"]["min"] == figures["usage_prompt_tokens"]["max"] == 300
    assert figures["usage_completion_tokens"]["min"] == figures["usage_completion_tokens"]["max"] == 24
    assert figures["time_to_first_token"]["p50"] > 0
    assert figures["inter_token_latency"]["p50"] > 0
