"""A real server with keys: what is reached without one over HTTP and gRPC, Serve's own methods included, and how soon a
key is out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import requests
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import expect
from ray.serve.generated import serve_pb2, serve_pb2_grpc

from tests.browser import chromium
from tests.serve.conftest import Server, free_ports, start, stop
from tests.starting import LocalRay, tried_twice
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core._gen.triforce.v1.generation_pb2_grpc import GenerationStub

pytestmark = pytest.mark.ci  # a server of its own

FIRST, SECOND = "first-key-of-this-test", "second-key-of-this-test"
PROMPT = "def a_prompt_that_nobody_else_reads():"
OUT_WITHIN_S = 5.0


class KeyedServer(Server):
    """A server whose requests carry the first key."""

    def complete(
        self, prompt: object = PROMPT, *, read: bool = True, key: str | None = FIRST, **fields: object
    ) -> requests.Response:
        headers = {"content-type": "application/json", **bearer(key)}
        body = json.dumps({"prompt": prompt, **fields})
        return requests.post(f"{self.url}/v1/completions", data=body, headers=headers, stream=not read, timeout=120)


@dataclass(frozen=True)
class Started:
    server: KeyedServer
    keys: Path
    logs: Path


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, local_ray: LocalRay) -> Iterator[Started]:
    local_ray.end()
    folder = tmp_path_factory.mktemp("keys")
    config, log, keys = folder / "config.yaml", folder / "log.txt", folder / "keys"
    port, grpc_port = free_ports(2)
    keys.write_text(f"first: {FIRST}\nsecond: {SECOND}\n")
    config.write_text(
        f"dtype: float32\nserver: {{port: {port}, grpc_port: {grpc_port}, api_keys: {keys}, log: json}}\n"
    )
    process = tried_twice(lambda: start(config, log))
    [logs] = [line.split()[1] for line in log.read_text().splitlines() if line.split()[:1] == ["logs"]]
    server = KeyedServer(port, grpc_port, process)
    yield Started(server, keys, Path(logs))
    stop(server, log)
    assert not Path(logs).parents[2].exists()
    assert "Traceback" not in log.read_text()


def test_nobody_else_reaches_rays_sockets_and_logs(started: Started) -> None:
    assert started.logs.parents[2].stat().st_mode & 0o777 == 0o700


def test_without_a_key_nothing_of_ours_is_reached(started: Started) -> None:
    url = started.server.url
    for path in ("/health", "/ready"):
        assert requests.get(url + path, timeout=30).json() == {"status": "ok"}
    document = requests.get(f"{url}/openapi.json", headers=bearer(FIRST), timeout=30).json()
    paths = {*document["paths"], "/docs", "/openapi.json", "/redoc", "/-/other", "/metrics"} - {"/health", "/ready"}
    paths |= {"/", "/page/app.js", "/page/demo.py"}
    assert len(paths) > 8
    for path in paths:
        for method in ("GET", "POST"):
            answer = requests.request(method, url + path, headers=bearer("wrong"), timeout=30)
            assert answer.status_code == 401, (method, path, answer.text)
            error = answer.json()["error"]  # in the form of OpenAI's API or of Anthropic's
            assert error.get("code", error["type"]) in ("invalid_api_key", "authentication_error"), path
    assert requests.get(f"{url}/v1/models", headers=bearer(SECOND), timeout=30).status_code == 200
    for path, status in (("/", 401), ("/page/app.js", 401), ("/health", 405), ("/ready", 405)):
        pieces = (b"x" * 1000 for _ in range(3))
        assert requests.post(url + path, data=pieces, timeout=30).status_code == status
    # Serve's own: that there is an application, and its name.
    assert requests.get(f"{url}/-/healthz", timeout=30).text == "success"
    assert requests.get(f"{url}/-/routes", timeout=30).json() == {"/": "triforce"}


def test_a_browser_asks_for_the_key_and_sends_it_with_all_that_the_page_does(started: Started) -> None:
    with chromium() as browser:
        with pytest.raises(PlaywrightError, match="ERR_INVALID_AUTH_CREDENTIALS"):  # it asked, and nobody answered
            browser.new_page().goto(started.server.url)
        page = browser.new_page(http_credentials={"username": "anyone", "password": FIRST})
        page.goto(started.server.url)
        expect(page.locator("#model")).to_contain_text("tokens", timeout=30_000)
        page.get_by_label("Document", exact=True).fill("def")
        page.get_by_label("Max tokens").fill("4")
        page.get_by_role("button", name="Start").click()
        expect(page.get_by_role("status")).to_contain_text("Done: 4 tokens", timeout=60_000)
        page = browser.new_page()
        page.goto(started.server.url.replace("://", f"://anyone:{FIRST}@"))
        expect(page.locator("#model")).to_contain_text("tokens", timeout=30_000)


def test_the_same_over_grpc(started: Started) -> None:
    with grpc.insecure_channel(started.server.grpc_address) as channel:
        stub, serve = GenerationStub(channel), serve_pb2_grpc.RayServeAPIServiceStub(channel)
        asked = gen.GenerateRequest(text=PROMPT, max_tokens=4)
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            for call in (
                lambda m: stub.Generate(asked, metadata=m, timeout=30),
                lambda m: list(stub.GenerateStream(asked, metadata=m, timeout=30)),
                lambda m: stub.ListModels(gen.ListModelsRequest(), metadata=m, timeout=30),
                lambda m: stub.Tokenize(gen.TokenizeRequest(text=PROMPT), metadata=m, timeout=30),
                lambda m: stub.Detokenize(gen.DetokenizeRequest(token_ids=[1]), metadata=m, timeout=30),
            ):
                with pytest.raises(grpc.RpcError) as refused:
                    call(metadata)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, refused.value
        # grpc.health.v1, which load balancers ask, is open.
        health, whole = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
        assert health.Check(whole, timeout=30).status == health_pb2.HealthCheckResponse.SERVING
        assert "triforce.v1.Generation" in health.List(health_pb2.HealthListRequest(), timeout=30).statuses
        watch = health.Watch(whole, timeout=30)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        mine = (("authorization", f"Bearer {FIRST}"), ("x-request-id", "mine over gRPC"))
        answer, call = stub.Generate.with_call(asked, metadata=mine, timeout=60)
        assert answer.usage.completion_tokens == 4
        assert dict(call.trailing_metadata())["x-request-id"] == "mine over gRPC"
        stream = stub.GenerateStream(asked, metadata=mine, timeout=60)
        assert sum(len(chunk.token_ids) for chunk in stream) == 4
        assert dict(stream.trailing_metadata())["x-request-id"] == "mine over gRPC"
        # Serve's own: as over HTTP. Reflection is off.
        assert serve.Healthz(serve_pb2.HealthzRequest(), timeout=30).message == "success"
        listed = serve.ListApplications(serve_pb2.ListApplicationsRequest(), timeout=30)
        assert list(listed.application_names) == ["triforce"]
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        services = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        with pytest.raises(grpc.RpcError) as refused:
            list(reflection.ServerReflectionInfo(services, timeout=30))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_request_has_one_id_in_its_answer_and_in_the_log(started: Started) -> None:
    url, headers = f"{started.server.url}/v1/models", bearer(FIRST)
    mine = requests.get(url, headers={**headers, "x-request-id": "mine over HTTP"}, timeout=30)
    assert mine.headers["x-request-id"] == "mine over HTTP"  # once: several would be joined by a comma
    made = requests.get(url, headers=headers, timeout=30).headers["x-request-id"]
    assert "," not in made
    unsound = requests.get(url, headers={**headers, "x-request-id": "x" * 129}, timeout=30)
    assert unsound.status_code == 400
    latin = requests.get(url, headers={**headers, "x-request-id": b"caf\xe9"}, timeout=30)
    assert (latin.status_code, latin.json()["error"]["param"]) == (400, "x-request-id")
    completed = started.server.complete(max_tokens=5, seed=1)
    assert completed.status_code == 200
    lines = until_logged(started.logs, completed.headers["x-request-id"])
    calls = {line["call"]["id"]: line["call"] for line in lines if "call" in line}
    assert calls["mine over HTTP"]["route"] == calls[made]["route"] == "GET /v1/models"
    call = calls[completed.headers["x-request-id"]]
    assert (call["key"], call["status"], call["completion_tokens"], call["finish_reason"]) == (
        "first",
        200,
        5,
        "length",
    )
    assert 0 < call["ttft_s"] <= call["duration_s"]
    for file in (started.logs / "serve").iterdir():
        text = file.read_text() if file.is_file() else ""
        for secret in (FIRST, SECOND, PROMPT):
            assert secret not in text, file


def until_logged(logs: Path, request_id: str) -> list[dict[str, object]]:
    """The lines of the gateway's log, each an object, once one of them has the id."""
    until = time.monotonic() + 10
    while True:
        [log] = (logs / "serve").glob("replica_triforce_gateway_*.log")
        text = log.read_text()
        if request_id in text:
            return [json.loads(line) for line in text.splitlines()]
        assert time.monotonic() < until, text
        time.sleep(0.1)


def test_a_body_above_the_limit_is_refused_by_a_real_server(started: Started) -> None:
    answer = started.server.complete("x" * 30_000_000)
    assert answer.status_code == 413
    assert answer.json()["error"]["param"] == "body"


def test_a_revoked_key_is_out_at_once_and_a_new_one_in(started: Started) -> None:
    def status(key: str) -> int:
        return requests.get(f"{started.server.url}/v1/models", headers=bearer(key), timeout=30).status_code

    def over_grpc(key: str) -> grpc.StatusCode:
        with grpc.insecure_channel(started.server.grpc_address) as channel:
            _, call = GenerationStub(channel).ListModels.with_call(
                gen.ListModelsRequest(), metadata=(("authorization", f"Bearer {key}"),), timeout=30
            )
            code: grpc.StatusCode = call.code()
            return code

    assert (status(SECOND), status("third-key")) == (200, 401)
    assert over_grpc(SECOND) is grpc.StatusCode.OK
    new = started.keys.with_suffix(".new")
    new.write_text(f"first: {FIRST}\nthird: third-key\n")
    new.rename(started.keys)
    began = time.monotonic()
    while status(SECOND) != 401:
        assert time.monotonic() - began < OUT_WITHIN_S
        time.sleep(0.1)
    with pytest.raises(grpc.RpcError) as refused:
        over_grpc(SECOND)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert (status("third-key"), status(FIRST)) == (200, 200)
    assert started.server.process.poll() is None
