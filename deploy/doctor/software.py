"""Checks of what is installed and what is running: packages, Ray, ports."""

from __future__ import annotations

import os
import platform
import socket
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import psutil

from deploy.app import check_ports
from deploy.doctor.finding import Finding, note, ok, problem
from triforce_core.config import Settings
from triforce_core.errors import InvalidValueError

PROJECT = "triforce-serve"
SHOWN = ("torch", "transformers", "ray", "grpcio")
NEEDED, IF_THERE = ("", "server"), ("gpu", "quantization")  # extras; those of the second kind may be missing
REINSTALL = "install the versions that were tested: make, in a clone; elsewhere pip install -U 'triforce-serve[server]'"
HAPROXY_CONFIG = "/tmp/haproxy-serve/haproxy.cfg"  # Ray Serve writes it into a subfolder of this folder
HAPROXY_PORTS = {"RAY_SERVE_HAPROXY_STATS_PORT": 8404, "RAY_SERVE_HAPROXY_METRICS_PORT": 9101}


def packages(settings: Settings) -> Finding:
    """Whether the installed versions are within the ranges of pyproject.toml."""
    from packaging.requirements import Requirement

    wrong, checked = [], 0
    try:
        declared = [Requirement(line) for line in metadata.requires(PROJECT) or ()]
    except metadata.PackageNotFoundError:
        return note(f"{PROJECT} runs without being installed, so its requirements are unknown", REINSTALL)
    for each in declared:
        extras = [extra for extra in NEEDED + IF_THERE if each.marker is None or each.marker.evaluate({"extra": extra})]
        version = installed(each.name)
        if not extras or (version is None and not set(extras) & set(NEEDED)):
            continue
        checked += 1
        if version is None:
            wrong.append(f"{each.name} is missing")
        elif not each.specifier.contains(version, prereleases=True):
            wrong.append(f"{each.name} {version} is not {each.specifier}")
    if wrong:
        return problem("; ".join(wrong), REINSTALL)
    main = ", ".join(f"{name} {installed(name)}" for name in SHOWN)
    return ok(f"Python {platform.python_version()}, {main}; all {checked} are in the tested ranges")


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def ray(settings: Settings) -> Finding:
    """Whether Ray can be imported, and whether an earlier server left its HAProxy behind."""
    import ray
    from ray import serve  # noqa: F401  # needs more packages than ray itself

    found = ray.__version__
    if left := orphaned_haproxies():
        pids = " ".join(map(str, left))
        advice = f"kill {pids}; end servers by Ctrl-C or SIGTERM, since SIGKILL may leave this behind"
        return problem(f"{found}; HAProxy is left from a server that was killed, and holds its ports", advice)
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
        for variable, default in HAPROXY_PORTS.items():
            port = int(os.environ.get(variable, default))
            if is_taken(port):
                found = f"{found}; HAProxy's port {port} is taken{by_whom(port)}"
                return problem(found, f"end that process, or set {variable} to a free port")
    return ok(f"{found}; no HAProxy is left from an earlier server")


def orphaned_haproxies() -> list[int]:
    """The ids of HAProxy processes that Ray Serve started and that no process of Ray owns any more."""
    config, found = Path(os.environ.get("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC", HAPROXY_CONFIG)), []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            files = [Path(part) for part in process.cmdline() if part.endswith(config.name)]
            if not any(file.is_relative_to(config.parent) for file in files):
                continue
            parent = process.parent()
            owner = parent.cmdline() if parent else []
            if not (owner and owner[0].startswith("ray::")):
                found.append(process.pid)
    return found


def ports(settings: Settings) -> Finding:
    """Whether the ports of the two APIs are free."""
    server = settings.server
    try:
        check_ports(settings)
    except InvalidValueError as error:
        if error.field == "server.host":
            return problem(str(error), "set server.host to an address of this machine, or to 0.0.0.0 for all")
        option = " (--port)" if error.field == "server.port" else ""
        advice = f"end what listens there, or set {error.field}{option} to a free port"
        return problem(f"{error}{by_whom(int(str(error.value)))}", advice)
    return ok(f"{server.port} (HTTP) on {server.host} and {server.grpc_port} (gRPC) are free")


def is_taken(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return True
    return False


def by_whom(port: int) -> str:
    """` by <name> (pid <id>)` of the process that listens on the port; empty if it is another user's."""
    with suppress(psutil.Error):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid is not None:
                return f" by {psutil.Process(each.pid).name()} (pid {each.pid})"
    return ""
