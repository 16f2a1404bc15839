"""The doors over a scripted pipeline: what a real one does too seldom to wait for."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections.abc import AsyncGenerator
from functools import cache
from typing import Any

import grpc
import pytest
from starlette.testclient import TestClient

from deploy import grpc_api
from deploy.openai_api import routes
from deploy.openai_api.routes import http_app
from deploy.service import Ask, ServedModel, Service
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import load_settings
from triforce_core.errors import UnavailableError
from triforce_core.messages import SamplingParams

EOS = 0
SECRET = "/home/somebody/secret"


@cache
def model() -> ServedModel:
    return ServedModel.load(load_settings())


def ids(text: str) -> list[int]:
    found: list[int] = model().tokenizer(text)["input_ids"]
    return found


class Scripted:
    """Answers everything with the same events; an exception among them is raised, a number is waited for."""

    def __init__(self, *script: pb.DecodeEvent | Exception | float) -> None:
        self.script = script
        self.requests: list[pb.DecodeRequest] = []
        self.open = 0

    async def decode(self, request: pb.DecodeRequest) -> AsyncGenerator[pb.DecodeEvent, None]:
        self.requests.append(request)
        self.open += 1
        try:
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, pb.DecodeEvent):
                    yield step
                else:
                    await asyncio.sleep(step)
        finally:
            self.open -= 1

    async def status(self) -> dict[str, list[pb.TierStatus]]:
        raise UnavailableError("no tiers")

    async def check(self) -> None:
        raise UnavailableError("no tiers")


def event(tokens: list[int], finish: gen.FinishReason = gen.FINISH_REASON_UNSPECIFIED) -> pb.DecodeEvent:
    stats = pb.DecodeStats(decoded=len(tokens), decode_s=0.01, tallies=[pb.Tally(rounds=1)] * 3)
    return pb.DecodeEvent(token_ids=tokens, origins=bytes(len(tokens)), finish_reason=finish, stats=stats)


def served(*script: pb.DecodeEvent | Exception | float) -> tuple[TestClient, Service, Scripted]:
    pipelines = Scripted(*script)
    service = Service(load_settings(), model(), pipelines)
    return TestClient(http_app(service), raise_server_exceptions=False), service, pipelines


def ask(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/completions", json={"prompt": "def", **fields})


def events_of(answer: Any) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.mark.parametrize("stream", [False, True])
def test_an_unforeseen_error_tells_an_id_and_nothing_else(caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    client, service, _ = served(RuntimeError(SECRET))
    with caplog.at_level(logging.ERROR, "ray.serve"):
        answer = ask(client, stream=stream)
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert error["code"] == "internal_error"
    assert SECRET not in answer.text
    [error_id] = re.findall(r"internal error (\w{12});", error["message"])
    assert error_id in caplog.text
    assert SECRET in caplog.text
    assert service.in_flight == 0


def test_an_error_after_the_first_event_is_an_event() -> None:
    for error, code in ((RuntimeError(SECRET), "internal_error"), (UnavailableError("it is gone"), "unavailable")):
        client, service, pipelines = served(event(ids("a b")), error)
        answer = ask(client, stream=True)
        first, last = events_of(answer)
        assert answer.status_code == 200
        assert first["choices"][0]["text"] == "a b"
        assert last["error"]["code"] == code
        assert SECRET not in answer.text
        assert (service.in_flight, pipelines.open) == (0, 0)


def test_the_grpc_door_tells_no_more() -> None:
    code, details = grpc_api.status_of(RuntimeError(SECRET))
    assert code is grpc.StatusCode.INTERNAL
    assert re.fullmatch(r"internal error \w{12}; the server's log tells more", details)


def test_a_lost_pipeline_asks_to_come_back() -> None:
    for script in ([UnavailableError("it is gone")], [event(ids("a"))]):  # the other just ends
        client, *_ = served(*script)
        answer = ask(client)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
    for path in ("/health", "/status"):
        assert served()[0].get(path).status_code == 503


class WithoutTiers(Scripted):
    async def status(self) -> dict[str, list[pb.TierStatus]]:
        return {}


def test_rounded_kv_is_another_target_and_said_to_be() -> None:
    settings = load_settings(target={"kv_dtype": "float8_e4m3fn"})
    rounding = ServedModel.load(settings)
    assert rounding.fingerprint != model().fingerprint
    answer = TestClient(http_app(Service(settings, rounding, WithoutTiers()))).get("/status")
    assert answer.json()["target"] == {"model": "demo", "dtype": "bfloat16", "kv_dtype": "float8_e4m3fn"}


def test_a_draining_server_takes_nothing_new_and_finishes_the_rest() -> None:
    async def drained() -> list[str]:
        _, service, _ = served(event(ids("a")), 0.3, event(ids("b"), gen.FINISH_REASON_LENGTH))
        parts = service.complete(wanted())
        texts = [(await anext(parts)).piece.text]
        draining = asyncio.create_task(service.drain(10))
        await asyncio.sleep(0.1)
        assert not draining.done()
        with pytest.raises(UnavailableError, match="shutting down"):
            await anext(service.complete(wanted()))
        texts += [part.piece.text async for part in parts]
        await asyncio.wait_for(draining, 1)
        return texts

    assert asyncio.run(drained()) == ["a", "b"]


def wanted(**fields: Any) -> Ask:
    return Ask(**{"prompt": "def", "sampling": SamplingParams(), "max_tokens": 16, **fields})


def test_the_end_of_the_text_is_no_part_of_it() -> None:
    client, *_ = served(event(ids("a b")), event([*ids(" c"), EOS], gen.FINISH_REASON_STOP))
    answer = ask(client, return_token_ids=True).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("a b c", "stop")
    assert choice["token_ids"] == [*ids("a b"), *ids(" c")]
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])


def test_a_stop_string_in_the_last_run_is_why_it_ended() -> None:
    client, *_ = served(event([*ids("a b"), *ids(" c d")], gen.FINISH_REASON_LENGTH))
    answer = ask(client, stop=" c").json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("a b", "stop")
    assert ask(client, stop="nowhere").json()["choices"][0]["finish_reason"] == "length"


def test_a_stop_string_ends_the_request_of_the_pipeline() -> None:
    client, _, pipelines = served(event(ids("a b")), event(ids(" c d")), AssertionError("asked for more"))
    answer = ask(client, stop="c", stream=True)
    *chunks, done = events_of(answer)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a b "
    assert pipelines.open == 0


def test_a_silent_stream_shows_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "IDLE_S", 0.05)
    client, service, _ = served(0.3, event(ids("a")), 0.2, event(ids(" b"), gen.FINISH_REASON_LENGTH))
    answer = ask(client, stream=True)
    assert answer.text.count(": waiting\n\n") >= 4
    first, last, done = events_of(answer)
    assert (first["choices"][0]["text"], last["choices"][0]["text"], done) == ("a", " b", "[DONE]")
    assert service.in_flight == 0


def test_long_prompts_are_encoded_beside_the_loop() -> None:
    client, service, pipelines = served(event(ids("a"), gen.FINISH_REASON_LENGTH))
    encoder, threads = service.encoder, []

    def watched(text: str) -> Any:
        threads.append(threading.current_thread().name)
        return encoder(text)

    service.encoder = watched
    assert ask(client, prompt="import os\n" * 500).status_code == 200
    assert [name.rstrip("_0123456789") for name in threads] == ["tokenizer"]
    assert list(pipelines.requests[0].prompt_token_ids) == ids("import os\n" * 500)


def test_what_is_complete_is_resumed_without_the_pipeline() -> None:
    """The client has the text up to the stop string and asks for the rest."""

    async def rest() -> list[Any]:
        _, service, pipelines = served(AssertionError("asked"))
        asked = wanted(stop=("c",), resume=tuple(ids("a b c")))
        parts = [part async for part in service.complete(asked)]
        assert pipelines.requests == []
        return parts

    [part] = asyncio.run(rest())
    assert part.piece.text == ""
    assert part.done is not None
    assert part.done.finish_reason == "stop"
    assert part.done.completion_tokens == len(ids("a b "))
