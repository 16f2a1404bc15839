"""A lossy target is labelled wherever a client or an operator looks, and a lossless one nowhere."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import yaml
from starlette.testclient import TestClient

from actors.wire import event_to_proto, request_from_proto
from deploy.checks import models, models_of
from deploy.directions import directions
from deploy.grpc_api import generate, list_models
from deploy.openai_api.routes import http_app
from deploy.service import ServedModel, Service
from tests.command_line import run
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core._gen.triforce.v1.generation_pb2 import GenerateRequest
from triforce_core.building.loading import load_local_engine
from triforce_core.client.results import completion_from_proto, models_from_proto
from triforce_core.config import Settings, load_settings
from triforce_core.engine.engine import Engine, run_to_end

LOSSY = {"eviction": "heavy_hitter", "kv_budget": 64}
TEXT = "heavy_hitter keeps 64 tokens of KV of each request and forgets the others"
PROMPT = "def main() -> None:\n    " * 40


class Local:
    """A pipeline in this process: an engine that runs each request to its end."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def decode(self, request: pb.DecodeRequest) -> AsyncGenerator[pb.DecodeEvent, None]:
        asked = request_from_proto(request, (0, 0))
        for output in await asyncio.to_thread(lambda: [*run_to_end(self.engine, [asked])]):
            yield event_to_proto(output, stats=request.stats_in_each)

    async def status(self) -> dict[str, list[pb.TierStatus]]:
        return {}

    async def check(self) -> None:
        """The pipeline can serve."""


def service_of(settings: Settings) -> Service:
    return Service(settings, ServedModel.load(settings), Local(load_local_engine(settings)))


def served(settings: Settings) -> TestClient:
    return TestClient(http_app(service_of(settings)))


@pytest.fixture(scope="module")
def settings() -> Settings:
    return load_settings(dtype="float32", max_sequences=2, target=LOSSY)


@pytest.fixture(scope="module")
def client(settings: Settings) -> TestClient:
    return served(settings)


def complete(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 8, "seed": 1, **fields})


def chat(client: TestClient, **fields: Any) -> Any:
    messages = [{"role": "user", "content": PROMPT}]
    return client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4, "seed": 1, **fields})


def events_of(answer: Any) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_a_lossy_target_says_so_in_every_answer(client: TestClient) -> None:
    assert client.get("/status").json()["target"]["lossy"] == TEXT
    assert client.get("/v1/models").json()["data"][0]["lossy"] == TEXT
    assert client.get("/v1/models/demo").json()["lossy"] == TEXT
    assert client.get("/version").json()["system_fingerprint"].startswith("fp_lossy_")
    for ask in (complete, chat):
        answer = ask(client).json()
        assert answer["triforce"]["lossy"] == TEXT
        assert answer["system_fingerprint"].startswith("fp_lossy_")
        assert events_of(ask(client, stream=True))[-1]["triforce"]["lossy"] == TEXT


@pytest.mark.parametrize(("target", "said"), [(LOSSY, TEXT), ({}, None)])
def test_the_sdk_shows_it(target: dict[str, Any], said: str | None) -> None:
    settings = load_settings(dtype="float32", max_sequences=2, speculation={"tiers": "target"}, target=target)
    service = service_of(settings)
    answer = asyncio.run(generate(service, GenerateRequest(text=PROMPT, max_tokens=4, seed=1)))
    [choice] = completion_from_proto(answer).choices
    assert choice.stats.lossy == said
    assert [model.lossy for model in models_from_proto(list_models(service))] == [said]


def test_a_lossless_target_says_nothing_of_it() -> None:
    settings = load_settings(dtype="float32", speculation={"tiers": "target"})
    client = served(settings)
    for answer in (complete(client), client.get("/status"), client.get("/v1/models")):
        assert "lossy" not in answer.text
    assert "lossy" not in client.get("/version").json()["system_fingerprint"]


def test_each_way_of_forgetting_has_a_fingerprint_of_its_own() -> None:
    ways = [
        {},
        LOSSY,
        LOSSY | {"kv_budget": 128},
        LOSSY | {"heavy_share": 0.25},
        {"eviction": "streaming", "kv_budget": 64},
    ]
    assert len({ServedModel.load(load_settings(target=way)).fingerprint for way in ways}) == len(ways)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"lookaheads": [8, 3]}, "lookaheads"),
        ({"tiers": "draft,retrieval,target"}, "lookaheads"),
        ({"drafter": "lookup"}, "drafter"),
        ({"selector": "mean_key"}, "selector"),
    ],
)
def test_a_request_that_asks_for_speculation_is_refused_by_name(
    client: TestClient, asked: dict[str, Any], field: str
) -> None:
    answer = complete(client, speculation=asked)
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]
    assert "target.eviction is heavy_hitter" in answer.json()["error"]["message"]
    assert complete(client, speculation={"lookaheads": [0, 0]}).status_code == 200
    assert complete(client, speculation={"tiers": "target"}).status_code == 200


def test_the_commands_say_so(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def triforce(*arguments: str) -> tuple[str, str]:
        assert run(monkeypatch, *arguments) == 0
        return capsys.readouterr()

    path = tmp_path / "triforce.yaml"
    path.write_text(yaml.safe_dump({"target": LOSSY, "dtype": "float32"}))
    printed, _ = triforce("config", "--config", str(path))
    assert printed.startswith(f"# lossy: {TEXT}\n")
    assert yaml.safe_load(printed)["target"]["eviction"] == "heavy_hitter"
    as_json, told = triforce("config", "--config", str(path), "--json")
    assert json.loads(as_json)["target"]["kv_budget"] == 64
    assert TEXT in told
    assert "lossy" not in "".join(triforce("config")).lower()
    (tmp_path / "prompt.txt").write_text(PROMPT)
    arguments = ("--prompt-file", str(tmp_path / "prompt.txt"), "--max-tokens", "4", "--config", str(path))
    assert f"LOSSY: {TEXT}" in " ".join(triforce("generate", *arguments)[0].split())
    assert f"LOSSY  {TEXT}" in directions(settings, tmp_path, [])
    assert "LOSSY" in models(settings)


def test_the_doctor_counts_the_target_alone(settings: Settings) -> None:
    assert [*models_of(settings)] == ["target"]
