"""Links over mutual TLS, by Ray's own variables."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from actors.links import RemoteProposer
from tests.certificates import certify
from tests.unit.actors.test_admission import calls, either, link_server
from tests.unit.actors.test_target_server import Counting, NoProposer, check, served
from triforce_core.errors import UnavailableError


@pytest.fixture(autouse=True)
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """One for both ends and, as it signs itself, also their authority's."""
    found, key = certify(tmp_path)
    variables = {"RAY_USE_TLS": "1", "RAY_TLS_SERVER_CERT": found, "RAY_TLS_SERVER_KEY": key, "RAY_TLS_CA_CERT": found}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    return found.read_bytes()


def test_a_link() -> None:
    with link_server() as server:
        link = RemoteProposer(lambda: server.address, timeout_s=5.0)
        assert link.wait_ready(10.0)
        link.close()


def test_a_target() -> None:
    with served(NoProposer(), Counting()) as (_, server):
        check(server.address)


@pytest.mark.parametrize("kind", ["link", "target"])
def test_a_caller_without_a_certificate_is_refused(kind: str, certificate: bytes) -> None:
    """Even with the secret, and in the clear or without a certificate of its own."""
    with either(kind) as server:
        for channel in (
            grpc.insecure_channel(server.address.place),
            grpc.secure_channel(server.address.place, grpc.ssl_channel_credentials(certificate)),
        ):
            with channel:
                for call in calls(kind, channel, server.address.metadata):
                    with pytest.raises(grpc.RpcError) as refusal:
                        call()
                    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
        assert server.admission.refused == 0, "it did not come so far"


def test_a_server_of_another_authority_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(NoProposer(), Counting()) as (_, server):
        other = tmp_path / "other"
        other.mkdir()
        monkeypatch.setenv("RAY_TLS_CA_CERT", str(certify(other)[0]))
        with pytest.raises(UnavailableError):
            check(server.address)
