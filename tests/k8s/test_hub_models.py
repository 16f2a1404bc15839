"""Models of the hub are downloaded into the claim once, by the command that the chart renders, from a hub of ours."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from tests.charts import environment, pod_templates, rendered
from triforce_core.demo import weights_dir

COMMIT = "0" * 39 + "1"
USELESS = ("pytorch_model.bin", "original/consolidated.00.pth", "consolidated.safetensors", "README.md")


class Hub(ThreadingHTTPServer):
    """Has the demo pair's drafter as `org/small`, and as many files that nobody needs."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        folder = weights_dir("drafter")
        self.files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        self.files |= dict.fromkeys(USELESS, b"useless")
        self.sent: Counter[str] = Counter()


class Answering(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        path = self.path.partition("?")[0]
        name = path.partition(f"/resolve/{COMMIT}/")[2]
        body = self.server.files.get(name)
        if path.startswith("/api/models/org/small/tree/"):
            entries = [
                {"type": "file", "path": each, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for each, content in self.server.files.items()
            ]
            body = json.dumps(entries).encode()
        elif path.startswith("/api/models/org/small"):
            siblings = [{"rfilename": each} for each in self.server.files]
            body = json.dumps({"id": "org/small", "sha": COMMIT, "siblings": siblings}).encode()
        self.send_response(404 if body is None else 200)
        self.send_header("content-length", str(len(body or b"")))
        self.send_header("x-repo-commit", COMMIT)
        self.send_header("etag", f'"{hashlib.sha1(body or b"").hexdigest()}"')
        self.end_headers()
        if self.command == "GET" and body is not None:
            self.server.sent.update([name] if name else [])
            self.wfile.write(body)

    do_GET = do_HEAD

    def log_message(self, format: str, *given: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as running:
        Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def templates(folder: Path, **given: Any) -> dict[str, dict[str, Any]]:
    values = folder / "values.yaml"
    values.write_text(yaml.safe_dump(given))
    return pod_templates(rendered(values))


def test_the_head_downloads_what_is_loaded_once_and_the_others_find_it(hub: Hub, tmp_path: Path) -> None:
    settings = {"target": {"model": "org/small"}, "draft": {"model": "org/small"}}
    pods = templates(tmp_path, settings=settings, models={"claim": {"size": "9Gi"}})
    [download] = [each for each in pods["head"]["spec"]["initContainers"] if each["name"] == "download-models"]
    assert {"name": "models", "mountPath": "/models"} in download["volumeMounts"]
    [named] = download["env"]
    cache = tmp_path / "claim"
    own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    reached = own | {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", named["name"]: str(cache)}
    for _ in range(2):
        done = subprocess.run(
            download["command"], env=reached, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert hub.sent == dict.fromkeys(hub.files.keys() - set(USELESS), 1)

    for pod in pods.values():
        [volume] = [each for each in pod["spec"]["volumes"] if each["name"] == "models"]
        assert volume["persistentVolumeClaim"]["readOnly"] is (pod is not pods["head"])
        [mount] = [m for m in pod["spec"]["containers"][0]["volumeMounts"] if m["name"] == "models"]
        assert mount["readOnly"]
        given = environment(pod)
        assert given[named["name"]] == named["value"]
        assert given[named["name"]].startswith(f"{mount['mountPath']}/")
        offline = own | {name: text for name, text in given.items() if name.startswith("HF_")}
        offline[named["name"]] = str(cache)
        code = "from triforce_core.models.files import load_config, weight_files"
        code += "; load_config('org/small', 'drafter'); print(*weight_files('org/small', 'drafter'))"
        found = subprocess.run(
            [sys.executable, "-c", code], env=offline, capture_output=True, text=True, timeout=120, check=False
        )
        assert Path(found.stdout.strip()).exists(), found.stdout + found.stderr


def test_every_model_of_the_settings_that_is_an_id_of_the_hub_is_downloaded(tmp_path: Path) -> None:
    settings = {"target": {"model": "org/a"}, "retrieval": {"model": "b"}, "draft": {"model": "ngram"}}
    pods = templates(tmp_path, settings=settings, models={"claim": {"size": "9Gi"}})
    [download] = [each for each in pods["head"]["spec"]["initContainers"] if each["name"] == "download-models"]
    assert download["command"][4:] == ["org/a", "b"]


@pytest.mark.parametrize(
    ("target", "models"),
    [
        ("/models/large", {"claim": {"size": "9Gi"}}),
        ("/models/a.gguf", {"claim": {"size": "9Gi"}}),
        ("org/large", {}),
        ("org/large", {"claim": {"name": "mine"}}),
        ("demo", {"claim": {"size": "9Gi"}}),
    ],
)
def test_nothing_is_downloaded_where_no_model_is_the_hub_s_or_there_is_no_claim_of_ours(
    target: str, models: dict[str, Any], tmp_path: Path
) -> None:
    for pod in templates(tmp_path, settings={"target": {"model": target}}, models=models).values():
        assert "download-models" not in {each["name"] for each in pod["spec"]["initContainers"]}
        assert "HF_HUB_OFFLINE" not in environment(pod)
        for volume in pod["spec"]["volumes"]:
            assert volume.get("persistentVolumeClaim", {"readOnly": True})["readOnly"]
