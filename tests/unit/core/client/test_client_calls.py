"""Both clients against a real gRPC server: retries, streams that go on, TLS, keys, chats, tokens and health."""

from __future__ import annotations

import asyncio
import datetime
import inspect
import ipaddress
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2

from tests.generation import FINGERPRINT, Failure, Generation, Served, text_at, token_at
from triforce_core import resuming
from triforce_core.client import (
    AsyncTriForceClient,
    AuthenticationError,
    CallCancelledError,
    CallError,
    Chunk,
    DeadlineExceededError,
    EngineCrashError,
    FingerprintError,
    InvalidRequestError,
    OverloadedError,
    ServerError,
    TriForceClient,
    UnavailableError,
    aio,
    client,
    progress,
)
from triforce_core.client.progress import Attempts

UNAVAILABLE, FULL = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRIFORCE_API_KEY", raising=False)
    monkeypatch.setattr(resuming, "FIRST_DELAY_S", 0.02)


@contextmanager
def serving(generation: Generation, credentials: grpc.ServerCredentials | None = None) -> Iterator[Served]:
    served = Served(generation, credentials)
    try:
        yield served
    finally:
        served.die()


def call(
    kind: str, address: str, method: str, *arguments: Any, client: dict[str, Any] | None = None, **named: Any
) -> Any:
    """One call of a client of this kind; a stream's chunks as a list."""
    given = {"timeout_s": 10, **(client or {})}
    streams = method.startswith("stream")
    if kind == "sync":
        with TriForceClient(address, **given) as blocking:
            answer = getattr(blocking, method)(*arguments, **named)
            return list(answer) if streams else answer

    async def main() -> Any:
        async with AsyncTriForceClient(address, **given) as waiting:
            answer = getattr(waiting, method)(*arguments, **named)
            return [chunk async for chunk in answer] if streams else await answer

    return asyncio.run(main())


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def expected(prompt: str, seed: int, count: int) -> tuple[list[int], str]:
    tokens = [token_at(prompt, seed, index) for index in range(count)]
    return tokens, "".join(text_at(token, index) for index, token in enumerate(tokens))


# -- retries -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["generate", "stream"])
@pytest.mark.parametrize("code", [UNAVAILABLE, FULL])
def test_a_call_that_fails_at_first_is_tried_again(kind: str, method: str, code: grpc.StatusCode) -> None:
    with serving(Generation(*[Failure(code)] * 3)) as served:
        answer = call(kind, served.address, method, "abc", max_tokens=4)
        [seed] = {request.seed for request in served.generation.requests}
        assert 0 <= seed < 2**53, "drawn once, here"
        assert (text_of(answer) if method == "stream" else answer.text) == expected("abc", seed, 4)[1]
        assert len(served.generation.requests) == 4
        served.generation.failures.extend([Failure(code)] * 4)
        with pytest.raises(UnavailableError if code is UNAVAILABLE else OverloadedError, match="the replica is gone"):
            call(kind, served.address, method, "abc", max_tokens=4, client={"retries": 3})
        assert not served.generation.failures


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_what_would_fail_again_is_not_tried_again(kind: str, method: str) -> None:
    for code, retries in ((grpc.StatusCode.INVALID_ARGUMENT, 3), (grpc.StatusCode.INTERNAL, 3), (UNAVAILABLE, 0)):
        with serving(Generation(Failure(code))) as served:
            with pytest.raises(CallError) as failure:
                call(kind, served.address, method, "abc", max_tokens=4, client={"retries": retries})
            assert failure.value.code is code
            assert len(served.generation.requests) == 1


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_an_answer_that_is_too_long_is_not_asked_for_again(
    kind: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (client, aio):
        monkeypatch.setattr(module, "CHANNEL_OPTIONS", [("grpc.max_receive_message_length", 8)])
    with serving(Generation()) as served:
        with pytest.raises(ServerError, match=r"larger than max \(\d+ vs. 8\)") as failure:
            call(kind, served.address, method, "abc", max_tokens=4)
        assert failure.value.code is FULL
        assert len(served.generation.requests) == 1


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_retries_end_with_the_call_s_time(kind: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "MAX_DELAY_S", 0.1)
    with serving(Generation(*[Failure(UNAVAILABLE)] * 1000)) as served:
        began = time.monotonic()
        with pytest.raises((UnavailableError, DeadlineExceededError)):
            call(kind, served.address, method, "abc", max_tokens=4, timeout_s=0.6, client={"retries": 1000})
        assert time.monotonic() - began < 3
        assert 3 < len(served.generation.requests) < 100
        assert 0 < served.generation.requests[-1].timeout_s <= 0.6


def test_delays_double_up_to_a_limit_and_are_shortened_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "FIRST_DELAY_S", 0.25)
    error = UnavailableError("away", UNAVAILABLE)
    runs = []
    for _ in range(20):
        attempts = Attempts(None, 7)
        runs.append([attempts.delay_s(error) for _ in range(8)])
    for nth, longest in enumerate((0.25, 0.5, 1, 2, 4, 5, 5)):
        delays = [run[nth] for run in runs]
        assert all(delay is not None and longest / 2 <= delay <= longest for delay in delays)
        assert len(set(delays)) > 1
    assert {run[7] for run in runs} == {None}
    assert Attempts(0.01, 7).delay_s(error) is None, "there is no time for another attempt"


def test_a_wrong_number_of_retries_is_refused() -> None:
    with pytest.raises(ValueError, match="retries: -1 must be at least 0"):
        TriForceClient(retries=-1)


# -- streams that go on ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [5, None])
@pytest.mark.parametrize("after", [1, 2, 5, 8])
def test_a_stream_goes_on_with_exactly_what_is_missing(kind: str, seed: int | None, after: int) -> None:
    with serving(Generation(Failure(UNAVAILABLE, after))) as served:
        chunks = call(kind, served.address, "stream", "abc", max_tokens=9, seed=seed, prompt_logprobs=0)
        first, second = served.generation.requests
        tokens, text = expected("abc", first.seed, 9)
        assert seed in (None, first.seed)
        assert (tokens_of(chunks), text_of(chunks)) == (tokens, text)
        assert [chunk.seed for chunk in chunks] == [first.seed, *[None] * 8]
        assert [chunk.fingerprint for chunk in chunks] == [FINGERPRINT, *[None] * 8]
        assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [9]
        assert [len(chunk.prompt_logprobs) for chunk in chunks] == [3, *[0] * 8]
        assert list(second.resume_token_ids) == tokens[:after]
        assert second.max_tokens == first.max_tokens == 9
        assert first.HasField("prompt_logprobs")
        assert not second.HasField("prompt_logprobs")
        assert (second.seed, first.fingerprint, second.fingerprint) == (first.seed, "", FINGERPRINT)


def by_completion(chunks: list[Chunk]) -> dict[int, tuple[Any, ...]]:
    found = {}
    for nth in sorted({chunk.index for chunk in chunks}):
        mine = [chunk for chunk in chunks if chunk.index == nth]
        found[nth] = (
            text_of(mine),
            tokens_of(mine),
            b"".join(chunk.origins for chunk in mine),
            [length for chunk in mine for length in chunk.text_lengths],
            [each for chunk in mine for each in chunk.prompt_logprobs],
            [chunk.seed for chunk in mine if chunk.seed is not None],
            [chunk.usage for chunk in mine if chunk.usage],
        )
    return found


@pytest.mark.parametrize("n", [1, pytest.param(3, marks=pytest.mark.ci)])
def test_streams_that_break_anywhere_more_than_once_lose_and_repeat_nothing(kind: str, n: int) -> None:
    """The streams have several completions, an echoed prompt and its logprobs."""
    asked = {"max_tokens": 4, "seed": 5, "n": n, "echo": True, "prompt_logprobs": 0}
    with serving(Generation()) as served:
        whole = by_completion(call(kind, served.address, "stream", "abc", **asked))
        assert len(whole) == n
        assert whole[0][0].startswith("abc")
        for after in range(4 * n):
            for again in range(4 * n - (after if n == 1 else 0)):
                served.generation.failures.extend([Failure(UNAVAILABLE, after), Failure(UNAVAILABLE, again)])
                chunks = call(kind, served.address, "stream", "abc", **asked)
                assert by_completion(chunks) == whole, (after, again)
                assert not served.generation.failures


def test_a_stream_that_just_ends_goes_on(kind: str) -> None:
    """A proxy may take the death of the server behind it for the end of the stream."""
    with serving(Generation(Failure(grpc.StatusCode.OK, 2), Failure(grpc.StatusCode.OK, 3))) as served:
        chunks = call(kind, served.address, "stream", "abc", max_tokens=9, seed=5)
        assert (tokens_of(chunks), text_of(chunks)) == expected("abc", 5, 9)
        assert len(served.generation.requests) == 3
        served.generation.failures.append(Failure(grpc.StatusCode.OK, 2))
        with pytest.raises(UnavailableError, match="the stream ended before its last chunk"):
            call(kind, served.address, "stream", "abc", max_tokens=9, seed=5, client={"retries": 0})


def test_a_stream_that_a_proxy_ends_goes_on(kind: str) -> None:
    """HAProxy's two ends of a stream whose server has died, in gRPC's words. A server that cancels says other ones."""
    cancelled = Failure(grpc.StatusCode.CANCELLED, 2)
    reset = replace(cancelled, details="Stream removed (RST_STREAM (Received RST_STREAM with error code 8))")
    ended = Failure(grpc.StatusCode.UNKNOWN, 2, details="Stream removed (Data frame with END_STREAM flag received)")
    with serving(Generation(reset, ended)) as served:
        chunks = call(kind, served.address, "stream", "abc", max_tokens=5, seed=5, client={"retries": 2})
        assert (tokens_of(chunks), text_of(chunks)) == expected("abc", 5, 5)
        assert len(served.generation.requests) == 3
        served.generation.failures.append(cancelled)
        with pytest.raises(CallCancelledError):
            call(kind, served.address, "stream", "abc", max_tokens=9, seed=5)


def test_a_stream_that_gets_on_is_tried_as_often_as_it_needs(kind: str) -> None:
    """A stream that breaks off after few tokens each time is given up, because it may be the cause."""
    with serving(Generation(*[Failure(UNAVAILABLE, 16)] * 5)) as served:
        chunks = call(kind, served.address, "stream", "abc", max_tokens=99, seed=5, client={"retries": 1})
        assert (tokens_of(chunks), text_of(chunks)) == expected("abc", 5, 99)
        served.generation.failures.extend([Failure(UNAVAILABLE, 15)] * 2)
        with pytest.raises(UnavailableError):
            call(kind, served.address, "stream", "abc", max_tokens=99, seed=5, client={"retries": 1})


@pytest.mark.parametrize(
    ("code", "kind_of_error"),
    [(grpc.StatusCode.FAILED_PRECONDITION, FingerprintError), (grpc.StatusCode.ABORTED, EngineCrashError)],
)
def test_what_must_not_be_sent_again_is_not(kind: str, code: grpc.StatusCode, kind_of_error: type[CallError]) -> None:
    with serving(Generation(Failure(UNAVAILABLE, 2), Failure(code))) as served:
        with pytest.raises(kind_of_error, match="the replica is gone"):
            call(kind, served.address, "stream", "abc", max_tokens=9, seed=5)
        assert len(served.generation.requests) == 2


def test_a_stream_survives_its_server_s_death(kind: str) -> None:
    generation = Generation()
    with serving(generation) as served:
        generation.failures.append(Failure(UNAVAILABLE, 4, served.die_and_come_back))
        chunks = call(kind, served.address, "stream", "abc", max_tokens=9, seed=5, client={"retries": 20})
        assert (tokens_of(chunks), text_of(chunks)) == expected("abc", 5, 9)
        assert len(generation.requests) == 2


def test_a_stream_goes_on_more_than_once_and_from_tokens_given(kind: str) -> None:
    tokens, _ = expected("abc", 5, 9)
    with serving(Generation(Failure(UNAVAILABLE, 1), Failure(FULL), Failure(UNAVAILABLE, 2))) as served:
        chunks = call(kind, served.address, "stream", "abc", max_tokens=9, seed=5, resume_token_ids=tokens[:2])
        assert tokens_of(chunks) == tokens[2:]
        assert [len(request.resume_token_ids) for request in served.generation.requests] == [2, 3, 3, 5]


@pytest.mark.parametrize("n", [1, 2])
def test_a_failure_after_the_last_chunk_is_none(kind: str, n: int) -> None:
    with serving(Generation(Failure(UNAVAILABLE, 4 * n))) as served:
        chunks = call(kind, served.address, "stream", "abc", max_tokens=4, seed=5, n=n)
        assert tokens_of(chunks) == [token for nth in range(n) for token in expected("abc", 5 + nth, 4)[0]]
        assert len(served.generation.requests) == 1


def test_closing_a_stream_while_it_waits_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "FIRST_DELAY_S", 30.0)
    monkeypatch.setattr(progress, "MAX_DELAY_S", 30.0)
    with serving(Generation(Failure(UNAVAILABLE, 2))) as served:

        async def main() -> list[Chunk]:
            async with AsyncTriForceClient(served.address, timeout_s=100) as client:
                stream = client.stream("abc", max_tokens=9)
                asyncio.get_running_loop().call_later(0.3, stream.close)
                return [chunk async for chunk in stream]

        assert len(asyncio.run(asyncio.wait_for(main(), 5))) == 2


# -- the asynchronous client -------------------------------------------------------------------------------------------


def test_both_clients_have_the_same_methods_with_the_same_arguments() -> None:
    def methods(client: type) -> dict[str, list[inspect.Parameter]]:
        found = inspect.getmembers(client, inspect.isfunction)
        return {name: [*inspect.signature(each).parameters.values()] for name, each in found if name[0] != "_"}

    assert methods(TriForceClient) == methods(AsyncTriForceClient)
    assert {"generate", "stream", "chat", "tokenize", "detokenize", "models", "health"} < methods(TriForceClient).keys()


def in_loop(generation: Generation, use: Callable[[AsyncTriForceClient], Any]) -> None:
    with serving(generation) as served:

        async def main() -> None:
            async with AsyncTriForceClient(served.address, timeout_s=20) as client:
                await use(client)
            assert await asyncio.to_thread(served.generation.ended.wait, 5)

        asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("streams", [False, True])
def test_cancelling_a_task_cancels_its_call(streams: bool) -> None:
    async def use(client: AsyncTriForceClient) -> None:
        if streams:
            stream = client.stream("hang", max_tokens=1)
            await anext(stream)
        task = asyncio.ensure_future(anext(stream) if streams else client.generate("hang", max_tokens=1))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    in_loop(Generation(), use)


def test_leaving_an_asynchronous_stream_cancels_it() -> None:
    async def use(client: AsyncTriForceClient) -> None:
        async with client.stream("hang", max_tokens=1) as stream:
            await anext(stream)
        assert [chunk async for chunk in stream] == []

    in_loop(Generation(), use)


def test_closing_the_asynchronous_client_ends_its_calls_with_a_typed_error() -> None:
    async def use(client: AsyncTriForceClient) -> None:
        stream = client.stream("hang", max_tokens=1)
        await anext(stream)
        waiting = [asyncio.ensure_future(anext(stream)), asyncio.ensure_future(client.generate("hang", max_tokens=1))]
        await asyncio.sleep(0.3)
        await client.close()
        for each in waiting:
            with pytest.raises(CallCancelledError):
                await each

    in_loop(Generation(), use)


def test_many_streams_run_in_one_loop() -> None:
    async def use(client: AsyncTriForceClient) -> None:
        async def read(seed: int) -> list[Chunk]:
            return [chunk async for chunk in client.stream("abc", max_tokens=20, seed=seed)]

        for seed, chunks in enumerate(await asyncio.gather(*(read(seed) for seed in range(20)))):
            assert tokens_of(chunks) == expected("abc", seed, 20)[0]

    in_loop(Generation(Failure(UNAVAILABLE, 3), Failure(FULL)), use)


# -- closed clients ----------------------------------------------------------------------------------------------------


def test_calls_of_a_closed_client_raise_a_typed_error(kind: str) -> None:
    if kind == "sync":
        blocking = TriForceClient()
        blocking.close()
        blocking.close()
        for each in (blocking.models, lambda: blocking.generate("abc"), lambda: blocking.stream("abc")):
            with pytest.raises(CallCancelledError, match="the client was closed"):
                each()
        return

    async def main() -> None:
        client = AsyncTriForceClient()
        await client.close()
        await client.close()
        for each in (client.models, lambda: client.generate("abc"), lambda: anext(client.stream("abc"))):
            with pytest.raises(CallCancelledError, match="the client was closed"):
                await each()

    asyncio.run(main())


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_closing_the_client_ends_a_wait_for_the_next_attempt(
    kind: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resuming, "FIRST_DELAY_S", 2.0 if method == "stream" else 30.0)
    monkeypatch.setattr(progress, "MAX_DELAY_S", 30.0)
    with serving(Generation(Failure(UNAVAILABLE))) as served:
        began = time.monotonic()
        if kind == "sync":
            blocking = TriForceClient(served.address, timeout_s=100)
            threading.Timer(0.5, blocking.close).start()
            with pytest.raises(CallCancelledError, match="the client was closed"):
                list(getattr(blocking, method)("abc", max_tokens=4))
        else:

            async def main() -> None:
                client = AsyncTriForceClient(served.address, timeout_s=100)
                answer = getattr(client, method)("abc", max_tokens=4)
                waiting = asyncio.ensure_future(anext(answer) if method == "stream" else answer)
                await asyncio.sleep(0.5)
                await client.close()
                with pytest.raises(CallCancelledError, match="the client was closed"):
                    await waiting

            asyncio.run(main())
        assert time.monotonic() - began < 10
        assert len(served.generation.requests) == 1


# -- TLS and keys ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate() -> tuple[bytes, bytes]:
    """A private key, and a certificate that it signs for itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, form, plain)
    return private, signed.public_bytes(serialization.Encoding.PEM)


def test_tls(kind: str, certificate: tuple[bytes, bytes], tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_bytes(certificate[1])
    with serving(Generation(), grpc.ssl_server_credentials([certificate])) as served:
        trusted: list[dict[str, Any]] = [
            {"root_certificates": certificate[1]},
            {"root_certificates": file, "tls": True},
            {"root_certificates": str(file)},
            {"tls": grpc.ssl_channel_credentials(certificate[1])},
        ]
        for given in trusted:
            assert call(kind, served.address, "generate", "abc", max_tokens=4, seed=5, client=given).text
            assert call(kind, served.address, "stream", "abc", max_tokens=4, seed=5, client=given)
        for refused in ({}, {"tls": True}):  # not encrypted; signed by nobody who is known
            with pytest.raises(UnavailableError):
                call(kind, served.address, "models", client={"retries": 0, **refused})


def test_certificates_are_given_once_and_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="root_certificates: must be part of the credentials"):
        TriForceClient(tls=grpc.ssl_channel_credentials(), root_certificates=b"")
    with pytest.raises(FileNotFoundError):
        TriForceClient(root_certificates=tmp_path / "none.pem")


METHODS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("generate", ("abc",), {"max_tokens": 2}),
    ("stream", ("abc",), {"max_tokens": 2}),
    ("chat", ([{"role": "user", "content": "hi"}],), {"max_tokens": 2}),
    ("stream_chat", ([{"role": "user", "content": "hi"}],), {"max_tokens": 2}),
    ("tokenize", ("abc",), {}),
    ("detokenize", ([97],), {}),
    ("models", (), {}),
]


@pytest.mark.parametrize(("method", "arguments", "named"), METHODS, ids=[method for method, *_ in METHODS])
def test_a_key_goes_with_every_call(
    kind: str, method: str, arguments: tuple[Any, ...], named: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Generation(keys=("sk-1", "sk-2"))) as served:
        for wrong in ({}, {"api_key": "sk-3"}):
            with pytest.raises(AuthenticationError, match="the API key is missing or not valid") as refused:
                call(kind, served.address, method, *arguments, client=wrong, **named)
            assert "sk-3" not in str(refused.value)
        assert call(kind, served.address, method, *arguments, client={"api_key": "sk-1"}, **named)
        monkeypatch.setenv("TRIFORCE_API_KEY", "sk-2")
        assert call(kind, served.address, method, *arguments, **named)
        assert served.generation.metadata["authorization"] == "Bearer sk-2"
        with pytest.raises(AuthenticationError):
            call(kind, served.address, method, *arguments, client={"api_key": "sk-3"}, **named)
        with pytest.raises(AuthenticationError):  # an empty key is none, whatever the environment says
            call(kind, served.address, method, *arguments, client={"api_key": ""}, **named)
        assert "authorization" not in served.generation.metadata


def test_a_key_in_the_metadata_is_sent_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIFORCE_API_KEY", "sk-2")
    metadata = [("authorization", "Bearer sk-1")]
    with serving(Generation(keys=("sk-1",))) as served:
        for given in ({}, {"api_key": ""}):
            assert call(kind, served.address, "models", client={"metadata": metadata, **given})
            assert served.generation.authorizations == ["Bearer sk-1"]
    with pytest.raises(ValueError, match="api_key: contradicts authorization in metadata"):
        TriForceClient(api_key="sk-1", metadata=metadata)


@pytest.mark.parametrize("key", ["sécret", "a\nb", "a\0"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ValueError, match="api_key: must be printable ASCII characters") as refused:
        TriForceClient(api_key=key)
    assert key not in str(refused.value)


# -- chats, tokens, health ---------------------------------------------------------------------------------------------

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the time?"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "time"}}]},
    {"role": "tool", "content": "12:00", "tool_call_id": "1", "name": "time"},
]


def test_a_conversation_is_sent_as_messages(kind: str) -> None:
    tools = [{"type": "function", "function": {"name": "time"}}]
    with serving(Generation(Failure(UNAVAILABLE, 0), Failure(UNAVAILABLE, 2))) as served:
        whole = call(kind, served.address, "chat", CHAT, tools=tools, max_tokens=5, seed=3)
        chunks = call(kind, served.address, "stream_chat", CHAT, tools=tools, max_tokens=5, seed=3)
        assert (list(whole.token_ids), whole.text) == (tokens_of(chunks), text_of(chunks))
        for request in served.generation.requests:
            assert request.WhichOneof("prompt") == "messages"
            sent = request.messages
            assert [(each.role, each.content) for each in sent.messages] == [
                (message["role"], message["content"] or "") for message in CHAT
            ]
            assert sent.messages[2].tool_calls_json == '[{"id": "1", "function": {"name": "time"}}]'
            assert (sent.messages[3].tool_call_id, sent.messages[3].name) == ("1", "time")
            assert sent.tools_json == '[{"type": "function", "function": {"name": "time"}}]'


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([{"role": "user", "text": "hi"}], r"^messages\[0\]: 'text' must be one of role, content"),
        ([{"role": "user", "content": 5}], r"^messages\[0\].content: 5 is of the wrong type"),
        ([{"role": "user", "content": "a"}, "hi"], r"^messages\[1\]: 'hi' must be a mapping"),
        ([{"role": "assistant", "tool_calls": [object()]}], r"^messages\[0\]: .* is not JSON"),
    ],
)
def test_messages_that_cannot_be_sent_are_named(messages: list[Any], named: str) -> None:
    with TriForceClient() as client:
        for method in (client.chat, client.stream_chat, client.tokenize):
            with pytest.raises(InvalidRequestError, match=named):
                method(messages)


def test_tokens_and_back(kind: str) -> None:
    with serving(Generation()) as served:
        assert call(kind, served.address, "tokenize", "abc") == (97, 98, 99)
        assert call(kind, served.address, "tokenize", [{"role": "user", "content": "ab"}]) == (97, 98)
        assert call(kind, served.address, "detokenize", [97, 98]) == "ab"
        with pytest.raises(InvalidRequestError, match=r"^prompt: "):
            call(kind, served.address, "detokenize", [-1])


def test_health(kind: str) -> None:
    with serving(Generation()) as served:
        assert call(kind, served.address, "health") is True
        served.say(health_pb2.HealthCheckResponse.NOT_SERVING)
        assert call(kind, served.address, "health") is False
        address = served.address
    began = time.monotonic()
    with pytest.raises(UnavailableError):
        call(kind, address, "health")
    assert time.monotonic() - began < 5
