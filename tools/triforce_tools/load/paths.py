"""What the way through HTTP or gRPC adds to a token's time: the same request over each, and to the target directly."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from itertools import pairwise
from types import TracebackType
from typing import Any, NamedTuple, Self

import aiohttp
import grpc

from actors.wire import request_to_proto
from triforce_core._gen.triforce.v1.tiers_pb2_grpc import TargetStub
from triforce_core.client.calls import authorization
from triforce_core.client.errors import from_rpc_error
from triforce_core.client.results import Usage
from triforce_core.engine.sequence import Request
from triforce_core.errors import require
from triforce_core.messages import SamplingParams
from triforce_tools.load.answers import Client, FailedError, Piece, Question
from triforce_tools.load.grpc_client import GrpcClient, failed
from triforce_tools.load.http_client import HttpClient, check_status, failures, malformed
from triforce_tools.load.prompts import words_of

# All answers use these lookaheads, for the tiers that the server has: left to itself, it might decode each differently.
LOOKAHEADS = {"retrieval": 8, "draft": 3}
# One MB. It is longer than most contexts, so that the server refuses it; a model with room for it reads it as a prompt.
BODY = "a " * 500_000
BODY_EVERY_S = 0.5


class TargetClient:
    """Asks the target's process itself, as the replica does. `tokens` has the token ids of each prompt."""

    def __init__(self, address: str, tokens: dict[str, list[int]]) -> None:
        self.address, self.tokens = address, tokens

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self.address)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._channel.close(None)

    async def models(self) -> list[str]:
        return []

    async def answer(self, question: Question) -> AsyncGenerator[Piece, None]:
        prompt = self.tokens[question.prompt]
        sampling = SamplingParams(temperature=question.temperature)
        asked = Request(
            tuple(prompt),
            max_tokens=question.max_tokens,
            sampling=sampling,
            seed=question.seed,
            lookaheads=question.lookaheads,
        )
        count = 0
        try:
            async for event in TargetStub(self._channel).Decode(request_to_proto(asked)):
                count += len(event.token_ids)
                last = event.finish_reason != 0
                if event.token_ids or last:  # the first events tell of the request's beginning
                    yield Piece("", Usage(len(prompt), count) if last else None)
        except grpc.RpcError as error:
            raise failed(from_rpc_error(error)) from None


class Timed(NamedTuple):
    """One answer, in milliseconds."""

    token_ms: float  # from the first piece to the last, for each token after the first piece
    longest_gap_ms: float


async def timed(client: Client, question: Question) -> Timed:
    """The times of one answer to the question. Raises `FailedError`."""
    times: list[float] = []
    usage = None
    async with aclosing(client.answer(question)) as pieces:
        async for piece in pieces:
            times.append(time.perf_counter())
            usage = piece.usage or usage
    if usage is None or len(times) < 3:
        raise FailedError("short", "the answer is too short to be timed")
    # The first piece has one token, which the pass that ends the prompt gives.
    token_ms = 1e3 * (times[-1] - times[0]) / (usage.completion_tokens - 1)
    return Timed(token_ms, 1e3 * max(b - a for a, b in pairwise(times)))


async def bench_paths(
    http: HttpClient,
    ours: GrpcClient,
    *,
    context: int,
    output: int,
    repeats: int,
    temperature: float,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Milliseconds a token over HTTP, over gRPC and directly, in turns; then over HTTP while bodies of one MB arrive.

    Every second turn has the reverse order. Before them each client reads the prompt once, unmeasured: where the
    server has keys, requests over HTTP do not share the KV of direct ones.

    `http` and `ours` are clients of one server.

    Raises `FailedError`, or `InvalidValueError` if the server has several replicas.
    """
    async with aiohttp.ClientSession(headers=dict(authorization())) as session, http, ours:
        status, tokens = await fetched(session, f"{http.address}/status"), dict[str, list[int]]()
        with malformed():
            addresses = [tier["address"] for tier in status["tiers"] if tier["tier"] == "target" and tier["address"]]
        rule = f"must be a server of one replica; it has {len(addresses)} targets"
        require(len(addresses) == 1, "url", http.address, rule)
        prompt = words_of("paths", context)
        asking = f"{http.address}/tokenize"
        while (count := len(ids := (await fetched(session, asking, {"prompt": prompt}))["tokens"])) > context:
            words = prompt.split()
            prompt = " ".join(words[: min(len(words) - 1, len(words) * context // count)])
        tokens[prompt] = ids
        with malformed():
            model = (await http.models())[0]
        async with TargetClient(addresses[0], tokens) as target:
            clients: dict[str, Client] = {"direct": target, "http": http, "grpc": ours}
            found: dict[str, list[Timed]] = {name: [] for name in (*clients, "http_beside_bodies")}
            drafting = {tier["tier"] for tier in status["tiers"]}
            retrieval, draft = (tokens * (tier in drafting) for tier, tokens in LOOKAHEADS.items())
            questions = [
                Question(model, prompt, output, temperature, seed=turn, lookaheads=(retrieval, draft))
                for turn in range(repeats)
            ]
            progress("reading the prompt")
            for client in clients.values():
                await timed(client, questions[0])
            for turn, question in enumerate(questions):
                for name in list(clients)[:: -1 if turn % 2 else 1]:
                    progress(f"{turn + 1} of {repeats}: {name}")
                    found[name].append(await timed(clients[name], question))
            # After the others: the server works on the last body for a moment when this answer has ended.
            for turn, question in enumerate(questions):
                progress(f"{turn + 1} of {repeats}: http beside bodies of 1 MB")
                found["http_beside_bodies"].append(await beside_bodies(session, http, question))
    times = {name: [each.token_ms for each in answers] for name, answers in found.items()}
    ratios = {name: [a / b for a, b in zip(times[name], times["direct"], strict=True)] for name in ("http", "grpc")}
    return {
        "prompt_tokens": len(ids),
        "output_tokens": output,
        "lookaheads": [retrieval, draft],
        "token_ms": {name: round(statistics.median(each), 3) for name, each in times.items()},
        "over_direct": {name: round(statistics.median(each), 3) for name, each in ratios.items()},
        "over_direct_each": {name: [round(ratio, 3) for ratio in each] for name, each in ratios.items()},
        "longest_gap_ms": {name: [round(each.longest_gap_ms, 1) for each in times] for name, times in found.items()},
    }


async def beside_bodies(session: aiohttp.ClientSession, client: HttpClient, question: Question) -> Timed:
    """An answer while another client sends bodies of one MB, the first with the question, each half a second after the
    last was answered.
    """
    url = f"{client.address}/v1/completions"

    async def send() -> None:
        while True:
            with failures():
                async with session.post(url, data=body, headers={"content-type": "application/json"}) as response:
                    await response.read()
            await asyncio.sleep(BODY_EVERY_S)

    body = json.dumps({"prompt": BODY, "max_tokens": 1}).encode()
    sending = asyncio.create_task(send())
    try:
        found = await timed(client, question)
        if sending.done():  # it ends only by an error
            await sending
        return found
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def fetched(session: aiohttp.ClientSession, url: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON of an answer. Raises `FailedError`."""
    with failures():
        async with session.get(url) if body is None else session.post(url, json=body) as response:
            await check_status(response)
            return await response.json()
