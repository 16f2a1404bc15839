"""`triforce chat` against a real gRPC server: turns, colours, commands, interrupts and errors."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from collections.abc import Iterator

import grpc
import pytest

from tests.command_line import run
from tests.generation import Failure, Generation, Served, interrupt, origin_at, text_at, token_at
from triforce_core import resuming
from triforce_core._gen.triforce.v1 import generation_pb2 as pb
from triforce_core.client import Chunk, ChunkStream

CODES = {0: "32", 1: "36", 2: "39", 3: "33"}  # of ANSI, for the origins' colours


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.delenv("TRIFORCE_API_KEY", raising=False)
    monkeypatch.setattr(resuming, "FIRST_DELAY_S", 0.01)
    running = Served(Generation())
    yield running
    running.die()


def chat(monkeypatch: pytest.MonkeyPatch, served: Served, typed: str, *options: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    return run(monkeypatch, "chat", "--address", served.address, "--max-tokens", "6", "--seed", "3", *options)


def answer_to(*messages: tuple[str, str], count: int = 6) -> str:
    prompt = "".join(f"{role}: {content}\n" for role, content in messages)
    return "".join(text_at(token_at(prompt, 3, index), index) for index in range(count))


def sent(request: pb.GenerateRequest) -> list[tuple[str, str]]:
    return [(each.role, each.content) for each in request.messages.messages]


def test_the_turns_before_go_along(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], served: Served
) -> None:
    options = ("--system", "Be brief.", "--temperature", "0.5", "--logit-bias", "5=-2", "--stop", "END")
    assert chat(monkeypatch, served, "one\n\ntwo\n/reset\nthree\n/quit\nfour\n", *options) == 0
    system = ("system", "Be brief.")
    first = answer_to(system, ("user", "one"))
    second = answer_to(system, ("user", "one"), ("assistant", first), ("user", "two"))
    third = answer_to(system, ("user", "three"))
    assert capsys.readouterr().out == f"{first}\n{second}\n{third}\n"
    requests = served.generation.requests
    assert [len(sent(request)) for request in requests] == [2, 4, 2]
    for request in requests:
        assert (request.max_tokens, request.seed, [*request.stop]) == (6, 3, ["END"])
        assert (request.sampling.temperature, dict(request.sampling.logit_bias)) == (0.5, {5: -2.0})


def test_each_token_has_the_colour_of_its_tier(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], served: Served
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert chat(monkeypatch, served, "one\n") == 0
    shown = capsys.readouterr().out
    for index in range(6):
        text = text_at(token_at("user: one\n", 3, index), index)
        assert not text or f"\x1b[{CODES[origin_at(index)]}m{text}\x1b[0m" in shown
    assert "retrieval" in shown
    assert f"demo at {served.address}" in shown


def test_a_terminal_gets_no_control_characters_of_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], served: Served
) -> None:
    told = "\x1b]0;title\x07a\tb\r\n\x9b31m\x7f\0é"
    monkeypatch.setattr("tests.generation.text_at", lambda *_: told)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert chat(monkeypatch, served, "one\ntwo\n") == 0
    assert capsys.readouterr().out == 2 * f"{6 * told}\n", "a pipe gets all"
    assert sent(served.generation.requests[1])[1] == ("assistant", 6 * told)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert chat(monkeypatch, served, "one\n") == 0
    shown = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)  # without the colours
    assert shown.startswith(6 * "]0;titlea\tb\n31mé" + "\n")


def test_an_interrupt_stops_the_answer_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], served: Served
) -> None:
    generation, part = served.generation, answer_to(("user", "one"), count=3)

    def press() -> None:
        assert isinstance(sys.stdout, io.TextIOWrapper)
        captured = sys.stdout.buffer
        assert isinstance(captured, io.BytesIO)
        until = time.monotonic() + 60
        while part.encode() not in captured.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
        interrupt()
        generation.ended.wait(60)

    generation.failures.append(Failure(grpc.StatusCode.CANCELLED, 3, press))
    assert chat(monkeypatch, served, "one\ntwo\n") == 0
    second = answer_to(("user", "one"), ("assistant", part), ("user", "two"))
    assert capsys.readouterr().out == f"{part} [stopped]\n{second}\n"
    assert sent(generation.requests[1]) == [("user", "one"), ("assistant", part), ("user", "two")]


def test_an_interrupt_never_meets_grpc_s_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], served: Served
) -> None:
    """Raised inside it, an interrupt can leave one of gRPC's locks taken: the next answer then never came."""
    readers, read = [], ChunkStream.__next__

    def recorded(stream: ChunkStream) -> Chunk:
        readers.append(threading.current_thread())
        return read(stream)

    monkeypatch.setattr(ChunkStream, "__next__", recorded)
    assert chat(monkeypatch, served, "one\n") == 0
    assert capsys.readouterr().out == answer_to(("user", "one")) + "\n"
    assert len(readers) == 7, "six chunks and the end"
    assert threading.main_thread() not in readers


def test_an_answer_goes_on_after_its_server_s_death(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], served: Served
) -> None:
    served.generation.failures.append(Failure(grpc.StatusCode.UNAVAILABLE, 3))
    assert chat(monkeypatch, served, "one\n") == 0
    assert capsys.readouterr().out == answer_to(("user", "one")) + "\n"


def test_a_key_is_sent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], served: Served) -> None:
    served.generation.keys = ("sk-1",)
    assert chat(monkeypatch, served, "one\n", "--api-key", "sk-1") == 0
    assert chat(monkeypatch, served, "one\n", "--api-key", "sk-2") == 2
    captured = capsys.readouterr()
    assert captured.err == "triforce: the API key is missing or not valid\n"
    assert captured.out == answer_to(("user", "one")) + "\n"


def test_an_error_ends_a_pipe_and_not_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], served: Served
) -> None:
    invalid = Failure(grpc.StatusCode.INVALID_ARGUMENT)
    served.generation.failures.append(invalid)
    assert chat(monkeypatch, served, "one\ntwo\n") == 2
    assert capsys.readouterr() == ("\n", "triforce: the replica is gone\n")

    typed = iter(["one", "/what", "two"])

    def type_line(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", type_line)
    served.generation.failures.append(invalid)
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", terminal)
    assert run(monkeypatch, "chat", "--address", served.address, "--max-tokens", "6", "--seed", "3") == 0
    captured = capsys.readouterr()
    assert captured.err == "triforce: the replica is gone\n"
    assert captured.out.startswith(f"demo at {served.address}, 32768 tokens. /reset")
    assert "unknown command /what" in captured.out
    assert captured.out.rstrip().endswith(answer_to(("user", "two")))
    assert sent(served.generation.requests[-1]) == [("user", "two")], "what failed is not part of the conversation"


def test_mistakes_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for options, named in (
        (("--root-certificates", "/no/such/file"), "root-certificates: '/no/such/file' cannot be read"),
        (("--api-key", "schlüssel"), "api_key: must be printable ASCII characters"),
        (("--logit-bias", "x"), "logit-bias: 'x' must be a token id and a number"),
    ):
        assert run(monkeypatch, "chat", *options) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert named in captured.err
