"""The SDK through Ray Serve's gRPC proxy."""

from __future__ import annotations

import json
import re
from typing import Any

import grpc
import pytest

from deploy.app import LEAST_PORT_LIMIT
from tests.serve.conftest import Server
from triforce_core._gen.triforce.v1 import generation_pb2 as pb
from triforce_core._gen.triforce.v1.generation_pb2_grpc import GenerationStub
from triforce_core.client import InvalidRequestError, Model, TriForceClient, Usage
from triforce_core.client.request import MAX_MESSAGE_BYTES


def test_models(client: TriForceClient) -> None:
    assert client.models() == (Model("demo", 16384),)


def counts(usage: Usage | pb.Usage) -> tuple[int, int]:
    """The token counts of a usage, without where the KV came from."""
    return usage.prompt_tokens, usage.completion_tokens


def test_both_doors_and_both_ways_give_the_same(server: Server, client: TriForceClient, source: str) -> None:
    prompt = source[:4000]
    whole = client.generate(prompt, max_tokens=40, temperature=0.8, top_p=0.95, seed=4, lookaheads=(8, 3))
    chunks = list(client.stream(prompt, max_tokens=40, temperature=0.8, top_p=0.95, seed=4))
    http = server.complete(prompt, max_tokens=40, temperature=0.8, top_p=0.95, seed=4, return_token_ids=True).json()
    assert len(chunks) > 2
    assert "".join(chunk.text for chunk in chunks) == whole.text == http["choices"][0]["text"]
    tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
    assert tokens == whole.token_ids == tuple(http["choices"][0]["token_ids"])
    assert len(b"".join(chunk.origins for chunk in chunks)) == len(whole.origins) == 40
    assert chunks[-1].usage is not None
    assert counts(chunks[-1].usage) == counts(whole.usage)
    assert whole.usage.prompt_tokens == http["usage"]["prompt_tokens"] > 1_000
    assert whole.usage.completion_tokens == 40
    assert whole.finish_reason == chunks[-1].finish_reason == "length"
    assert whole.model == "demo"
    assert whole.stats.prefill_s > 0
    assert whole.stats.tokens_per_round is not None
    assert whole.stats.tokens_per_round > 1
    assert whole.stats.controller.plan == "retrieval+model 8,3"
    assert whole.stats.controller.expected_ms_per_token is None
    last = chunks[-1].stats
    assert last is not None
    assert sum(last.controller.rounds.values()) > 0


@pytest.mark.slow
def test_without_a_maximum_the_context_is_the_bound(client: TriForceClient) -> None:
    completion = client.generate([1] * 16372, temperature=0)
    assert completion.usage.prompt_tokens + completion.usage.completion_tokens <= 16384
    assert completion.finish_reason == ("length" if completion.usage.completion_tokens == 12 else "stop")


def test_stop_strings_and_speculation_off(client: TriForceClient) -> None:
    full = client.generate("def main():", max_tokens=40, temperature=0.7, seed=8)
    plain = client.generate("def main():", max_tokens=40, temperature=0.7, seed=8, lookaheads=(0, 0))
    assert (plain.text, plain.token_ids) == (full.text, full.token_ids)
    assert set(plain.origins) == {2}
    stop = full.text[20:23]
    cut = client.generate("def main():", max_tokens=40, temperature=0.7, seed=8, stop=stop)
    assert cut.text == full.text[: full.text.find(stop)]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == full.token_ids[: cut.usage.completion_tokens]


@pytest.mark.parametrize("received", [1, 7, 39])
def test_what_broke_off_is_resumed_with_the_tokens_received(server: Server, received: int) -> None:
    request = pb.GenerateRequest(
        text="def main():", seed=6, max_tokens=40, sampling=pb.Sampling(temperature=0.9), stop=["\n\n\n\n"]
    )
    with grpc.insecure_channel(server.grpc_address) as channel:
        stub = GenerationStub(channel)
        [whole] = (first := stub.Generate(request)).choices
        assert len(whole.token_ids) == 40
        request.resume_token_ids.extend(whole.token_ids[:received])
        [rest] = (second := stub.Generate(request)).choices
    assert list(rest.token_ids) == list(whole.token_ids[received:])
    assert whole.text.endswith(rest.text)
    assert counts(first.usage) == counts(second.usage)
    assert 0 < len(rest.text) < len(whole.text)


def test_a_document_is_read_once_for_all_calls_of_a_salt(client: TriForceClient, source: str) -> None:
    document, asked = source[:12_000], {"max_tokens": 8, "temperature": 0.0}
    cold = client.generate(document, **asked, cache_salt="test_sdk")
    warm = client.generate(document, **asked, cache_salt="test_sdk")
    assert warm.token_ids == cold.token_ids
    assert cold.usage.cached_tokens == 0
    assert 0.9 * warm.usage.prompt_tokens < warm.usage.cached_tokens < warm.usage.prompt_tokens
    several = list(client.stream(document, **asked, n=2, cache_salt="test_sdk"))
    for last in (chunk.usage for chunk in several if chunk.usage is not None):
        assert last.cached_tokens == warm.usage.cached_tokens
    assert client.generate(document, **asked, cache_salt="test_sdk 2").usage.cached_tokens == 0


@pytest.mark.parametrize("seed", [None, -5])
def test_a_broken_stream_is_resumed_with_the_seed_of_its_first_chunk(client: TriForceClient, seed: int | None) -> None:
    with client.stream("def main():", max_tokens=40, temperature=0.9, seed=seed) as stream:
        first = next(stream)
    assert first.seed is not None
    assert seed in (None, first.seed)
    asked: dict[str, Any] = {"max_tokens": 40, "temperature": 0.9, "seed": first.seed}
    whole = client.generate("def main():", **asked)
    rest = list(client.stream("def main():", **asked, resume_token_ids=first.token_ids))
    assert whole.seed == rest[0].seed == first.seed
    assert 0 < len(first.token_ids) < 40
    assert sum((chunk.token_ids for chunk in rest), first.token_ids) == whole.token_ids
    assert "".join(chunk.text for chunk in (first, *rest)) == whole.text
    assert rest[-1].usage is not None
    assert counts(rest[-1].usage) == counts(whole.usage)


def test_a_prompt_of_five_megabytes_is_refused_with_a_reason(client: TriForceClient) -> None:
    tokens, reason = [4095] * 2_600_000, r"2600000 tokens' must fit the context of 16384"
    for call in (client.generate, lambda *args, **named: list(client.stream(*args, **named))):
        with pytest.raises(InvalidRequestError, match=reason):
            call(tokens, max_tokens=1)


def test_a_message_above_the_limit_is_refused_unread(server: Server) -> None:
    with grpc.insecure_channel(server.grpc_address) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary("/triforce.v1.Generation/Generate")(bytes(MAX_MESSAGE_BYTES + 1))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    sizes = f"({MAX_MESSAGE_BYTES + 1} vs. {LEAST_PORT_LIMIT})"  # of the demo pair's short context
    assert refused.value.details() == f"SERVER: Received message larger than max {sizes}"


def test_a_priority_changes_no_token(server: Server, client: TriForceClient) -> None:
    plain = client.generate("def main():", **ASKED).text
    for priority in (-100, 100):
        assert client.generate("def main():", **ASKED, priority=priority).text == plain
        answer = server.complete(**ASKED, priority=priority)
        assert answer.json()["choices"][0]["text"] == plain


ASKED: dict[str, Any] = {"max_tokens": 40, "temperature": 0.9, "seed": 6}


def test_several_completions_are_those_of_their_seeds(client: TriForceClient) -> None:
    several = client.generate("def main():", **ASKED, n=3)
    assert len({choice.text for choice in several.choices}) == 3
    assert several.choices[0].seed == 6
    assert several.usage.completion_tokens == 120
    for choice in several.choices:
        alone = client.generate("def main():", **{**ASKED, "seed": choice.seed})
        assert (alone.token_ids, alone.text) == (choice.token_ids, choice.text)
    chunks = list(client.stream("def main():", **ASKED, n=3))
    for index, choice in enumerate(several.choices):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert "".join(chunk.text for chunk in own) == choice.text
        assert own[0].seed == choice.seed
        assert [chunk.finish_reason for chunk in own if chunk.finish_reason] == ["length"]


def test_logprobs_go_with_their_tokens(client: TriForceClient) -> None:
    whole = client.generate("def main():", **ASKED, logprobs=2, prompt_logprobs=1, echo=True)
    plain = client.generate("def main():", **ASKED)
    assert whole.text == "def main():" + plain.text
    assert whole.token_ids == plain.token_ids
    assert len(whole.logprobs) == len(whole.token_ids)
    assert all(len(each.top) == 2 and each.logprob is not None and each.logprob <= 0 for each in whole.logprobs)
    assert len(whole.prompt_logprobs) == whole.usage.prompt_tokens
    assert whole.prompt_logprobs[0].logprob is None
    stop = plain.text[20:23]
    cut = client.generate("def main():", **ASKED, stop=stop, logprobs=2)
    assert len(cut.logprobs) == len(cut.token_ids) == cut.usage.completion_tokens
    for ours, theirs in zip(cut.logprobs, whole.logprobs, strict=False):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_penalties_and_biases_change_the_output_and_not_with_speculation(client: TriForceClient) -> None:
    free = client.generate("def main():", **ASKED)
    changes: list[dict[str, Any]] = [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"logit_bias": {free.token_ids[3]: -100}},
        {"bad_words": ["main"]},
    ]
    for change in changes:
        changed = client.generate("def main():", **ASKED, **change)
        plain = client.generate("def main():", **ASKED, **change, lookaheads=(0, 0))
        assert changed.token_ids == plain.token_ids != free.token_ids


def test_stop_tokens_and_the_least_number_of_tokens(client: TriForceClient) -> None:
    free = client.generate("def main():", **ASKED)
    stop = free.token_ids[5]
    first = free.token_ids.index(stop)
    ended = client.generate("def main():", **ASKED, stop_token_ids=[stop])
    assert (ended.finish_reason, ended.token_ids) == ("stop", free.token_ids[:first])
    later = client.generate("def main():", **ASKED, stop_token_ids=[stop], min_tokens=20)
    assert later.usage.completion_tokens >= 20
    assert stop not in later.token_ids[:20]


def test_forms_of_the_output(client: TriForceClient) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    assert json.loads(client.generate("x = ", **ASKED, json_schema=schema).text)["ok"] in (True, False)
    assert re.fullmatch("[0-9]{3}-[a-c]+;", client.generate("x = ", **ASKED, regex="[0-9]{3}-[a-c]{1,9};").text)
    assert client.generate("x = ", **ASKED, choice=["red", "green"]).text in ("red", "green")
    assert client.generate("x = ", **ASKED, grammar='start: "f(" /[0-9]{1,4}/ ")"').text.endswith(")")
    one = client.generate("x = ", **ASKED, choice=["red", "green"])
    assert (one.finish_reason, one.token_ids) == ("stop", one.token_ids)
    assert client.generate("x = ", max_tokens=5, json_object=True, seed=1).text.startswith("{")


def test_parameters_that_exclude_every_token_end_the_request_with_an_error(client: TriForceClient) -> None:
    asked: dict[str, Any] = {**ASKED, "choice": ["red"], "min_tokens": 30}
    for call in (client.generate, lambda *args, **named: list(client.stream(*args, **named))):
        with pytest.raises(InvalidRequestError, match=r"^choice: .* allows no token after \d+ output tokens"):
            call("x = ", **asked)
    assert client.generate("x = ", **ASKED).usage.completion_tokens == 40
