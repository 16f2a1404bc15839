"""A server with a certificate: clients over TLS, a certificate that changes under their streams, nothing in clear."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from openai import OpenAI

from deploy.front import RENEW_S
from tests.certificates import certify, name_of
from tests.serve.conftest import Server
from tests.serve.mortals import mortal
from tests.starting import LocalRay
from triforce_core.client import CallError, TriForceClient

Secured = tuple[Server, Path]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, local_ray: LocalRay) -> Iterator[Secured]:
    """A server, and the folder of its certificate, which signs itself."""
    local_ray.end()
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = certify(folder)
    with mortal(folder, certificate=str(certificate), certificate_key=str(key)) as server:
        yield server, folder


def test_clients_and_a_certificate_that_changes_under_their_streams(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, folder = secured
    first = (folder / "certificate.pem").read_bytes()
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "certificate.pem"))
    asked = {"prompt": "def main():", "max_tokens": 1000, "temperature": 0.0}
    openai = OpenAI(base_url=f"https://localhost:{server.port}/v1", api_key="none", max_retries=0)
    with TriForceClient(f"localhost:{server.grpc_port}", root_certificates=first, retries=0) as sdk:
        expected = sdk.generate(**asked).text  # type: ignore[arg-type]
        over_http = openai.completions.create(model="demo", stream=True, **asked)  # type: ignore[call-overload]
        over_grpc = sdk.stream(**asked)  # type: ignore[arg-type]
        texts = [next(over_http).choices[0].text], [next(over_grpc).text]
        certify(folder, "changed")
        until = time.monotonic() + 10 * RENEW_S
        while not name_of(server.port) == name_of(server.grpc_port) == "changed":
            assert time.monotonic() < until
            time.sleep(0.1)
        texts[0].extend(each.choices[0].text for each in over_http)
        texts[1].extend(each.text for each in over_grpc)
    assert ["".join(each) for each in texts] == [expected, expected]
    trusted = folder / "certificate.pem"
    assert requests.get(f"https://127.0.0.1:{server.port}/health", verify=str(trusted), timeout=10).status_code == 200
    with TriForceClient(f"127.0.0.1:{server.grpc_port}", root_certificates=trusted) as sdk:
        assert sdk.health()


def test_nothing_is_answered_in_clear_or_to_those_who_do_not_trust_it(secured: Secured) -> None:
    server, _ = secured
    with pytest.raises(requests.exceptions.SSLError):
        requests.get(f"https://127.0.0.1:{server.port}/health", timeout=10)
    for port in (server.port, server.grpc_port):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
            assert client.recv(1000) == b""
    with TriForceClient(f"127.0.0.1:{server.grpc_port}", retries=0) as sdk, pytest.raises(CallError):
        sdk.models()
