"""The text that `triforce serve` prints once it is ready: what runs where, and how to call it."""

from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import requests
import urllib3

from actors.colocation import why
from deploy.keys import own_headers
from deploy.service import served_name
from triforce_core.config import Settings
from triforce_core.errors import UnavailableError
from triforce_core.machine.cpu import cpu_summary

ENDPOINT_TIMEOUT_S = 30.0
Tiers = list[dict[str, Any]]  # as in the answer of /status


def base_url(settings: Settings) -> str:
    """The server's URL for clients on this machine."""
    host = "127.0.0.1" if settings.server.host in ("0.0.0.0", "::") else settings.server.host
    scheme = "http" if settings.server.certificate is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.server.port}"


def direct(settings: Settings) -> requests.Session:
    """A session for this machine, which ignores any proxy in the environment."""
    session = requests.Session()
    session.trust_env = False
    session.headers.update(own_headers(settings.server.api_keys))
    if settings.server.certificate is not None:  # the name in it need not be the loopback's
        session.verify = False
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
    return session


def check_endpoint(settings: Settings) -> None:
    """Request one streamed completion as a client would. Raises `UnavailableError` if none comes."""
    url = f"{base_url(settings)}/v1/completions"
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 2, "temperature": 0, "stream": True}
    try:
        answer = direct(settings).post(url, json=body, timeout=ENDPOINT_TIMEOUT_S)
    except requests.RequestException as error:
        raise UnavailableError(f"{url} does not answer: {error}") from None
    if answer.status_code != HTTPStatus.OK or not answer.text.endswith("data: [DONE]\n\n"):
        raise UnavailableError(f"{url} answers {answer.status_code}: {answer.text[:200]}")


def tiers_found(settings: Settings) -> Tiers:
    """The tiers as /status reports them; none if /status does not answer in time."""
    try:
        return list(direct(settings).get(f"{base_url(settings)}/status", timeout=10).json()["tiers"])
    except (requests.RequestException, KeyError, ValueError):
        return []


def longer_stall(settings: Settings, tiers: Tiers) -> dict[str, str]:
    """A row that says by how much prompts may delay other requests, if that is more than the settings allow."""
    max_stall_ms = settings.target.max_stall_ms
    least_ms = max((tier.get("least_stall_ms", 0.0) for tier in tiers), default=0.0)
    if max_stall_ms is None or least_ms <= max_stall_ms:
        return {}
    why = f"above target.max_stall_ms {max_stall_ms:g}, because half of a shorter pass would be fixed cost"
    return {"stall": f"in a full context a prompt delays other requests by {least_ms:.0f} ms a pass, {why}"}


def directions(settings: Settings, logs: Path, tiers: Tiers) -> str:
    """The text: what is served, how to call it, and where the logs are."""
    server, url, name = settings.server, base_url(settings), served_name(settings)
    host = url.partition("://")[2].rpartition(":")[0]
    keyed = server.api_keys is not None
    key = " -H 'authorization: Bearer <key>'" if keyed else ""
    trusting = f" --cacert {server.certificate}" if server.certificate else ""
    body = f'{{"model": "{name}", "prompt": "def main():", "max_tokens": 64, "stream": true}}'
    threads = {tier["tier"]: tier["threads"] for tier in tiers if tier.get("threads")}
    device = cpu_summary() if settings.device_type == "cpu" else settings.device
    rows = {
        "model": f"{name}, {settings.dtype}, on {device}",
        **({"LOSSY": settings.target.lossy} if settings.target.lossy else {}),
        "tiers": "; ".join(process(settings, group.tiers, threads) for group in reversed(settings.placement.groups)),
        **({"place": placed} if (placed := why(settings)) else {}),
        "page": f"{url}/ in a browser{', with any name and an API key as the password' if keyed else ''}",
        "HTTP": f"{url}/v1 (OpenAI's completions), {url}/health, {url}/status",
        "gRPC": f"{host}:{server.grpc_port} (triforce_core.client)",
        "try": f"curl -N{trusting} {url}/v1/completions{key} -H 'content-type: application/json' -d '{body}'",
        "logs": str(logs),
        **longer_stall(settings, tiers),
        "stop": "Ctrl-C",
    }
    return "\n".join(f"  {label:5}  {text}" for label, text in rows.items())


def process(settings: Settings, tiers: tuple[str, ...], threads: Mapping[str, int]) -> str:
    """One process of a pipeline as text: its tiers, each with its threads, and the cores that it is restricted to."""
    named = [f"{tier} ({plural(threads[tier], 'thread')})" if tier in threads else tier for tier in tiers]
    [group] = [group for group in settings.placement.groups if group.tiers == tiers]
    if settings.target.lossy:
        named = named[:1]  # nothing drafts
    cores = "" if group.cores is None else f" on cores {', '.join(map(str, group.cores))}"
    return " + ".join(named) + cores


def plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
