"""What the SDK has besides completions, against the live server: both clients, chats, tokens, health, reflection."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.serve.conftest import Server
from triforce_core._gen.triforce.v1 import generation_pb2 as pb
from triforce_core.client import AsyncTriForceClient, Chunk, InvalidRequestError, NotFoundError, TriForceClient

ASKED: dict[str, Any] = {"max_tokens": 30, "temperature": 0.8, "seed": 4}
CHAT = [{"role": "system", "content": "You continue code."}, {"role": "user", "content": "def main():"}]


def test_both_clients_get_the_same(server: Server, client: TriForceClient) -> None:
    async def main() -> tuple[Any, list[Chunk], Any, Any, bool]:
        async with AsyncTriForceClient(server.grpc_address, timeout_s=120) as waiting:
            chunks = [chunk async for chunk in waiting.stream("def main():", **ASKED)]
            whole, models, tokens = await asyncio.gather(
                waiting.generate("def main():", **ASKED), waiting.models(), waiting.tokenize("def main():")
            )
            return whole, chunks, models, tokens, await waiting.health()

    whole, chunks, models, tokens, healthy = asyncio.run(main())
    blocking = client.generate("def main():", **ASKED)
    assert (whole.text, whole.token_ids) == (blocking.text, blocking.token_ids)
    assert "".join(chunk.text for chunk in chunks) == blocking.text
    assert models == client.models()
    assert tokens == client.tokenize("def main():")
    assert healthy is True


def test_a_chat_is_a_completion_of_its_rendering(client: TriForceClient) -> None:
    prompt = client.tokenize(CHAT)
    assert "You continue code." in client.detokenize(prompt)
    chat = client.chat(CHAT, **ASKED)
    plain = client.generate(prompt, **ASKED, lookaheads=(0, 0))
    streamed = list(client.stream_chat(CHAT, **ASKED))
    assert chat.text == plain.text == "".join(chunk.text for chunk in streamed)
    assert chat.token_ids == plain.token_ids
    assert chat.usage.prompt_tokens == len(prompt)
    for messages, reason in (
        ([], "messages: .* must hold at least one message"),
        ([{"role": "robot", "content": "a"}], r"messages.0.role: 'robot' must be one of system"),
        ([{"role": "assistant", "content": "a", "tool_calls": "[5]"}], r"messages.0.tool_calls_json: .* JSON list"),
        ([{"role": "assistant", "tool_calls": "[{}]"}], r"tool_calls_json.0: .* must have a function with name"),
    ):
        for call in (client.chat, client.tokenize):
            with pytest.raises(InvalidRequestError, match=reason):
                call(messages)


def test_tokens_and_back(client: TriForceClient) -> None:
    text = "def main():\n    print('€😀')\n"
    tokens = client.tokenize(text)
    assert client.detokenize(tokens).endswith(text)
    assert client.generate(tokens, **ASKED).text == client.generate(text, **ASKED).text
    with pytest.raises(InvalidRequestError, match="tokens: 4096 is not a token id"):
        client.detokenize([4096])
    with pytest.raises(InvalidRequestError, match="prompt: '' must not be empty"):
        client.tokenize("")
    with pytest.raises(NotFoundError, match="'other' is not served here"):
        client.tokenize("a", model="other")


def test_each_token_s_text_is_its_part_of_the_chunk(client: TriForceClient) -> None:
    chunks = list(client.stream("def main():", **ASKED, echo=True, stop="\n\n\n\n"))
    echoed = "def main():"
    for chunk in chunks:
        assert len(chunk.text_lengths) == len(chunk.token_ids)
        start = len(echoed)
        for token, length in zip(chunk.token_ids, chunk.text_lengths, strict=True):
            assert chunk.text[start : start + length] == client.detokenize([token])
            start += length
        assert start == len(chunk.text)
        echoed = ""


def test_the_standard_health_service_and_reflection(server: Server) -> None:
    with grpc.insecure_channel(server.grpc_address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "triforce.v1.Generation"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as unknown:
            stub.Check(health_pb2.HealthCheckRequest(service="other"), timeout=10)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=10)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        # What grpcurl asks, to learn of the methods
        reflection = ProtoReflectionDescriptorDatabase(channel)
        assert {"grpc.health.v1.Health", "triforce.v1.Generation"} <= {*reflection.get_services()}
        described = reflection.FindFileContainingSymbol("triforce.v1.Generation")
        assert [service.name for service in described.service] == ["Generation"]
        assert [each.name for each in described.service[0].method] == [
            method.name for method in pb.DESCRIPTOR.services_by_name["Generation"].methods
        ]


def test_a_chat_in_a_pipe(server: Server, client: TriForceClient) -> None:
    command = [sys.executable, "-m", "deploy.cli", "chat", "--address", server.grpc_address]
    done = subprocess.run(
        [*command, "--max-tokens", "30", "--temperature", "0.8", "--seed", "4", "--system", "You continue code."],
        input="def main():\n/quit\n",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == client.chat(CHAT, **ASKED).text + "\n"
