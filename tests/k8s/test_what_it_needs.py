"""What the chart's values need of a cluster, such as secrets, is missed at once and by name. Helm itself installs, into
an API server that knows just enough.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from tests.charts import CHART, EXAMPLES, helm_binary

GROUPS = {
    "v1": {"Pod": "pods", "Secret": "secrets", "ServiceAccount": "serviceaccounts", "Service": "services",
           "PersistentVolumeClaim": "persistentvolumeclaims", "ConfigMap": "configmaps"},
    "apps/v1": {"Deployment": "deployments"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies", "Ingress": "ingresses"},
    "ray.io/v1": {"RayService": "rayservices"},
}  # fmt: skip
MORE = {
    "monitoring.coreos.com/v1": {"PodMonitor": "podmonitors"},
    "gateway.networking.k8s.io/v1": {"HTTPRoute": "httproutes", "GRPCRoute": "grpcroutes"},
}


class Cluster(ThreadingHTTPServer):
    """An API server: kinds, objects by their paths, and nothing that acts on them."""

    def __init__(self, groups: dict[str, dict[str, str]]) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.groups = groups
        self.objects: dict[str, Any] = {}
        self.add("v1", "serviceaccounts", {"kind": "ServiceAccount", "metadata": {"name": "default"}})

    def add(self, version: str, plural: str, given: dict[str, Any]) -> None:
        root = "/api/v1" if version == "v1" else f"/apis/{version}"
        given = {"apiVersion": version, **given}
        self.objects[f"{root}/namespaces/default/{plural}/{given['metadata']['name']}"] = given

    def secret(self, name: str, *keys: str) -> None:
        self.add("v1", "secrets", {"kind": "Secret", "metadata": {"name": name}, "data": dict.fromkeys(keys, "eA==")})

    def kinds(self, version: str) -> dict[str, Any]:
        verbs = ["get", "list", "create", "update", "patch", "delete"]
        kinds = self.groups[version].items()
        resources = [{"name": plural, "kind": kind, "namespaced": True, "verbs": verbs} for kind, plural in kinds]
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}

    def found(self, path: str) -> dict[str, Any] | None:
        if path == "/version":
            return {"major": "1", "minor": "33", "gitVersion": "v1.33.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            versions = [{"groupVersion": each, "version": each.split("/")[1]} for each in self.groups if "/" in each]
            groups = [{"name": each["groupVersion"].split("/")[0], "versions": [each]} for each in versions]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        version = path.removeprefix("/apis/").removeprefix("/api/")
        if version in self.groups:
            return self.kinds(version)
        if path.endswith("/secrets"):  # Helm looks for its releases
            found = [each for at, each in self.objects.items() if at.startswith(path) and "labels" in each["metadata"]]
            releases = [each for each in found if each["metadata"]["labels"].get("owner") == "helm"]
            return {"kind": "SecretList", "apiVersion": "v1", "items": releases}
        return self.objects.get(path)


def merged(old: Any, patch: Any) -> Any:
    """An object after a JSON merge patch."""
    if not isinstance(old, dict) or not isinstance(patch, dict):
        return patch
    kept = {key: value for key, value in old.items() if key not in patch}
    return kept | {key: merged(old.get(key), value) for key, value in patch.items() if value is not None}


class Answering(BaseHTTPRequestHandler):
    server: Cluster

    def answer(self, code: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        found = self.server.found(self.path.partition("?")[0])
        none = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        self.answer(404 if found is None else 200, found or none)

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["content-length"])))
        path = f"{self.path.partition('?')[0]}/{given['metadata']['name']}"
        self.server.objects[path] = given
        self.answer(201, given)

    def do_PUT(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.objects[self.path.partition("?")[0]] = given
        self.answer(200, given)

    def do_PATCH(self) -> None:
        patch = json.loads(self.rfile.read(int(self.headers["content-length"])))
        path = self.path.partition("?")[0]
        self.server.objects[path] = merged(self.server.objects[path], patch)
        self.answer(200, self.server.objects[path])

    def log_message(self, format: str, *given: Any) -> None:
        pass


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(GROUPS) as running:
        Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def install(cluster: Cluster, values: Path, folder: Path, verb: str = "install") -> subprocess.CompletedProcess[str]:
    address = f"http://127.0.0.1:{cluster.server_port}"
    named = {"name": "here", "context": {"cluster": "here", "user": "me", "namespace": "default"}}
    config = {"clusters": [{"name": "here", "cluster": {"server": address}}], "contexts": [named]}
    (folder / "config").write_text(yaml.safe_dump({"current-context": "here", "users": [{"name": "me"}], **config}))
    command = [helm_binary(), verb, "demo", CHART, "--values", values, "--disable-openapi-validation"]
    environment = {"HOME": str(folder), "KUBECONFIG": str(folder / "config")}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


def test_an_example_without_needs_is_installed(cluster: Cluster, tmp_path: Path) -> None:
    done = install(cluster, CHART / "examples" / "cpu-demo.yaml", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "/apis/ray.io/v1/namespaces/default/rayservices/demo" in cluster.objects


def test_what_an_example_needs_is_asked_for_one_by_one(cluster: Cluster, tmp_path: Path) -> None:
    [values] = [each for each in EXAMPLES if each.stem == "8xh100-replicas"]
    before = cluster.objects.keys() - ()

    def refusal() -> str:
        done = install(cluster, values, tmp_path)
        assert done.returncode != 0
        assert cluster.objects.keys() <= before, "nothing was created"
        return done.stderr

    assert "podMonitor.enabled: this cluster has no PodMonitor" in refusal()
    cluster.groups = GROUPS | {"monitoring.coreos.com/v1": MORE["monitoring.coreos.com/v1"]}
    assert "gateway.parentRefs: this cluster has no HTTPRoute" in refusal()
    cluster.groups = GROUPS | MORE
    for named, secret, key in (
        ("rayTokenSecret", "ray-token", "auth_token"),
        ("models.hub.tokenSecret", "hugging-face", "token"),
        ("redis.passwordSecret", "redis", "redis-password"),
    ):
        told = f'{named}: namespace default has no secret "{secret}" with a key "{key}"'
        assert told in refusal()
        cluster.secret(secret, "another")
        before |= cluster.objects.keys()
        assert told in refusal()
        cluster.secret(secret, key)
    done = install(cluster, values, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_claim_that_is_named_must_be_there(cluster: Cluster, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text("models: {claim: {name: large}}")
    done = install(cluster, values, tmp_path)
    assert 'models.claim.name: namespace default has no PersistentVolumeClaim "large"' in done.stderr
    cluster.add("v1", "persistentvolumeclaims", {"kind": "PersistentVolumeClaim", "metadata": {"name": "large"}})
    assert install(cluster, values, tmp_path).returncode == 0


def test_the_password_of_redis_survives_an_upgrade(cluster: Cluster, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text("redis: {create: true}")
    assert install(cluster, values, tmp_path).returncode == 0
    secret = "/api/v1/namespaces/default/secrets/demo-redis"
    password = cluster.objects[secret]["data"]["password"]
    assert len(password) > 40
    values.write_text("{redis: {create: true}, settings: {server: {replicas: {max: 2}}}}")
    done = install(cluster, values, tmp_path, "upgrade")
    assert done.returncode == 0, done.stderr
    assert cluster.objects[secret]["data"]["password"] == password
    [group] = cluster.objects["/apis/ray.io/v1/namespaces/default/rayservices/demo"]["spec"]["rayClusterConfig"][
        "workerGroupSpecs"
    ]
    assert group["maxReplicas"] == 2, "it was upgraded"
