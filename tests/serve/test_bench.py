"""`triforce bench serve` against our own server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import run
from tests.serve.conftest import MAX_QUEUED, MAX_SEQUENCES, Server
from triforce_tools.load.prompts import HEAD_WORDS


def measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert run(monkeypatch, "bench", "serve", "--json", *options) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    return figures


def test_http_and_grpc_are_sent_the_same_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], server: Server
) -> None:
    load = ("--rate", "5", "--requests", "4", "--input", "100:400", "--output", "12", "--seed", "1")
    http = measured(monkeypatch, capsys, "--url", server.url, *load)
    grpc = measured(monkeypatch, capsys, "--grpc", server.grpc_address, *load)
    for figures in http, grpc:
        assert (figures["model"], figures["answered"], figures["errors"]) == ("demo", 4, {})
        assert figures["usage_stated"] == 4
        assert 0 < figures["ttft_ms"]["p50"] <= figures["e2e_ms"]["p50"]
        assert figures["itl_ms"] is not None
        assert 4 * 80 < figures["input_tokens"] < 4 * 480, "the lengths are in the server's own tokens"
        assert 4 <= figures["output_tokens"] <= 4 * 12
    same = ("load", "tokens_per_word")
    assert {name: http[name] for name in same} == {name: grpc[name] for name in same}
    assert abs(http["input_tokens"] - grpc["input_tokens"]) <= 4 * 4 * HEAD_WORDS, "only the first words differ"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_full_server_refuses_and_is_not_taken_for_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], server: Server, tmp_path: Path, protocol: str
) -> None:
    places, sent = MAX_SEQUENCES + MAX_QUEUED, 2 * (MAX_SEQUENCES + MAX_QUEUED)
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival_s": 0, "input_tokens": 16, "output_tokens": 128}\n' * sent)
    where = ("--url", server.url) if protocol == "http" else ("--grpc", server.grpc_address)
    figures = measured(monkeypatch, capsys, *where, "--trace", str(trace), "--temperature", "0")
    assert figures["answered"] + figures["refused"] == sent
    assert figures["answered"] >= places
    assert figures["refused"] > 0
    assert figures["errors"] == {}


def test_paths_compares_http_and_grpc_with_the_target_asked_directly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], server: Server
) -> None:
    where = ("--url", server.url, "--grpc", server.grpc_address)
    assert (
        run(monkeypatch, "bench", "paths", "--json", *where, "--context", "300", "--output", "24", "--repeats", "2")
        == 0
    )
    figures = json.loads(capsys.readouterr().out)
    assert 200 < figures["prompt_tokens"] <= 300
    assert figures["lookaheads"] == [8, 3]
    assert all(figures["token_ms"][way] > 0 for way in ("direct", "http", "grpc", "http_beside_bodies"))
    assert all(len(figures["over_direct_each"][way]) == 2 for way in ("http", "grpc"))
