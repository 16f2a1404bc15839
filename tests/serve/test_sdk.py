"""The SDK through Ray Serve's gRPC proxy."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from tests.serve.conftest import Server
from triforce_core._gen.triforce.v1 import generation_pb2 as pb
from triforce_core._gen.triforce.v1.generation_pb2_grpc import GenerationStub
from triforce_core.client import InvalidRequestError, Model, NotFoundError, TriForceClient


def test_models(client: TriForceClient) -> None:
    assert client.models() == (Model("demo", 16384),)


def test_both_doors_and_both_ways_give_the_same(server: Server, client: TriForceClient, source: str) -> None:
    prompt = source[:4000]
    whole = client.generate(prompt, max_tokens=40, temperature=0.8, top_p=0.95, seed=4)
    chunks = list(client.stream(prompt, max_tokens=40, temperature=0.8, top_p=0.95, seed=4))
    http = server.complete(prompt, max_tokens=40, temperature=0.8, top_p=0.95, seed=4, return_token_ids=True).json()
    assert len(chunks) > 2
    assert "".join(chunk.text for chunk in chunks) == whole.text == http["choices"][0]["text"]
    tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
    assert tokens == whole.token_ids == tuple(http["choices"][0]["token_ids"])
    assert len(b"".join(chunk.origins for chunk in chunks)) == len(whole.origins) == 40
    assert chunks[-1].usage == whole.usage
    assert whole.usage.prompt_tokens == http["usage"]["prompt_tokens"] > 1_000
    assert whole.usage.completion_tokens == 40
    assert whole.finish_reason == chunks[-1].finish_reason == "length"
    assert whole.model == "demo"
    assert whole.stats.prefill_s > 0
    assert whole.stats.tokens_per_round is not None
    assert whole.stats.tokens_per_round > 1


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
        whole = stub.Generate(request)
        assert len(whole.token_ids) == 40
        request.resume_token_ids.extend(whole.token_ids[:received])
        rest = stub.Generate(request)
    assert list(rest.token_ids) == list(whole.token_ids[received:])
    assert whole.text.endswith(rest.text)
    assert rest.usage == whole.usage
    assert 0 < len(rest.text) < len(whole.text)


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
    assert rest[-1].usage == whole.usage


def test_a_prompt_of_five_megabytes_is_refused_with_a_reason(client: TriForceClient) -> None:
    tokens, reason = [4095] * 2_600_000, r"2600000 prompt \+ 1 output tokens' must fit the context of 16384"
    for call in (client.generate, lambda *args, **named: list(client.stream(*args, **named))):
        with pytest.raises(InvalidRequestError, match=reason):
            call(tokens, max_tokens=1)


def test_mistakes_are_named(client: TriForceClient) -> None:
    for mistake, words in (
        ({"temperature": -1}, "temperature: -1.0 must be between 0 and 100"),
        ({"top_p": 0}, "top_p: 0.0 must be above 0"),
        ({"max_tokens": 0}, "max_tokens: 0 must be at least 1"),
        ({"max_tokens": 20_000}, "must fit the context of 16384 tokens"),
        ({"stop": [""]}, "stop: '' must not hold an empty string"),
        ({"lookaheads": [1]}, "lookaheads: "),
        ({"lookaheads": [1, 100]}, "at most 64"),
        ({"seed": 2**63}, "seed: "),
        ({"top_k": 2**31}, "top_k: 2147483648 must be 0 (off) or more, and below 2**31"),
        ({"stop": ["a" * 1025]}, "stop: 1025 must be at most 1024 characters"),
        ({"lookaheads": []}, "lookaheads: "),
        ({"prompt": ""}, "prompt: '' must not be empty"),
        ({"prompt": []}, "prompt: '' must hold at least one token"),
        ({"prompt": [4096]}, "prompt: 4096 is not a token id"),
    ):
        arguments = {"prompt": "def", "max_tokens": 4, **mistake}
        with pytest.raises(InvalidRequestError) as whole:
            client.generate(**arguments)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError) as streamed:
            list(client.stream(**arguments))  # type: ignore[arg-type]
        assert words in str(whole.value)
        assert str(whole.value) == str(streamed.value)
    with pytest.raises(NotFoundError, match="'other' is not served here"):
        client.generate("def", model="other")


def test_a_request_without_a_prompt_is_refused(server: Server) -> None:
    with grpc.insecure_channel(server.grpc_address) as channel, pytest.raises(grpc.RpcError) as refused:
        GenerationStub(channel).Generate(pb.GenerateRequest())
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "prompt: None must be a text or token ids" in refused.value.details()
