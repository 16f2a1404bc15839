"""The values of the Helm chart, as pydantic models, from which `python -m scripts.generate_chart` writes values.yaml,
values.schema.json and the table in the chart's README.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from triforce_core.config import Settings

Objects = list[dict[str, Any]]  # of the Kubernetes API, passed on as they are


class Values(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Image(Values):
    repository: str = Field(
        "triforce-serve", min_length=1, description="where the image is; deploy/Dockerfile builds it, for your registry"
    )
    tag: str = Field(
        "", description="the image's tag; by default the chart's appVersion with -cpu or -cuda, as settings.device is"
    )
    pullPolicy: Literal["Always", "IfNotPresent", "Never"] = Field(
        "IfNotPresent", description="when the image is pulled"
    )
    pullSecrets: list[str] = Field([], description="names of secrets with which the image is pulled")


class Resources(Values):
    requests: dict[str, str | int | float] = Field({}, description="what the container asks for")
    limits: dict[str, str | int | float] = Field({}, description="what it may use at most")


class Pod(Values):
    """What the pods of one kind need, and on which nodes they run."""

    resources: Resources = Field(
        Resources(), description="CPU and memory; the GPUs that settings.placement reserves are added"
    )
    nodeSelector: dict[str, str] = Field({}, description="labels that a node must have for these pods")
    tolerations: Objects = Field([], description="taints of nodes that these pods tolerate")
    affinity: dict[str, Any] = Field({}, description="affinity of the pods, as in a pod's spec")
    topologySpreadConstraints: Objects = Field([], description="how these pods spread over zones and nodes")
    runtimeClassName: str = Field("", description="runtime class of these pods, such as nvidia")
    priorityClassName: str = Field("", description="priority class of these pods")
    annotations: dict[str, str] = Field({}, description="annotations of the pods")


def resources(cpu: str, memory: str, most: str) -> Resources:
    return Resources(requests={"cpu": cpu, "memory": memory}, limits={"cpu": most, "memory": memory})


class Head(Pod):
    """The pod of Ray's head. It runs no tier."""

    resources: Resources = Field(resources("500m", "4Gi", "2"), description="CPU and memory")


class WorkerPods(Pod):
    resources: Resources = Field(
        resources("2", "8Gi", "2"),
        description="CPU and memory of a pod; the GPUs that settings.placement reserves are added",
    )


class Workers(Values):
    """The pods that run the tiers. Their number follows from settings.server.replicas."""

    separate: bool = Field(
        False,
        description="false: each pod runs the whole pipeline of a replica; true: each process of"
        " settings.placement.colocate has pods of its own, which may be on nodes of other kinds",
    )
    pod: WorkerPods = Field(WorkerPods(), description="the pods of the tiers")
    target: Pod = Field(
        Pod(), description="if workers.separate is true: what differs from `pod` for the process with the target"
    )
    retrieval: Pod = Field(
        Pod(),
        description="if workers.separate is true: what differs from `pod` for the process with the retrieval tier",
    )
    draft: Pod = Field(
        Pod(), description="if workers.separate is true: what differs from `pod` for the draft tier's own process"
    )
    cpuLatencyResource: str = Field(
        "",
        description="an extended resource whose device plugin gives pods /dev/cpu_dma_latency, such as"
        " smarter-devices/cpu_dma_latency; needed where settings.placement.cpu_latency_us is set",
    )


class Claim(Values):
    name: str = Field("", description="an existing PersistentVolumeClaim; it is mounted read-only")
    size: str = Field("", description="the size of a claim to create, such as 200Gi; it is kept on uninstall")
    storageClass: str = Field("", description="its storage class; by default the cluster's")
    accessModes: list[Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany"]] = Field(
        ["ReadWriteMany"], min_length=1, description="its access modes; pods on several nodes need ReadWriteMany"
    )


class ModelImage(Values):
    reference: str = Field("", description="an OCI image that holds the models (Kubernetes 1.33 or later)")
    pullPolicy: Literal["Always", "IfNotPresent", "Never"] = Field(
        "IfNotPresent", description="when the image is pulled"
    )


class Hub(Values):
    tokenSecret: str = Field("", description="a secret with a token of the Hugging Face hub")
    tokenKey: str = Field("token", min_length=1, description="the key of the token in that secret")


class Models(Values):
    """Where models come from: a claim or an image, which is mounted at /models; and the hub."""

    claim: Claim = Claim()
    image: ModelImage = ModelImage()
    hub: Hub = Hub()


class Service(Values):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = Field("ClusterIP", description="the service's type")
    annotations: dict[str, str] = Field({}, description="annotations of the service")


class Ingress(Values):
    """An Ingress for HTTP and, if it has a host, one for gRPC. TLS ends there."""

    host: str = Field("", description="the host name of the HTTP API; empty: no Ingress")
    grpcHost: str = Field("", description="the host name of the gRPC API, which needs one of its own; empty: none")
    className: str = Field("", description="the ingress class; by default the cluster's")
    tlsSecret: str = Field("", description="a secret with the certificate for both hosts; empty: no TLS")
    annotations: dict[str, str] = Field({}, description="annotations of both Ingresses, such as those of cert-manager")
    grpcAnnotations: dict[str, str] = Field(
        {"nginx.ingress.kubernetes.io/backend-protocol": "GRPC"}, description="annotations of the Ingress for gRPC"
    )


class Gateway(Values):
    """Routes of the Gateway API instead of an Ingress. TLS ends at the gateway."""

    parentRefs: Objects = Field([], description="the gateways that the routes attach to; empty: no routes")
    hostnames: list[str] = Field([], description="host names of the HTTP API; by default the gateway's")
    grpcHostnames: list[str] = Field([], description="host names of the gRPC API; empty: no GRPCRoute")


class NetworkPolicy(Values):
    enabled: bool = Field(True, description="from outside only the APIs can be reached, not the tiers or Ray")
    clients: Objects = Field([], description="who may reach HTTP and gRPC, as peers of a NetworkPolicy; empty: anyone")
    scrapers: Objects = Field(
        [],
        description="used only where podMonitor is enabled: the peers that may reach Ray's metrics and, on the port of"
        " the HTTP API, the server's metrics; if empty, every pod of the cluster may reach Ray's metrics, and `clients`"
        " may reach the server's",
    )


class Redis(Values):
    address: str = Field(
        "", description="host:port of a Redis with which Ray's state survives the head; empty: it is lost with the head"
    )
    passwordSecret: str = Field("", description="a secret with its password")
    passwordKey: str = Field("password", min_length=1, description="the key of the password in that secret")


class Enabled(Values):
    enabled: bool = Field(True, description="whether the head and the targets have PodDisruptionBudgets")


class PodMonitor(Values):
    enabled: bool = Field(
        False, description="whether Prometheus (its operator) is to scrape Ray's metrics and the server's"
    )
    labels: dict[str, str] = Field({}, description="labels by which Prometheus finds it")
    authorization: dict[str, Any] = Field(
        {},
        description="the key for the server's metrics, as in a PodMonitor: {credentials: {name, key}} of a secret;"
        " needed where apiKeysSecret is set",
    )


class Dashboard(Values):
    enabled: bool = Field(False, description="whether there is a ConfigMap with a Grafana dashboard")
    labels: dict[str, str] = Field({"grafana_dashboard": "1"}, description="labels by which Grafana finds it")


class ServiceAccount(Values):
    create: bool = Field(True, description="false: `name` exists already")
    name: str = Field("", description="its name; by default the release's")
    annotations: dict[str, str] = Field({}, description="its annotations, such as those of a cloud's identities")


class ChartValues(Values):
    """Values of the chart."""

    settings: Settings = Field(
        Settings(), description="the settings of the server, as in triforce.yaml; what is not set has its default"
    )
    image: Image = Image()
    head: Head = Head()
    workers: Workers = Workers()
    models: Models = Models()
    service: Service = Service()
    ingress: Ingress = Ingress()
    gateway: Gateway = Gateway()
    networkPolicy: NetworkPolicy = NetworkPolicy()
    podDisruptionBudgets: Enabled = Enabled()
    podMonitor: PodMonitor = PodMonitor()
    dashboard: Dashboard = Dashboard()
    serviceAccount: ServiceAccount = ServiceAccount()
    redis: Redis = Redis()
    apiKeysSecret: str = Field(
        "",
        description="a secret whose key api_keys is the file of settings.server.api_keys: one API key a line, or"
        " `name: key`; a change is in force once Kubernetes has updated the file in the pods; empty: no key is needed",
    )
    rayTokenSecret: str = Field(
        "", description="a secret whose key auth_token is Ray's token; by default KubeRay creates one"
    )
    upgrade: Literal["NewCluster", "None"] = Field(
        "NewCluster",
        description="when pods must change: NewCluster starts new ones beside the old ones, which takes twice the GPUs,"
        " and moves the traffic over; None leaves the old ones as they are until they are deleted",
    )
    fullnameOverride: str = Field("", max_length=47, description="the name of all objects; by default the release's")
    # Set by Helm itself, for charts that this one is a part of.
    global_: dict[str, Any] = Field({}, alias="global", description="not used")
