"""The doors over a scripted pipeline: what a real one does too seldom to wait for."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc
import psutil
import pytest
from openai import APIStatusError, OpenAI
from starlette.testclient import TestClient

from actors.wire import sampling_to_proto
from deploy import grpc_api
from deploy.calls import Call, begin
from deploy.client_request import MAX_STOP_CHARACTERS, ClientRequest
from deploy.encoding import SHORT_CHARACTERS, Encoder
from deploy.errors import EngineCrashError, OverloadedError
from deploy.grpc_errors import status_of
from deploy.openai_api import streaming
from deploy.openai_api.routes import http_app
from deploy.parts import Part
from deploy.service import RESUMED_AT_ONCE, ServedModel, Service
from tests.scripted import (
    ENDED,
    EOS,
    WithoutTiers,
    ask,
    event,
    events_of,
    generated,
    ids,
    model,
    scored,
    served,
    wanted,
)
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import load_settings
from triforce_core.detokenizer import OutputText, TextDelta
from triforce_core.errors import DeadlineError, InvalidValueError, UnavailableError
from triforce_core.messages import SamplingParams

SECRET = "/home/somebody/secret"


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
    assert SECRET not in caplog.text
    assert "RuntimeError" in caplog.text
    assert "in decode" in caplog.text  # where it was raised
    assert service.in_flight == 0


def test_an_error_after_the_first_event_is_an_event() -> None:
    for error, code in ((RuntimeError(SECRET), "internal_error"), (UnavailableError("it is gone"), "engine_crash")):
        client, service, pipelines = served(event(ids("a b")), error)
        answer = ask(client, stream=True)
        first, *_, last = events_of(answer)
        assert answer.status_code == 200
        assert first["choices"][0]["text"] == "a b"
        assert last["error"]["code"] == code
        assert SECRET not in answer.text
        assert (service.in_flight, pipelines.open) == (0, 0)


def test_the_grpc_door_tells_no_more() -> None:
    code, details = status_of(RuntimeError(SECRET))
    assert code is grpc.StatusCode.INTERNAL
    assert re.fullmatch(r"internal error \w{12}; the server's log tells more", details)


def test_a_lost_pipeline_asks_to_come_back() -> None:
    answer = ask(served(UnavailableError("it is gone"))[0], timeout_s=0.5)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_lost")
    assert "it is gone" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) >= 1
    answer = ask(served(event(ids("a")))[0])  # it just ends, each time
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_crash")
    assert answer.headers["x-should-retry"] == "false"
    assert served()[0].get("/health").status_code == 503


def test_the_status_is_what_is_known_also_when_nothing_can_serve() -> None:
    answer = served()[0].get("/status")
    assert answer.status_code == 200
    assert answer.json()["tiers"] == []
    assert answer.json()["places"] > 0


def test_a_server_that_shuts_down_is_not_healthy() -> None:
    """Its replicas are still healthy, but whoever sends requests here must stop."""
    service = Service(load_settings(), model(), WithoutTiers(event(ids("a"), gen.FINISH_REASON_LENGTH)))
    client = TestClient(http_app(service))
    assert client.get("/health").status_code == 200
    assert [client.head(path).status_code for path in ("/health", "/ready")] == [200, 200]
    asyncio.run(service.drain(0.0))
    assert client.get("/health").status_code == 503
    assert [client.head(path).status_code for path in ("/health", "/ready")] == [503, 503]
    assert client.get("/status").status_code == 200


def test_the_first_answer_of_health_has_decoded_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request to a server may meet failures and delays. It should be no user's request."""
    pipelines = WithoutTiers(event(ids("a"), gen.FINISH_REASON_LENGTH))
    client = TestClient(http_app(Service(load_settings(), model(), pipelines)))
    for _ in range(3):
        assert client.get("/health").status_code == 200
        assert len(pipelines.requests) == 1
    monkeypatch.setattr("deploy.service.PROBE_S", 0.3)
    failing = WithoutTiers(UnavailableError("it is gone"))
    client = TestClient(http_app(Service(load_settings(), model(), failing)))
    assert client.get("/health").status_code == 503


def test_where_users_were_served_health_decodes_nothing() -> None:
    pipelines = WithoutTiers(event(ids("a"), gen.FINISH_REASON_LENGTH))
    client = TestClient(http_app(Service(load_settings(), model(), pipelines)))
    assert ask(client).status_code == 200
    assert client.get("/health").status_code == 200
    assert len(pipelines.requests) == 1


class OneTier(WithoutTiers):
    tier = pb.TierStatus(tier="retrieval", ready=True, address="10.0.0.2:7000")

    async def status(self) -> dict[str, list[pb.TierStatus]]:
        return {"r": [self.tier]}


def test_the_status_says_where_a_tier_serves_and_which_one_is_silent() -> None:
    pipelines = OneTier()
    client = TestClient(http_app(Service(load_settings(), model(), pipelines)))
    [tier] = client.get("/status").json()["tiers"]
    assert (tier["tier"], tier["address"]) == ("retrieval", "10.0.0.2:7000")
    assert "silent" not in tier
    pipelines.tier.silent.MergeFrom(pb.SilentPeer(tier="draft", address="10.0.0.3:7001", silent_s=41.5))
    [tier] = client.get("/status").json()["tiers"]
    assert tier["silent"] == {"tier": "draft", "address": "10.0.0.3:7001", "silent_s": 41.5}


def test_another_precision_is_another_target_and_said_to_be() -> None:
    settings = load_settings(dtype="bfloat16")
    coarser = ServedModel.load(settings)
    assert coarser.fingerprint != ServedModel.load(load_settings(dtype="float32")).fingerprint
    answer = TestClient(http_app(Service(settings, coarser, WithoutTiers()))).get("/status")
    assert answer.json()["target"] == {"model": "demo", "dtype": "bfloat16"}


def test_how_the_tiers_are_placed_is_told_and_why_where_it_is_known() -> None:
    service = Service(load_settings(placement={"colocate": "all"}), model(), WithoutTiers())
    client = TestClient(http_app(service))
    assert client.get("/status").json()["placement"] == {"colocate": "all"}
    service.why = "cores for each replica: 2"
    assert client.get("/status").json()["placement"] == {"colocate": "all", "why": "cores for each replica: 2"}


def test_a_draining_server_takes_nothing_new_and_finishes_the_rest() -> None:
    async def drained() -> list[str]:
        _, service, _ = served(event(ids("a")), 0.3, event(ids("b"), gen.FINISH_REASON_LENGTH))
        parts = service.complete(wanted())
        texts = [(await anext(parts)).piece.text]
        draining = asyncio.create_task(service.drain(10))
        await asyncio.sleep(0.1)
        assert not draining.done()
        assert not await service.drain(0)
        with pytest.raises(UnavailableError, match="shutting down"):
            await anext(service.complete(wanted()))
        texts += [part.piece.text async for part in parts]
        assert await asyncio.wait_for(draining, 1)
        return texts

    assert asyncio.run(drained()) == ["a", "b"]


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
    monkeypatch.setattr(streaming, "IDLE_S", 0.05)
    client, service, _ = served(0.3, event(ids("a")), 0.2, event(ids(" b"), gen.FINISH_REASON_LENGTH))
    answer = ask(client, stream=True)
    assert answer.text.count(": waiting\n\n") >= 4
    first, last, done = events_of(answer)
    assert (first["choices"][0]["text"], last["choices"][0]["text"], done) == ("a", " b", "[DONE]")
    assert service.in_flight == 0


def test_the_first_comment_comes_with_the_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "IDLE_S", 0.5)
    client, _, _ = served(0.7, event(ids("a"), gen.FINISH_REASON_LENGTH))
    assert ask(client, stream=True).text.startswith(": waiting\n\ndata: ")


@pytest.mark.parametrize("repeats", [1, 500, SHORT_CHARACTERS // 8])
def test_the_pipeline_gets_the_tokens_of_the_text(repeats: int) -> None:
    client, _, pipelines = served(event(ids("a"), gen.FINISH_REASON_LENGTH))
    text = "import os\n" * repeats
    assert ask(client, prompt=text).status_code == 200
    assert list(pipelines.requests[0].prompt_token_ids) == ids(text)


def test_a_short_prompt_does_not_wait_for_long_ones() -> None:
    """Neither does the event loop, which all streams share."""
    long, short = "import os\n" * 100_000, "import os\n" * 50

    async def order() -> tuple[list[str], float, float]:
        encoder, done, gaps = Encoder(model().tokenizer), [], []

        async def encode(text: str) -> None:
            assert len(await encoder.encode(text)) > 100
            done.append("long" if text is long else "short")

        async def watch() -> None:
            while True:
                before = time.perf_counter()
                await asyncio.sleep(0.001)
                gaps.append(time.perf_counter() - before)

        began = time.perf_counter()
        watching = asyncio.create_task(watch())
        waiting = [asyncio.create_task(encode(long)) for _ in range(3)]
        await asyncio.sleep(0.05)
        waiting += [asyncio.create_task(encode(short)) for _ in range(5)]
        await asyncio.gather(*waiting)
        watching.cancel()
        return done, max(gaps), time.perf_counter() - began

    done, gap, took = asyncio.run(order())
    assert done == ["short"] * 5 + ["long"] * 3
    assert gap < took / 6, "not even half of one"


def test_others_go_on_while_a_long_output_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, service, _ = served(event([5], gen.FINISH_REASON_LENGTH))
    turns, fed, feed = 0, [], OutputText.feed

    def noted(output: OutputText, tokens: Sequence[int], *rest: Any) -> TextDelta:
        fed.append((turns, len(tokens)))
        return feed(output, tokens, *rest)

    monkeypatch.setattr(OutputText, "feed", noted)

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def run() -> list[Part]:
        beside = asyncio.create_task(others())
        parts = service.complete(wanted(resume=(5,) * 1000, max_tokens=1001))
        first = await anext(parts)
        beside.cancel()
        return [first, *[part async for part in parts]]

    parts = asyncio.run(run())
    assert parts[-1].done is not None
    assert parts[-1].done.completion_tokens == 1001
    assert sum(count for _, count in fed) == 1001
    assert max(count for _, count in fed) == RESUMED_AT_ONCE
    assert len({turn for turn, _ in fed[:-1]}) == len(fed) - 1, "between two pieces others have their turn"


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


def test_a_whole_grpc_answer_takes_memory_in_proportion_to_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer has several choices, one of them empty. A message keeps what its fields had before, so 400 MB would be
    taken here if the text were set anew for each chunk.
    """
    text, origins = "x" * 100, bytes(100)

    async def chunks(*_: Any) -> AsyncGenerator[gen.GenerateChunk, None]:
        for nth in range(4000):
            yield gen.GenerateChunk(index=2 * (nth % 2), text=text, token_ids=[nth], origins=origins)

    monkeypatch.setattr(grpc_api, "generate_stream", chunks)
    process = psutil.Process()
    before = process.memory_info().rss
    choices = generated(served()[1]).choices
    assert process.memory_info().rss - before < 100e6
    assert [(choice.text, choice.origins) for choice in choices] == [
        (text * 2000, origins * 2000),
        ("", b""),
        (text * 2000, origins * 2000),
    ]


SAMPLING = {
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.75,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "min_tokens": 3,
    "logit_bias": {5: 1.5, 9: -100.0},
}


def test_every_field_reaches_the_pipeline_through_both_doors() -> None:
    fields = SamplingParams.__dataclass_fields__.keys() - {"bad_word_ids"}  # clients give these as texts
    assert SAMPLING.keys() == fields, "try the new field here, too"
    client, service, pipelines = served(ENDED)
    asked: dict[str, Any] = {"max_tokens": 9, "seed": -3, "priority": -7, "cache_salt": "mine"}
    asked |= {"speculation": {"lookaheads": [5, 2], "selector": "mean_key"}}
    assert ask(client, **asked, **SAMPLING).status_code == 200
    del asked["speculation"]
    asked["seed"] %= 2**64
    asked["selector"] = "mean_key"
    generated(service, **asked, sampling=gen.Sampling(**SAMPLING), lookaheads=gen.Lookaheads(values=[5, 2]))
    expected = pb.DecodeRequest(
        prompt_token_ids=ids("def"),
        sampling=gen.Sampling(**SAMPLING),
        stop_token_ids=model().stop_token_ids,
        lookaheads=gen.Lookaheads(values=[5, 2]),
        **asked,
    )
    for sent in pipelines.requests:
        sent.ClearField("timeout_s")
    assert pipelines.requests == [expected, expected]


def test_what_is_left_out_has_the_same_defaults_at_both_doors() -> None:
    client, service, pipelines = served(ENDED)
    assert ask(client).status_code == 200
    assert ask(client, **dict.fromkeys(SAMPLING)).status_code == 200
    generated(service)
    assert ask(client, priority=None).status_code == 200
    assert [request.sampling for request in pipelines.requests] == [sampling_to_proto(SamplingParams())] * 4
    assert [request.priority for request in pipelines.requests] == [0] * 4


@pytest.mark.parametrize(
    "target", [{"context_length": 1000}, {"context_length": 4000, "kv_pool_tokens": 1000}], ids=str
)
def test_without_a_maximum_context_and_pool_are_the_bound(target: dict[str, int]) -> None:
    _, service, pipelines = served(ENDED, target=target)
    for prompt in (1, 990, 999):
        generated(service, token_ids=gen.TokenIds(values=[5] * prompt))
    assert [request.max_tokens for request in pipelines.requests] == [999, 10, 1]
    with pytest.raises(InvalidValueError, match=r"1000 prompt \+ 1 output tokens' must fit the"):
        generated(service, token_ids=gen.TokenIds(values=[5] * 1000))


def test_nobody_gets_more_time_than_the_server_gives() -> None:
    client, service, pipelines = served(5.0, server={"request_timeout_s": 0.1})
    for fields in ({}, {"timeout_s": 100.0}):
        answer = ask(client, **fields)
        assert answer.status_code == 504
        assert answer.json()["error"]["message"] == "the request was not done within 0.1 s"
        with pytest.raises(DeadlineError, match=r"within 0\.1 s"):
            generated(service, **fields)
    assert pipelines.open == 0


def test_the_pipeline_gets_the_time_that_is_left() -> None:
    client, service, pipelines = served(ENDED, server={"request_timeout_s": 100})
    for fields, most in (({}, 100), ({"timeout_s": 500.0}, 100), ({"timeout_s": 20.0}, 20)):
        pipelines.requests.clear()
        assert ask(client, **fields).status_code == 200
        generated(service, n=2, **fields)
        for request in pipelines.requests:
            assert most - 5 < request.timeout_s <= most
        assert len(pipelines.requests) == 3


def test_what_has_no_time_left_is_not_sent() -> None:
    """The event loop may have been busy since the prompt was encoded."""

    async def late() -> None:
        _, service, pipelines = served(ENDED)
        asked = wanted()
        parts = service.parts(asked, await service.request(asked), 0, asyncio.get_running_loop().time())
        with pytest.raises(TimeoutError):
            await anext(parts)
        assert pipelines.requests == []

    asyncio.run(late())


def test_a_request_that_the_engine_ends_is_answered_as_one_that_this_clock_ends() -> None:
    client, service, _ = served(event(ids("a")), DeadlineError("not done within 19.9 s"))
    answer = ask(client, timeout_s=20.0)
    assert answer.status_code == 504
    assert answer.json()["error"]["message"] == "the request was not done within 20 s"
    assert events_of(ask(client, timeout_s=20.0, stream=True))[-1]["error"]["code"] == "timeout"
    with pytest.raises(DeadlineError, match="was not done within 20 s") as late:
        generated(service, timeout_s=20)
    assert status_of(late.value)[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    assert service.in_flight == 0


def test_the_official_client_does_not_repeat_what_took_too_long() -> None:
    http, _, pipelines = served(5.0)
    client = OpenAI(base_url="http://testserver/v1", api_key="none", max_retries=2, http_client=http)
    for stream in (False, True):
        pipelines.requests.clear()
        with pytest.raises(APIStatusError) as late:
            client.completions.create(model="demo", prompt="def", stream=stream, extra_body={"timeout_s": 0.1})
        assert late.value.status_code == 504
        assert len(pipelines.requests) == 1


def test_a_drawn_seed_is_told_first() -> None:
    client, service, pipelines = served(event(ids("a")), event(ids(" b")), event(ids(" c"), gen.FINISH_REASON_LENGTH))
    first, second, last, _ = events_of(ask(client, stream=True))
    assert first["triforce"] == {"seed": pipelines.requests[-1].seed}
    assert "triforce" not in second
    assert last["triforce"]["seed"] == first["triforce"]["seed"]

    async def chunks() -> list[gen.GenerateChunk]:
        return [chunk async for chunk in grpc_api.generate_stream(service, gen.GenerateRequest(text="def"))]

    told = [chunk.seed if chunk.HasField("seed") else None for chunk in asyncio.run(chunks())]
    assert told == [pipelines.requests[-1].seed, None, None]
    assert generated(service).choices[0].seed == pipelines.requests[-1].seed


def test_a_negative_seed_comes_back_as_it_was_sent() -> None:
    client, service, _ = served(ENDED)
    assert ask(client, seed=-(2**63)).json()["triforce"]["seed"] == -(2**63)
    assert events_of(ask(client, seed=-1, stream=True))[0]["triforce"]["seed"] == -1
    assert generated(service, seed=2**64 - 1).choices[0].seed == 2**64 - 1


def test_api_keys_keep_the_kv_of_their_texts_apart() -> None:
    async def salts() -> list[str]:
        _, service, pipelines = served(ENDED)
        for key in ("", "mail", "search"):
            for salt in ("", "mail", "search/"):
                begin(Call("http", "POST /v1/completions", key=key))
                asked = ClientRequest(prompt="def", sampling=SamplingParams(), max_tokens=4, cache_salt=salt)
                assert [part async for part in service.complete(asked)]
        return [request.cache_salt for request in pipelines.requests]

    found = asyncio.run(salts())
    assert found[:3] == ["", "mail", "search/"], "without keys all clients are one"
    assert len(set(found[3:])) == 6
    assert not set(found[3:]) & {""}, "nor do they share with the server's own requests"


def test_usage_over_grpc_says_what_the_first_completion_found() -> None:
    _, service, _ = served(pb.DecodeEvent(entered=True, cached_tokens=1), event(ids("a"), gen.FINISH_REASON_LENGTH))
    assert generated(service, n=3).usage.cached_tokens == 1


def test_stop_strings_are_short() -> None:
    """The tables of sixteen of a megabyte would keep the event loop busy for seconds."""
    client, *_ = served(ENDED)
    longest = "b" * MAX_STOP_CHARACTERS
    began = time.process_time()
    assert ask(client, stop=[longest] * 16).status_code == 200
    answer = ask(client, stop=["a", "b" * 1_000_000])
    assert time.process_time() - began < 0.5
    assert answer.status_code == 400


def test_only_a_body_may_leave_the_model_out() -> None:
    client, service, _ = served(ENDED)
    assert client.get("/v1/models/").status_code == 404
    assert client.get("/v1/models/demo").status_code == 200
    for name in (None, "", "demo"):
        assert ask(client, model=name).status_code == 200
    assert generated(service, model="").model == "demo"


def test_the_list_of_models_ends() -> None:
    """Anthropic's SDK before 0.46 asks for the models after the last one until there are none."""
    client, *_ = served(ENDED)
    assert [each["id"] for each in client.get("/v1/models", params={"limit": 20}).json()["data"]] == ["demo"]
    for page in ({"after_id": "demo"}, {"before_id": "demo"}):
        answer = client.get("/v1/models", params=page).json()
        assert answer == {"object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None}


def test_the_document_tells_every_status() -> None:
    client, *_ = served(ENDED)
    document = client.get("/openapi.json").json()
    answers = document["paths"]["/v1/completions"]["post"]["responses"]
    assert set(answers) == {"200", "400", "401", "404", "408", "413", "429", "500", "503", "504"}
    assert set(document["paths"]["/v1/models/{name}"]["get"]["responses"]) == {"200", "400", "401", "404"}
    for path, methods in document["paths"].items():
        body = "AnthropicErrorBody" if path.startswith("/v1/messages") else "ErrorBody"
        for status, answer in [each for method in methods.values() for each in method["responses"].items()]:
            if status != "200":
                assert answer["content"]["application/json"]["schema"] == {"$ref": f"#/components/schemas/{body}"}
    error = document["components"]["schemas"]["ErrorDetails"]
    for refused in (ask(client, n=0), ask(client, prompt=5), client.get("/v1/models/x")):
        assert set(refused.json()["error"]) == set(error["properties"]) == set(error["required"])


# -- several completions of one request, and what comes with them ------------------------------------------------------


def chunks_of(service: Service, **fields: Any) -> list[gen.GenerateChunk]:
    async def read() -> list[gen.GenerateChunk]:
        async with asyncio.timeout(10):
            request = gen.GenerateRequest(**{"text": "def", **fields})
            return [chunk async for chunk in grpc_api.generate_stream(service, request)]

    return asyncio.run(read())


def test_several_completions_take_a_place_each_and_give_them_back() -> None:
    _, service, pipelines = served(event(ids("a b")), 0.01, event(ids(" c"), gen.FINISH_REASON_LENGTH))
    chunks = chunks_of(service, n=3, seed=5)
    assert {chunk.index for chunk in chunks} == {0, 1, 2}
    assert pipelines.requests[0].seed == 5
    assert len({request.seed for request in pipelines.requests}) == 3
    assert sorted(c.seed for c in chunks if c.HasField("seed")) == sorted(r.seed for r in pipelines.requests)
    for index in range(3):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert "".join(chunk.text for chunk in own) == "a b c"
        assert [chunk.HasField("usage") for chunk in own] == [False, True]
    assert (service.in_flight, pipelines.open) == (0, 0)


def test_places_bound_the_completions_of_all_requests_together() -> None:
    _, service, _ = served(ENDED)
    with pytest.raises(InvalidValueError, match=rf"^n: {service.room + 1} must be at least 1 and at most"):
        chunks_of(service, n=service.room + 1)
    service.in_flight = service.room - 1
    with pytest.raises(OverloadedError):
        chunks_of(service, n=2)
    assert len(chunks_of(service, n=1)) == 1
    assert service.in_flight == service.room - 1


def test_one_completion_that_fails_ends_all() -> None:
    _, service, pipelines = served(event(ids("a")), 0.01, UnavailableError("it is gone"), 60.0)
    with pytest.raises(EngineCrashError, match="the engine died 3 times"):
        chunks_of(service, n=3)
    assert (service.in_flight, pipelines.open) == (0, 0)


def test_logprobs_are_cut_with_their_tokens() -> None:
    """The stop string begins in one event and ends in the next, inside a run of tokens."""
    script = [scored(ids("a b")), scored(ids(" cd"), gen.FINISH_REASON_LENGTH)]
    whole = generated(served(*script)[1], logprobs=0).choices[0]
    cut = generated(served(*script)[1], logprobs=0, stop=["b c"])
    choice = cut.choices[0]
    assert choice.text == "a "
    assert [-each.logprob for each in whole.logprobs] == list(whole.token_ids)
    assert [-each.logprob for each in choice.logprobs] == list(choice.token_ids)
    assert 0 < len(choice.token_ids) < len(whole.token_ids)
    assert cut.usage.completion_tokens == len(choice.token_ids)


def test_the_prompt_is_echoed_and_scored_once() -> None:
    first = event([])
    first.prompt_logprobs.extend([gen.TokenLogprobs(), gen.TokenLogprobs(logprob=-1, top_ids=[5], top_logprobs=[-1])])
    _, service, pipelines = served(first, event(ids("a")), event(ids(" b"), gen.FINISH_REASON_LENGTH))
    chunks = chunks_of(service, n=2, echo=True, prompt_logprobs=1)
    for index in range(2):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert "".join(chunk.text for chunk in own) == "defa b"
        assert [len(chunk.prompt_logprobs) for chunk in own] == [2, 0, 0]
    assert [request.HasField("prompt_logprobs") for request in pipelines.requests] == [True, False]
    by_ids = chunks_of(service, token_ids=gen.TokenIds(values=ids("def")), echo=True)
    assert "".join(chunk.text for chunk in by_ids) == "defa b"
    resumed = chunks_of(service, echo=True, resume_token_ids=ids("x"))
    assert not resumed[0].text.startswith("def")


def test_parameters_that_exclude_every_token_are_named_after_the_tokens_that_came() -> None:
    last = event(ids(" b"))
    last.no_token = True
    _, service, pipelines = served(event(ids("a")), last)
    for fields, words in (
        ({"regex": "[a-z ]{9}"}, r"^regex: '\[a-z \]\{9\}' allows no token after 2 output tokens"),
        ({}, "^sampling: 'these parameters' allows no token after 2 output tokens"),
    ):
        with pytest.raises(InvalidValueError, match=words):
            chunks_of(service, **fields)
    assert "".join(chunk.text for chunk in chunks_of(service, stop=[" b"])) == "a"  # it ends before it fails
    assert (service.in_flight, pipelines.open) == (0, 0)


def test_what_a_request_adds_reaches_the_pipeline() -> None:
    _, service, pipelines = served(ENDED)
    generated(service, ignore_eos=True, stop_token_ids=[7], bad_words=["bad"], logprobs=2, prompt_logprobs=3)
    [sent] = pipelines.requests
    assert list(sent.stop_token_ids) == [7]
    assert [list(word.values) for word in sent.sampling.bad_word_ids] == [ids("bad"), ids(" bad")]
    assert (sent.logprobs, sent.prompt_logprobs) == (2, 3)
    generated(service, stop_token_ids=[7], regex="[a-z]{3}")
    assert list(pipelines.requests[-1].stop_token_ids) == [*model().stop_token_ids, 7]
    assert "[a-z]{3}" in pipelines.requests[-1].grammar
