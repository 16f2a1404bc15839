"""The chart: example values render to objects that Kubernetes, KubeRay, Serve and our settings accept, and wrong values
are refused by name.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import requests
import yaml

from deploy.app import ENVIRONMENT
from deploy.grpc_services import SERVICERS
from scripts.chart_schema import SCHEMA, renewed
from tests.charts import (
    CHART,
    EXAMPLES,
    KUBERNETES,
    environment,
    helm,
    of_kind,
    pod_templates,
    rayservice,
    rendered,
    serve_config,
    template,
)
from tests.serve.conftest import free_ports
from triforce_core import __version__
from triforce_core.config import ServerSettings, Settings, load_settings

# The schema of KubeRay's RayService v1, without its descriptions: https://github.com/ray-project/kuberay, Apache-2.0.
RAYSERVICE = Path(__file__).with_name("rayservice-v1.json")
CUSTOM = {"RayService", "PodMonitor", "HTTPRoute", "GRPCRoute"}
ONE_MACHINE = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "SPT_NOENV")  # only `triforce serve` needs these
IN_PODS = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}

ALL = Path(__file__).with_name("all-values.yaml")  # every part of the chart at once
each_example = pytest.mark.parametrize("values", [*EXAMPLES, ALL], ids=lambda path: path.stem)


def settings_of(values: Path, *more: str) -> Settings:
    [application] = serve_config(rendered(values, *more))["applications"]
    return load_settings(None, **application["args"])


def test_the_schema_has_the_settings() -> None:
    assert SCHEMA.read_text() == renewed(SCHEMA.read_text()), "run `python -m scripts.chart_schema`"


def test_the_schema_says_of_values_what_their_comments_say() -> None:
    lines = [line.strip() for line in (CHART / "values.yaml").read_text().splitlines()]
    comments = " ".join(line.removeprefix("# ") if line.startswith("# ") else "|" for line in lines)
    schema = json.loads(SCHEMA.read_text())
    schema["definitions"]["Settings"] = schema["definitions"]["Pod"] = {}  # Pod: its values are listed in `head`
    said = re.findall(r'"description": "([^"]*)"', json.dumps(schema, ensure_ascii=False))
    assert len(said) > 60
    assert [each for each in said if f"| {each} |" not in comments] == []


@pytest.mark.parametrize("values", [None, *EXAMPLES], ids=lambda path: path.stem if path else "defaults")
def test_helm_finds_no_fault(values: Path | None) -> None:
    done = helm("lint", "--strict", str(CHART), *(() if values is None else ("--values", str(values))))
    assert done.returncode == 0, done.stdout + done.stderr


@each_example
def test_kubernetes_accepts_the_objects(values: Path) -> None:
    objects = rendered(values)
    kinds = {each["kind"] for each in objects}
    assert {"RayService", "NetworkPolicy", "PodDisruptionBudget", "ServiceAccount", "Pod"} <= kinds
    for each in objects:
        if each["kind"] not in CUSTOM:
            kubernetes_validate.validate(each, KUBERNETES, strict=True)
    for pod in pod_templates(objects).values():
        as_pod = {"apiVersion": "v1", "kind": "Pod", **pod}
        kubernetes_validate.validate(as_pod, KUBERNETES, strict=True)


def closed(node: Any) -> Any:
    """The schema of a CRD, so that unknown fields are refused and what has a default need not be given."""
    if not isinstance(node, dict):
        return [closed(each) for each in node] if isinstance(node, list) else node
    made = {key: closed(value) for key, value in node.items()}
    properties = node.get("properties")
    if isinstance(properties, dict) and node.get("type") == "object":
        if not node.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
        defaults = {name for name, each in properties.items() if isinstance(each, dict) and "default" in each}
        if "required" in node:
            made["required"] = [name for name in node["required"] if name not in defaults]
    if node.get("x-kubernetes-int-or-string"):
        made |= {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    return made


@pytest.fixture(scope="module")
def kuberay() -> jsonschema.Draft202012Validator:
    schema = closed(json.loads(RAYSERVICE.read_text()))
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(schema)


@each_example
def test_kuberay_accepts_the_rayservice(values: Path, kuberay: jsonschema.Draft202012Validator) -> None:
    kuberay.validate(rayservice(rendered(values)))


def test_kuberays_schema_refuses_what_it_does_not_know(kuberay: jsonschema.Draft202012Validator) -> None:
    wrong = rayservice(rendered(EXAMPLES[0]))
    wrong["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]["imge"] = "x"
    with pytest.raises(jsonschema.ValidationError, match="imge"):
        kuberay.validate(wrong)


@each_example
def test_serve_accepts_the_config_and_knows_all_of_it(values: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    config = serve_config(rendered(values))
    # Serve drops what it does not know without a word.
    assert ServeDeploySchema.model_validate(config).model_dump(exclude_unset=True, mode="json") == config
    assert config["grpc_options"]["grpc_servicer_functions"] == SERVICERS


@each_example
def test_the_application_gets_the_settings_that_were_given(values: Path) -> None:
    given = load_settings(None, **(yaml.safe_load(values.read_text()).get("settings") or {}))
    got = settings_of(values)
    assert got.server.host == "0.0.0.0"
    for name in ("target", "retrieval", "draft", "speculation", "device", "max_sequences"):
        assert getattr(got, name) == getattr(given, name)
    assert got.server.drain_s == given.server.drain_s
    assert got.server.replicas == given.server.replicas
    assert got.placement.colocate == given.placement.colocate


@pytest.mark.parametrize(("deterministic", "processes"), [("false", 3), ("true", 1)])
def test_where_tiers_are_placed_by_the_chart_auto_is_none_unless_they_must_share(
    deterministic: str, processes: int
) -> None:
    cpu_demo = CHART / "examples" / "cpu-demo.yaml"
    more = ("--set", "settings.placement.colocate=auto", "--set", f"settings.deterministic={deterministic}")
    more += ("--set", "settings.max_sequences=1", "--set", "workers.separate=true")
    spec = rayservice(rendered(cpu_demo, *more))["spec"]
    assert len(spec["rayClusterConfig"]["workerGroupSpecs"]) == processes
    assert len(settings_of(EXAMPLES[0], *more).placement.groups) == processes


def test_large_numbers_arrive_as_they_are() -> None:
    more = ("--set", "settings.target.kv_pool_tokens=16777216", "--set", "settings.retrieval.budget=4096")
    assert settings_of(EXAMPLES[0], *more).target.kv_pool_tokens == 16777216


def test_off_may_be_written_without_quotes(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text("settings: {target: {max_stall_ms: off}, graphs: off, compile: off}")
    got = settings_of(values)
    assert (got.target.max_stall_ms, got.graphs, got.compile) == (None, "off", "off")


@each_example
def test_pods_have_the_gpus_that_the_settings_reserve(values: Path) -> None:
    objects, settings = rendered(values), settings_of(values)
    pods = pod_templates(objects)
    assert "nvidia.com/gpu" not in pods.pop("head")["spec"]["containers"][0]["resources"]["limits"]
    groups = settings.placement.groups
    needed = [settings.ranks(group.tiers) * group.gpus for group in groups]
    separate = len(pods) > 1
    expected = [math.ceil(each) for each in needed] if separate else [math.ceil(sum(needed))]
    got = [pod["spec"]["containers"][0]["resources"]["limits"].get("nvidia.com/gpu", 0) for pod in pods.values()]
    assert got == expected
    cluster = rayservice(objects)["spec"]["rayClusterConfig"]
    for group in cluster["workerGroupSpecs"]:
        assert (group["minReplicas"], group["maxReplicas"]) == (
            settings.server.replicas.min,
            settings.server.replicas.max,
        )
    assert bool(cluster.get("enableInTreeAutoscaling")) == (settings.server.replicas.max > settings.server.replicas.min)
    if separate:
        for group, pods_of in zip(groups, cluster["workerGroupSpecs"], strict=True):
            assert pods_of["groupName"] == group.tiers[0]
            assert pods_of["labels"].items() <= group.labels.items()


@pytest.mark.parametrize("setting", ["deterministic: true", "target: {eviction: heavy_hitter}"])
def test_tiers_that_share_a_process_share_pods(setting: str, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(f"settings: {{{setting}}}\nworkers: {{separate: true}}")
    [group] = settings_of(values).placement.groups
    assert group.labels == {"triforce/tier": "target"}
    assert pod_templates(rendered(values)).keys() == {"head", "target"}
    values.write_text(f"settings: {{{setting}, placement: {{strategy: STRICT_SPREAD}}}}")
    assert pod_templates(rendered(values)).keys() == {"head", "pipeline"}  # spread or not, it is one process


@each_example
def test_pods_have_the_environment_of_triforce_serve(values: Path) -> None:
    needed = {name: value for name, value in ENVIRONMENT.items() if name not in ONE_MACHINE} | IN_PODS
    for pod in pod_templates(rendered(values)).values():
        assert needed.items() <= environment(pod).items()


def test_models_are_mounted_on_head_and_workers(tmp_path: Path) -> None:
    for choice in ({"claim": {"name": "m"}}, {"claim": {"size": "9Gi"}}, {"image": {"reference": "registry/models:1"}}):
        values = tmp_path / "values.yaml"
        values.write_text(yaml.safe_dump({"models": choice}))
        objects = rendered(values)
        for pod in pod_templates(objects).values():
            [mount] = [m for m in pod["spec"]["containers"][0]["volumeMounts"] if m["name"] == "models"]
            assert mount == {"name": "models", "mountPath": "/models", "readOnly": True}
        claims = of_kind(objects, "PersistentVolumeClaim")
        assert len(claims) == (choice.get("claim", {}).get("size") is not None)
        for claim in claims:
            assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


@pytest.mark.parametrize(("shares", "gpus"), [((0.6, 0.3, 0.1), 1), ((0.6, 0.6, 0.6), 3), ((1, 0.5, 0.5), 2)])
def test_a_share_is_of_one_gpu(shares: tuple[float, ...], gpus: int, tmp_path: Path) -> None:
    target, retrieval, draft = ({"gpus": share} for share in shares)
    values = tmp_path / "values.yaml"
    placement = {"target": target, "retrieval": retrieval, "draft": draft}
    values.write_text(yaml.safe_dump({"settings": {"device": "cuda", "placement": placement}}))
    pods = pod_templates(rendered(values))
    assert pods["pipeline"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == gpus


def test_odd_strings_stay_strings(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text('{rayTokenSecret: "123", head: {priorityClassName: "1"}, image: {pullSecrets: ["on"]}}')
    objects = rendered(values)
    assert rayservice(objects)["spec"]["rayClusterConfig"]["authOptions"]["secretName"] == "123"
    assert pod_templates(objects)["head"]["spec"]["priorityClassName"] == "1"
    assert pod_templates(objects)["head"]["spec"]["imagePullSecrets"] == [{"name": "on"}]


def test_the_secret_with_the_keys_is_the_file_that_the_settings_name(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text("apiKeysSecret: keys")
    objects = rendered(values)
    config = serve_config(objects)
    path = config["applications"][0]["args"]["server"]["api_keys"]
    assert config["grpc_options"]["enable_reflection"] is False
    for pod in pod_templates(objects).values():
        [volume] = [each for each in pod["spec"]["volumes"] if each.get("secret", {}).get("secretName") == "keys"]
        [mount] = [m for m in pod["spec"]["containers"][0]["volumeMounts"] if m["name"] == volume["name"]]
        assert "subPath" not in mount  # such a mount is never updated, and a key could not be revoked
        assert mount["readOnly"]
        assert [f"{mount['mountPath']}/{item['path']}" for item in volume["secret"]["items"]] == [path]
    without = serve_config(rendered(EXAMPLES[0]))
    assert without["grpc_options"]["enable_reflection"] is True
    assert "api_keys" not in without["applications"][0]["args"]["server"]


def front_of(pod: dict[str, Any]) -> dict[str, Any]:
    [front] = [each for each in pod["spec"]["initContainers"] if each["name"] == "front"]
    return front


@each_example
def test_clients_reach_the_front_of_each_pod_and_it_reaches_serve(values: Path) -> None:
    objects, server = rendered(values), settings_of(values).server
    config = serve_config(objects)
    behind = [config["http_options"]["port"], config["grpc_options"]["port"]]
    service = rayservice(objects)["spec"]["serveService"]["spec"]["ports"]
    assert [(each["port"], each["targetPort"]) for each in service] == [
        (server.port, server.port),
        (server.grpc_port, server.grpc_port),
    ]
    for pod in pod_templates(objects).values():
        front = front_of(pod)
        assert front["restartPolicy"] == "Always", "it ends after Ray's container"
        named = [*front["ports"], *pod["spec"]["containers"][0]["ports"]]
        ports = {each["name"]: each["containerPort"] for each in named}
        assert (ports["front"], ports["front-grpc"]) == (server.port, server.grpc_port)
        assert [ports["serve"], ports["serve-grpc"]] == behind == [int(each) for each in front["args"][1:]]
        given = ServerSettings(**json.loads(front["args"][0]))
        assert (given.host, given.port, given.grpc_port) == ("0.0.0.0", server.port, server.grpc_port)
        assert given.request_timeout_s == server.request_timeout_s


def test_the_front_of_a_pod_starts_as_the_chart_says() -> None:
    """With other ports, since those of the chart may be taken here."""
    port, grpc_port = free_ports(2)
    front = front_of(pod_templates(rendered(EXAMPLES[0]))["head"])
    own = {"host": "127.0.0.1", "port": port, "grpc_port": grpc_port}
    settings = json.dumps(json.loads(front["args"][0]) | own)
    with subprocess.Popen([sys.executable, *front["command"][1:], settings, *front["args"][1:]]) as running:
        try:
            until = time.monotonic() + 60
            while time.monotonic() < until:
                with suppress(requests.ConnectionError):
                    answer = requests.get(f"http://127.0.0.1:{port}/health", timeout=10)
                    break
            assert answer.status_code == 503, "Serve is not there"
        finally:
            running.terminate()
        assert running.wait(20) == 0


def test_the_secret_with_the_certificate_is_the_front_s(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text("tlsSecret: certificate\npodMonitor: {enabled: true}")
    objects = rendered(values)
    for pod in pod_templates(objects).values():
        [volume] = [v for v in pod["spec"]["volumes"] if v.get("secret", {}).get("secretName") == "certificate"]
        front = front_of(pod)
        [mount] = [each for each in front["volumeMounts"] if each["name"] == volume["name"]]
        assert "subPath" not in mount, "such a mount is never updated"
        given = json.loads(front["args"][0])
        assert given["certificate"] == f"{mount['mountPath']}/tls.crt"
        assert given["certificate_key"] == f"{mount['mountPath']}/tls.key"
        assert volume["name"] not in {each["name"] for each in pod["spec"]["containers"][0]["volumeMounts"]}
    [monitor] = [each for each in of_kind(objects, "PodMonitor") if each["metadata"]["name"].endswith("-server")]
    assert monitor["spec"]["podMetricsEndpoints"][0]["scheme"] == "https"


def test_variables_that_are_given_are_those_of_all_pods(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    secret = {"secretKeyRef": {"name": "collector", "key": "headers"}}
    given = [
        {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector:4318"},
        {"name": "OTEL_EXPORTER_OTLP_HEADERS", "valueFrom": secret},
    ]
    values.write_text(yaml.safe_dump({"workers": {"separate": True}, "env": given}))
    pods = pod_templates(rendered(values))
    assert len(pods) > 2
    for pod in pods.values():
        assert pod["spec"]["containers"][0]["env"][-2:] == given
    assert not [name for name in environment(pod_templates(rendered(EXAMPLES[0]))["head"]) if "OTEL" in name]


@each_example
def test_a_variable_that_is_given_takes_the_place_of_the_chart_s(values: Path) -> None:
    """Kubernetes refuses two of the same name in a RayService."""
    own = ("HF_HUB_OFFLINE", "RAY_SERVE_ENABLE_HA_PROXY", "HF_TOKEN", "HF_HUB_CACHE")
    given = ",".join(f"env[{index}].name={name}" for index, name in enumerate(own))
    texts = ",".join(f"env[{index}].value=0" for index in range(len(own)))
    model = "settings.target.model=org/name,models.hub.tokenSecret=x,models.claim.name=,models.claim.size=9Gi"
    templates = pod_templates(rendered(values, "--set", given, "--set-string", texts, "--set", model))
    for name, pod in templates.items():
        containers = {each["name"]: each for each in (*pod["spec"]["initContainers"], *pod["spec"]["containers"])}
        assert ("download-models" in containers) == (name == "head")
        for each in containers.values():
            names = [variable["name"] for variable in each.get("env", [])]
            assert len(names) == len(set(names))
        assert environment(pod)["HF_HUB_OFFLINE"] == environment(pod)["RAY_SERVE_ENABLE_HA_PROXY"] == "0"


def seen_by_kuberay(values: Path, *more: str) -> dict[str, Any]:
    """What KubeRay compares when it decides whether pods must change: the cluster without the numbers of its pods."""
    cluster: dict[str, Any] = rayservice(rendered(values, *more))["spec"]["rayClusterConfig"]
    for group in cluster["workerGroupSpecs"]:
        for number in ("replicas", "minReplicas", "maxReplicas"):
            del group[number]
    return cluster


@pytest.mark.parametrize("separate", ["false", "true"])
def test_a_change_of_replicas_alone_reaches_the_pods_of_tiers(separate: str) -> None:
    def seen(setting: str) -> tuple[Any, Any]:
        more = ("--set", f"workers.separate={separate}", "--set", f"settings.server.{setting}")
        cluster = seen_by_kuberay(CHART / "examples" / "cpu-demo.yaml", *more)
        return cluster["headGroupSpec"], cluster["workerGroupSpecs"]

    head, workers = seen("replicas.min=1")
    for numbers in ("replicas.max=2", "replicas.min=2,settings.server.replicas.max=2"):
        other_head, others = seen(numbers)
        assert all(one != other for one, other in zip(workers, others, strict=True))
        assert {**head["template"]["spec"], "automountServiceAccountToken": None} == {
            **other_head["template"]["spec"],
            "automountServiceAccountToken": None,
        }
    assert (head, workers) == seen("max_queued=3"), "what Serve alone applies changes no pod"


def test_the_demo_fits_a_node_of_two_cores() -> None:
    """Beside what Kubernetes itself runs there, which requests less than a core."""
    values = CHART / "examples" / "cpu-demo.yaml"
    pods = [pod["spec"] for pod in pod_templates(rendered(values)).values()]
    requested = [each["resources"]["requests"]["cpu"] for pod in pods for each in pod["containers"]]
    requested += [front_of({"spec": pod})["resources"]["requests"]["cpu"] for pod in pods]
    assert sum(int(each.removesuffix("m")) if each.endswith("m") else 1000 * int(each) for each in requested) <= 900
    head = pods[0]["containers"][0]["resources"]["limits"]
    assert float(head["cpu"]) >= 2, "with less, Ray's own processes start too slowly for it"


def test_grpc_is_http_2_from_end_to_end(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    given: dict[str, Any] = {"ingress": {"host": "a.example", "grpcHost": "b.example", "tlsSecret": "edge"}}
    without = of_kind(rendered(None, "--set", "ingress.host=a.example,ingress.grpcHost=b.example"), "Ingress")
    assert [each["spec"].get("tls") for each in without] == [None, [{"hosts": ["b.example"]}]]
    key = "nginx.ingress.kubernetes.io/backend-protocol"
    for secret, spoken, protocol in (("", ["HTTP", "GRPC"], "kubernetes.io/h2c"), ("pods", ["HTTPS", "GRPCS"], None)):
        values.write_text(yaml.safe_dump(given | {"tlsSecret": secret}))
        objects = rendered(values)
        doors = of_kind(objects, "Ingress")
        assert [each["metadata"]["annotations"][key] for each in doors] == spoken
        assert all(each["spec"]["tls"] for each in doors)
        ports = rayservice(objects)["spec"]["serveService"]["spec"]["ports"]
        assert {each["name"]: each.get("appProtocol") for each in ports} == {"serve": None, "serve-grpc": protocol}


def test_one_value_lets_ray_s_state_outlive_the_head(tmp_path: Path) -> None:
    objects = rendered(None, "--set", "redis.create=true")
    [service], [deployment], [secret], [claim] = (
        of_kind(objects, kind) for kind in ("Service", "Deployment", "Secret", "PersistentVolumeClaim")
    )
    options = rayservice(objects)["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    pod = deployment["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    [policy] = of_kind(objects, "NetworkPolicy")
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    [redis] = pod["spec"]["containers"]
    where = {"name": secret["metadata"]["name"], "key": next(iter(secret["data"]))}
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"] == where
    assert redis["env"] == [{"name": "REDIS_PASSWORD", "valueFrom": {"secretKeyRef": where}}]
    [volume] = pod["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    own = rendered(None, "--set", "redis.create=true,redis.passwordSecret=mine")
    assert not of_kind(own, "Secret")
    options = rayservice(own)["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"]["name"] == "mine"
    assert "gcsFaultToleranceOptions" not in rayservice(rendered())["spec"]["rayClusterConfig"]


def test_volumes_and_containers_that_are_given_are_in_all_pods_of_ray() -> None:
    given = yaml.safe_load(ALL.read_text())
    for pod in pod_templates(rendered(ALL)).values():
        [first] = [each for each in pod["spec"]["initContainers"] if each["name"] == "first"]
        assert first == given["initContainers"][0]
        assert pod["spec"]["volumes"][-1:] == given["extraVolumes"]
        assert pod["spec"]["containers"][0]["volumeMounts"][-1:] == given["extraVolumeMounts"]


WRONG = {
    "two Redis": ('redis: {create: true, address: "a:6379"}', "redis.address"),
    "extraVolumes": ("extraVolumes: [{emptyDir: {}}]", "extraVolumes"),
    "initContainers": ("initContainers: [{image: x}]", "initContainers"),
    "settings.server.certificate": ("settings: {server: {certificate: /a, certificate_key: /b}}", "tlsSecret"),
    "settings.server.port of Serve": ("settings: {server: {port: 28000}}", "settings.server.port"),
    "settings.server.api_keys": ("settings: {server: {api_keys: /a/file}}", "apiKeysSecret"),
    "settings.target.offload": ("settings: {target: {offload: cloud}}", "offload"),
    "settings.targets": ("settings: {targets: {model: x}}", "targets"),
    "settings.retrieval.budget": ("settings: {retrieval: {budget: many}}", "budget"),
    "settings.server.port": ("settings: {server: {port: 70000}}", "port"),
    "settings.placement.target.gpus": ("settings: {device: cuda}", "settings.placement"),
    "settings.device": ("settings: {placement: {target: {gpus: 1}}}", "settings.device"),
    "settings.placement.cpu_latency_us": ("settings: {placement: {cpu_latency_us: 0}}", "cpuLatencyResource"),
    "settings.server.replicas.min": ("settings: {server: {replicas: {min: 3, max: 2}}}", "replicas.min"),
    "workers.separate": ("workers: {separate: some}", "workers.separate"),
    "models.image": ("models: {claim: {name: m}, image: {reference: r}}", "models.image.reference"),
    "models.claim": ("models: {claim: {name: m, size: 1Gi}}", "models.claim.size"),
    "service.type": ("service: {type: External}", "service.type"),
    "upgrade": ("upgrade: Never", "upgrade"),
    "ingress.grpcHost": ("ingress: {host: a.b, grpcHost: a.b}", "ingress.grpcHost"),
    "settings.server.grpc_port": ("settings: {server: {port: 9000}}", "settings.server.grpc_port"),
    "settings.server.port of Ray": ("settings: {server: {port: 8080}}", "settings.server.port"),
    "settings.placement.strategy": ("settings: {placement: {strategy: STRICT_SPREAD}}", "settings.placement.strategy"),
    "offload_path": ("settings: {target: {offload: disk, offload_path: here}}", "settings.target.offload_path"),
    "settings": ("settings: null", "settings is required"),
    "workers": ("workers: null", "workers is required"),
    "workers.pod": ("workers: {pod: null}", "workers: pod is required"),
    "head.resources": ("head: {resources: null}", "head: resources is required"),
    "podMonitor": ("podMonitor: null", "podMonitor is required"),
    "podMonitor.authorization": ("{apiKeysSecret: keys, podMonitor: {enabled: true}}", "podMonitor.authorization"),
    "env": ("env: [{name: A, text: b}]", "text"),
    "image.tags": ("image: {tags: latest}", "tags"),
    "fullnameOverride": ("fullnameOverride: Upper", "fullnameOverride"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_values_are_refused_by_name(wrong: str, tmp_path: Path) -> None:
    text, named = WRONG[wrong]
    values = tmp_path / "values.yaml"
    values.write_text(text)
    done = template(values)
    assert done.returncode != 0
    assert named in done.stderr, done.stderr


def test_chart_and_image_have_the_version_of_the_project() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
    for values, variant in (
        (CHART / "examples" / "cpu-demo.yaml", "cpu"),
        (CHART / "examples" / "one-gpu.yaml", "cuda"),
    ):
        for pod in pod_templates(rendered(values)).values():
            assert pod["spec"]["containers"][0]["image"] == f"triforce-serve:{__version__}-{variant}"
