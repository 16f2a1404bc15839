"""The Ray Serve application, and `run`, which serves it on this machine alone.

Ray is imported only inside functions, because the environment variables that `run` sets must be set before the import.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from deploy import tracing
from deploy.checks import CHECKS, FRONT_END_CPUS, check_models
from deploy.front import LOOPBACK, Behind, before_local_serve, front
from deploy.ray_watch import ends_with_ray
from deploy.remains import nothing_remains
from triforce_core.config import Settings, load_settings
from triforce_core.errors import UnavailableError, require

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.config import RequestRouterConfig
    from ray.serve.handle import DeploymentHandle

    from triforce_core.engine.limits import Limits

APPLICATION = "triforce"
SPARE_CALLS = 64  # room for health and status calls, and for requests that the gateway refuses with its own error
UPSCALE_DELAY_S = 30.0  # overload for this long adds a replica; a shorter burst would end before one has started
LOOK_BACK_S = 11.0  # Serve requires more than its metrics' interval of 10 s
# Serve replaces a replica after three failures in a row. The check waits for nothing, so no answer means that the
# replica hangs.
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 2.0, 10.0
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on one machine only, Ray binds its own ports to the loopback
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # On a busy machine a proxy takes longer to start than Serve's 5 s; three checks later Serve would kill it.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # Ray gives its workers the niceness 15, with which any other busy process leaves the tiers a thirtieth of a core.
    "RAY_worker_niceness": "0",
    "SPT_NOENV": "1",  # titles that Ray gives to its processes do not overwrite the mark by which remains.py finds them
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",  # events pass between processes over gRPC, not as Ray objects
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deploy.serve_setup.middlewares",
    "TOKENIZERS_PARALLELISM": "false",
}
# On one machine. What Ray does ten times a second in each of its processes, to report on itself, took a quarter of a
# core where nothing was asked, and a pass on all cores waits for the thread that it interrupts.
# docs/decisions/0030-quiet-processes.md
QUIET = {
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
}
# Our code never blocks the event loop, so Serve needs no separate thread for user code and no separate loop for its
# router. Together with gRPC this cuts the CPU time per event to a third, and it also shortens the time to the first
# event.
ONE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}


# Limit in bytes for a message, between Serve's processes and at the public gRPC port. Between processes it is 4 MiB by
# default, and Serve's error for a longer prompt does not say why; at the port it is 2 GiB, which anyone could have the
# server read. `run` lowers the port's limit for models with shorter contexts.
PORT_LIMIT = "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"
MESSAGE_LIMITS = dict.fromkeys(("RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH", PORT_LIMIT), str(64 << 20))
ENVIRONMENT |= MESSAGE_LIMITS
ROUTED_TOKENS = 1 << 20  # least tokens of texts that the router remembers of each replica
BYTES_PER_TOKEN = 512  # of a message, in either direction: the longest usual token, or a token with 20 logprobs
LEAST_PORT_LIMIT = 8 << 20  # several outputs, each with logprobs, may be longer than the context


def build_app(args: dict[str, Any]) -> Application:
    """The application for the arguments in a Serve config, which are settings as in triforce.yaml."""
    return application_of(load_settings(None, **args))


def application_of(args: Settings, why: str = "") -> Application:
    """The application for these settings. `why`: for /status, as in `actors.colocation`; known on one machine."""
    from ray import serve

    from actors.placement import ENVIRONMENT as QUIET_MODELS
    from actors.placement import bundles, label_selectors
    from actors.precision import agreed
    from deploy.gateway import Gateway
    from deploy.keys import keys_of
    from deploy.replica import PipelineReplica

    args = agreed(args)
    limits = check_models(args)
    keys_of(args.server.api_keys)
    tracing.check()
    limits_here = {name: os.environ.get(name, limit) for name, limit in MESSAGE_LIMITS.items()}
    variables = {**QUIET_MODELS, **ONE_LOOP, **limits_here}
    options = {"num_cpus": FRONT_END_CPUS, "runtime_env": {"env_vars": variables}}
    logs = {"encoding": args.server.log.upper()}
    places = args.places
    pipeline: Any = serve.deployment(
        PipelineReplica,
        name="pipeline",
        ray_actor_options=options,
        placement_group_bundles=bundles(args, beside_target=FRONT_END_CPUS),
        placement_group_strategy=args.placement.strategy,
        placement_group_bundle_label_selector=label_selectors(args.placement),
        request_router_config=prefix_router(args, limits),
        max_ongoing_requests=places + SPARE_CALLS,
        max_constructor_retry_count=2,
        logging_config=logs,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=args.server.drain_s,
        **replicas(args),
    )
    gateway: Any = serve.deployment(
        serve.ingress()(Gateway),
        name="gateway",
        # Placed on a node for targets, because pods there have a proxy of Serve and live until their requests have
        # ended.
        ray_actor_options={**options, "label_selector": dict(args.placement.groups[0].labels)},
        max_ongoing_requests=2 * places + SPARE_CALLS,
        # outer limit; a short burst stays below it and gets the gateway's own error
        max_queued_requests=places + SPARE_CALLS,
        backpressure_config={"status_code": 429, "retry_after_s": 1},
        logging_config={**logs, "enable_access_log": False},  # the gateway logs each request itself
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=args.server.drain_s,
    )
    application: Application = gateway.bind(args, pipeline.bind(args), why)
    return application


def replicas(settings: Settings) -> dict[str, Any]:
    """The number of pipelines, as options of a Serve deployment."""
    wanted = settings.server.replicas
    if wanted.min == wanted.max:
        return {"num_replicas": wanted.min}
    return {
        "autoscaling_config": {
            "min_replicas": wanted.min,
            "max_replicas": wanted.max,
            # Serve counts waiting requests too: with this many requests a replica is full and none waits.
            "target_ongoing_requests": settings.max_sequences,
            "upscale_delay_s": UPSCALE_DELAY_S,
            "downscale_delay_s": wanted.downscale_delay_s,
            "look_back_period_s": max(LOOK_BACK_S, UPSCALE_DELAY_S),  # the load is averaged over this time
        }
    }


def prefix_router(settings: Settings, limits: Limits) -> RequestRouterConfig:
    """The router: to the replica that was sent most of the prefix, unless that is much busier than others."""
    from ray.serve.config import RequestRouterConfig

    from deploy.prefixes import BLOCK

    router: Any = "deploy.routing.PrefixRouter"
    # About what a replica holds, or more: its pool's size is measured where the target starts.
    capacity = max(limits.kv_pool_tokens, settings.max_sequences * limits.context_length, ROUTED_TOKENS) // BLOCK
    known = {"capacity": capacity, "busier_by": settings.max_sequences}
    return RequestRouterConfig(request_router_class=router, request_router_kwargs=known)


def run(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM, then let requests in flight finish and stop everything that was started.

    Raises `InvalidValueError` or a subclass before any tier is started; `UnavailableError` if the tiers do not start.
    """
    from actors.colocation import arranged
    from deploy.choices import fitted, line
    from deploy.directions import check_endpoint, directions, tiers_found
    from deploy.grpc_gate import KEYS
    from triforce_core.engine.limits import target_limits
    from triforce_core.models import generation
    from triforce_core.models.files import load_config
    from triforce_core.models.precision import resolved

    settings = arranged(resolved(settings))
    began = time.monotonic()
    port_limit_given = PORT_LIMIT in os.environ
    behind = before_local_serve()
    prepare_environment()  # before the check of the placement, which imports Ray
    for check in CHECKS.values():
        check(settings)
    given, settings = settings, fitted(settings)
    tell(line(given, settings))
    if defaults := generation.line(settings):
        tell(defaults)
    context = target_limits(load_config(settings.target.model, "target"), settings).context_length
    os.environ[KEYS] = settings.server.api_keys or ""
    lowered = max(LEAST_PORT_LIMIT, context * BYTES_PER_TOKEN)
    if not port_limit_given:
        os.environ[PORT_LIMIT] = str(min(lowered, int(MESSAGE_LIMITS[PORT_LIMIT])))
    try:
        # The handlers are set twice because ray.init installs its own.
        with (
            on_signals(interrupt),
            nothing_remains(),
            local_ray(settings) as logs,
            on_signals(interrupt),
            front(settings.server, behind, logs / "front.log"),
            application(settings, behind),
        ):
            check_endpoint(settings)
            took = time.monotonic() - began
            said = directions(settings, logs, tiers_found(settings))
            tell(f"ready after {took:.0f} s\n\n{said}\n")
            while True:
                signal.pause()
    except KeyboardInterrupt:
        tell("stopped")


def tell(text: str) -> None:
    print(text, flush=True)


@contextmanager
def on_signals(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> Iterator[None]:
    """Handle SIGINT and SIGTERM by `handler` inside the context, and restore the earlier handlers after it."""
    before = {each: signal.signal(each, handler) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, previous in before.items():
            signal.signal(each, previous)


def interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder for Ray's sockets and logs that only this user can reach. Ray gives its own to all, so it is within one
    of mode 0700. That is removed when the server was stopped, and stays, for its logs, when the server failed.
    """
    folder = Path(tempfile.mkdtemp(prefix="triforce-", dir=os.environ.get("RAY_TMPDIR") or "/tmp"))
    try:
        yield folder / "ray"
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except Exception:
        tell(f"Ray's logs stay in {folder}")
        raise


@contextmanager
def local_ray(settings: Settings) -> Iterator[Path]:
    """A private Ray on this machine, for this process and its children only. Yields the folder of its logs."""
    with private_folder() as folder, ray_in(folder, settings) as logs:
        yield logs


@contextmanager
def ray_in(folder: Path, settings: Settings) -> Iterator[Path]:
    prepare_environment()
    import ray

    tell("starting Ray")
    from actors.fit import misfit
    from actors.placement import bundles, nodes

    placement, copies = settings.placement, settings.server.replicas
    pipeline = bundles(settings, beside_target=FRONT_END_CPUS)
    cpus = math.ceil(FRONT_END_CPUS + copies.max * sum(bundle.get("CPU", 0.0) for bundle in pipeline))
    try:
        context: Any = ray.init(
            address="local",
            _temp_dir=str(folder),
            num_cpus=max(os.cpu_count() or 1, cpus),
            include_dashboard=False,
            namespace=APPLICATION,
            logging_level=logging.WARNING,
            log_to_driver=False,  # Serve's proxy prints a traceback for every client that disconnects
        )
    except Exception as error:  # Ray raises no class of its own, such as where its processes take too long to start
        raise UnavailableError(f"Ray did not start: {error}") from None
    try:
        logs = Path(context.address_info["session_dir"]) / "logs"
        with ends_with_ray(logs):
            reason = misfit(placement, pipeline, nodes(), copies.min)
            require(reason is None, "placement", placement.colocate, f"cannot be here: {reason}")
            yield logs
    finally:
        with on_signals(signal.SIG_IGN):  # an interrupted shutdown would leave processes behind
            ray.shutdown()


def prepare_environment() -> None:
    """Set the variables that Ray reads at import and hands on to its processes. Variables already set are kept.

    Raises `InvalidValueError` if they say that Ray asks for no token.
    """
    for name, value in (ENVIRONMENT | QUIET).items():
        os.environ.setdefault(name, value)
    if "ray" not in sys.modules:
        # Anyone who reaches Ray's ports can run code. A token known to our processes alone keeps others out.
        mode, rule = os.environ.setdefault("RAY_AUTH_MODE", "token"), "must be token, or unset: without it anyone can"
        require(mode.lower() == "token", "RAY_AUTH_MODE", mode, f"{rule} run code through Ray's ports")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


@contextmanager
def application(settings: Settings, behind: Behind) -> Iterator[None]:
    """The application on Ray Serve, ready inside the context; Serve's proxy listens where `behind` says. Raises
    `UnavailableError` if it does not start.
    """
    from ray import serve

    from actors.colocation import why
    from deploy.grpc_services import SERVICERS

    tell(f"starting the tiers ({settings.dtype}, {settings.device})")
    server = settings.server
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # in this process
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": LOOPBACK, "port": behind.http},
        grpc_options={
            "port": behind.grpc,
            "grpc_servicer_functions": SERVICERS,
            "enable_reflection": server.api_keys is None,  # the proxy answers it itself, without asking for a key
        },
    )
    try:
        handle = serve.run(application_of(settings, why(settings)), name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        raise UnavailableError(f"the tiers did not come up: {failure(error)}") from None
    try:
        yield
    finally:
        tell(f"stopping: requests in flight have {server.drain_s:g} s to end; Ctrl-C again stops at once")
        try:
            drain(handle, server.drain_s)
        except KeyboardInterrupt:
            tell("stopping at once")


def drain(handle: DeploymentHandle[Any], timeout_s: float) -> None:
    """Let requests in flight end, then delete the application. Requests that do not end in time end with Ray."""
    from ray import serve

    done = False
    with suppress(Exception):  # such as a gateway that is gone, or does not answer in time
        done = handle.drain.remote(timeout_s).result(timeout_s=timeout_s + 5)
    if done:
        serve.delete(APPLICATION)


def failure(error: RuntimeError) -> str:
    """The reason for a failed start: one of our own errors if the messages contain one, else their last line."""
    from ray import serve

    application = serve.status().applications.get(APPLICATION)
    messages = [each.message for each in application.deployments.values()] if application else []
    lines = [line for line in "\n".join([str(error), *messages]).splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("triforce_core.errors.")]
    return (ours or lines)[-1].removeprefix("triforce_core.errors.")
