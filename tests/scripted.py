"""The service over a pipeline that answers what a test scripts, and short ways to ask it through its doors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from functools import cache
from typing import Any

from starlette.testclient import TestClient

from deploy import grpc_api
from deploy.client_request import ClientRequest
from deploy.openai_api.routes import http_app
from deploy.service import ServedModel, Service
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import load_settings
from triforce_core.errors import UnavailableError
from triforce_core.messages import SamplingParams

EOS = 0


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


class WithoutTiers(Scripted):
    """Its replica can serve."""

    async def status(self) -> dict[str, list[pb.TierStatus]]:
        return {}

    async def check(self) -> None:
        """A replica can serve."""


def event(tokens: list[int], finish: gen.FinishReason = gen.FINISH_REASON_UNSPECIFIED) -> pb.DecodeEvent:
    stats = pb.DecodeStats(decoded=len(tokens), decode_s=0.01, tallies=[pb.Tally(rounds=1)] * 3)
    return pb.DecodeEvent(token_ids=tokens, origins=bytes(len(tokens)), finish_reason=finish, stats=stats)


def scored(tokens: list[int], finish: gen.FinishReason = gen.FINISH_REASON_UNSPECIFIED) -> pb.DecodeEvent:
    """An event whose tokens' logprobs tell the tokens."""
    made = event(tokens, finish)
    made.logprobs.extend(gen.TokenLogprobs(logprob=-token) for token in tokens)
    return made


ENDED = event(ids("a"), gen.FINISH_REASON_LENGTH)


def served(*script: pb.DecodeEvent | Exception | float, **settings: Any) -> tuple[TestClient, Service, Scripted]:
    pipelines = Scripted(*script)
    given = load_settings(**settings)
    service = Service(given, ServedModel.load(given) if settings else model(), pipelines)
    return TestClient(http_app(service), raise_server_exceptions=False), service, pipelines


def ask(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/completions", json={"prompt": "def", **fields})


def events_of(answer: Any) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def generated(service: Service, **fields: Any) -> gen.GenerateResponse:
    """What the service answers over gRPC."""
    return asyncio.run(grpc_api.generate(service, gen.GenerateRequest(**{"text": "def", **fields})))


def wanted(**fields: Any) -> ClientRequest:
    return ClientRequest(**{"prompt": "def", "sampling": SamplingParams(), "max_tokens": 16, **fields})
