"""What is true of all objects that the chart renders, whatever the values: no secrets, no privileges, no open port that
nobody needs, time enough to finish, and limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.charts import CHART, EXAMPLES, environment, of_kind, pod_templates, rayservice, rendered
from tests.k8s.test_chart import ALL, each_example, settings_of

SERVE_PORTS = (28000, 29000)  # its own, behind the front
DOCKERFILE = CHART.parents[1] / "deploy" / "Dockerfile"


def pods(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield from (each["spec"] for each in pod_templates(objects).values())
    yield from (each["spec"] for each in of_kind(objects, "Pod"))
    yield from (each["spec"]["template"]["spec"] for each in of_kind(objects, "Deployment"))


def walk(node: Any) -> Iterator[tuple[str, Any]]:
    """All keys with their values, however deep."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield str(key), value
        yield from walk(value)


@each_example
def test_no_secret_is_in_plain_text(values: Path) -> None:
    objects = rendered(values)
    made = [each["data"] for each in of_kind(objects, "Secret")]  # that of the Redis which the chart runs
    assert made != [each["data"] for each in of_kind(rendered(values), "Secret")] or not made, "it is random"
    for pod in pods(objects):
        for container in pod["containers"]:
            for variable in container.get("env", []):
                secret = any(word in variable["name"] for word in ("PASSWORD", "SECRET")) or variable["name"].endswith(
                    "TOKEN"
                )
                assert secret == ("valueFrom" in variable), variable
    for key, value in walk(rayservice(objects)["spec"]):
        if "password" in key.lower():
            assert set(value) == {"valueFrom"}


@each_example
def test_pods_are_restricted(values: Path) -> None:
    for pod in pods(rendered(values)):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert f"\nUSER {pod['securityContext']['runAsUser']}:" in DOCKERFILE.read_text()
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert not any("hostPath" in volume for volume in pod.get("volumes", []))
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


@each_example
def test_containers_have_requests_and_limits(values: Path) -> None:
    objects = rendered(values)
    containers = [container for pod in pods(objects) for container in pod["containers"]]
    if scaler := rayservice(objects)["spec"]["rayClusterConfig"].get("autoscalerOptions"):
        containers.append(scaler)
    for container in containers:
        for kind in ("requests", "limits"):
            assert {"cpu", "memory"} <= container["resources"][kind].keys(), container
        # Ray counts what it may use by the limit, and a node gives what was requested.
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]


@each_example
def test_others_reach_the_apis_alone(values: Path) -> None:
    objects, server = rendered(values), settings_of(values).server
    [policy] = of_kind(objects, "NetworkPolicy")
    selected = policy["spec"]["podSelector"]["matchLabels"]
    for pod in pod_templates(objects).values():
        assert selected.items() <= pod["metadata"]["labels"].items()
    for rule in policy["spec"]["ingress"]:
        ports = {each["port"] for each in rule.get("ports", [])}
        senders = rule.get("from", [])
        if senders == [{"podSelector": {"matchLabels": selected}}]:
            assert not ports  # one another: Ray and the tiers listen on ports that Ray chooses
        elif ports == {server.port, server.grpc_port}:
            pass
        else:
            assert (ports, bool(senders)) in (({8265, SERVE_PORTS[0]}, True), ({8080}, True))


def test_the_operator_is_known_however_it_was_installed() -> None:
    """Helm names it kuberay-operator and kustomize kuberay; both say what it is."""
    [policy] = of_kind(rendered(EXAMPLES[0]), "NetworkPolicy")
    [[operator]] = [
        rule["from"] for rule in policy["spec"]["ingress"] if 8265 in {each["port"] for each in rule.get("ports", [])}
    ]
    assert operator["podSelector"]["matchLabels"] == {"app.kubernetes.io/component": "kuberay-operator"}


CLIENTS = "networkPolicy.clients[0].podSelector.matchLabels.app=edge"
SCRAPERS = "networkPolicy.scrapers[0].podSelector.matchLabels.app=prometheus"


@pytest.mark.parametrize("scraped", [False, True])
@pytest.mark.parametrize("named", [(), (SCRAPERS,), (CLIENTS,), (CLIENTS, SCRAPERS)])
def test_the_http_api_is_open_to_clients_and_named_scrapers_alone(scraped: bool, named: tuple[str, ...]) -> None:
    """The server's metrics are on the port of the API, so whoever may scrape them may call it."""
    values = [f"podMonitor.enabled={str(scraped).lower()}", *named]
    objects = rendered(EXAMPLES[0], *(each for value in values for each in ("--set", value)))
    [policy] = of_kind(objects, "NetworkPolicy")
    senders = {}
    for port in (settings_of(EXAMPLES[0]).server.port, 8080):
        rules = [rule for rule in policy["spec"]["ingress"] if port in {each["port"] for each in rule.get("ports", [])}]
        if any("from" not in rule for rule in rules):
            senders[port] = {"anyone"}
            continue
        labels = [each.get("podSelector", {}).get("matchLabels", {}) for rule in rules for each in rule["from"]]
        senders[port] = {each.get("app", each.get("app.kubernetes.io/name", "any pod")) for each in labels}
    api, rays = senders.values()
    scrapers = {"prometheus"} if scraped and SCRAPERS in named else set()
    assert api == ({"edge", "triforce-test", *scrapers} if CLIENTS in named else {"anyone"})
    assert rays == ((scrapers or {"any pod"}) if scraped else set())


def test_one_pod_is_scraped_for_the_server_s_metrics_and_each_for_ray_s() -> None:
    """If every proxy were scraped, each would answer with the figures of the one gateway."""
    objects = rendered(ALL)
    scraped = {}
    for monitor in of_kind(objects, "PodMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        pods = {
            name: {
                port["name"]
                for container in (*pod["spec"]["containers"], *pod["spec"]["initContainers"])
                for port in container.get("ports", ())
            }
            for name, pod in pod_templates(objects).items()
            if wanted.items() <= pod["metadata"]["labels"].items()
        }
        [endpoint] = monitor["spec"]["podMetricsEndpoints"]
        assert all(endpoint["port"] in ports for ports in pods.values())
        scraped[endpoint["port"]] = set(pods), endpoint
    assert scraped["front"][0] == {"head"} < scraped["metrics"][0] == set(pod_templates(objects))
    assert scraped["front"][1]["path"] == "/metrics"
    assert scraped["front"][1]["authorization"] == {"credentials": {"name": "scraper", "key": "api_key"}}


@each_example
def test_every_grace_covers_the_drain(values: Path) -> None:
    objects, drain_s = rendered(values), settings_of(values).server.drain_s
    spec = rayservice(objects)["spec"]
    assert spec["rayClusterDeletionDelaySeconds"] > drain_s
    for pod in pod_templates(objects).values():
        assert int(environment(pod)["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) > drain_s
    for name, pod in pod_templates(objects).items():
        assert pod["spec"]["terminationGracePeriodSeconds"] > drain_s
        if name != "head":
            *command, seconds = pod["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
            assert command == ["python", "-m", "deploy.drain_node"]
            assert drain_s <= int(seconds) < pod["spec"]["terminationGracePeriodSeconds"]


def test_long_drains_are_not_cut(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text("settings: {server: {request_timeout_s: 2500000.5}}")
    for pod in pod_templates(rendered(values)).values():
        assert pod["spec"]["terminationGracePeriodSeconds"] == 2500061


@each_example
def test_budgets_protect_pods_that_exist(values: Path) -> None:
    objects, replicas = rendered(values), settings_of(values).server.replicas
    budgets = {
        each["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]: each
        for each in of_kind(objects, "PodDisruptionBudget")
    }
    templates = pod_templates(objects)
    assert budgets.keys() == {"head", next(name for name in templates if name != "head")}
    for name, budget in budgets.items():
        labels = templates[name]["metadata"]["labels"]
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert budget["spec"]["minAvailable"] == (1 if name == "head" else replicas.min)
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow", "a pod that hangs must not stop a drain"


def test_all_values_are_covered() -> None:
    """The set with everything has every kind of object that a template names."""
    kinds = {each["kind"] for each in rendered(ALL)}
    templates = Path(EXAMPLES[0].parent.parent, "templates").rglob("*.yaml")
    lines = [line for path in templates for line in path.read_text().splitlines()]
    named = {line.split()[1] for line in lines if line.startswith("kind:")}
    assert kinds == named
    assert yaml.safe_load(ALL.read_text())
