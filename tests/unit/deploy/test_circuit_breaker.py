"""Which replicas requests avoid, and that the errors that say so cross processes."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from deploy import circuit_breaker
from deploy.circuit_breaker import MOST_FINGERPRINTS, Avoid, CircuitBreaker
from deploy.errors import OtherFingerprintError, ReplicaError
from deploy.routing import allowed
from triforce_core.errors import UnavailableError


def replicas(*names: str) -> list[Any]:
    return [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in names]


def names(found: list[Any]) -> list[str]:
    return [each.replica_id.unique_id for each in found]


def test_who_refused_a_fingerprint_is_not_asked_for_it_again() -> None:
    found = CircuitBreaker()
    found.failed(OtherFingerprintError("it is another", "new"), "fp_1")
    assert found.avoid("fp_1") == Avoid(frozenset({"new"}), frozenset())
    assert found.avoid("") == found.avoid("fp_2") == Avoid()
    assert names(allowed(replicas("old", "new"), found.avoid("fp_1"))) == ["old"]
    assert names(allowed(replicas("new"), found.avoid("fp_1"))) == ["new"], "the router needs one to ask"
    assert names(allowed(replicas("old", "new"), found.avoid(""))) == ["old", "new"]


def test_who_has_just_failed_rests_while_there_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    found = CircuitBreaker()
    found.failed(ReplicaError("it is gone", "a"), "")
    found.failed(UnavailableError("nobody knows where"), "")
    assert names(allowed(replicas("a", "b"), found.avoid("fp_1"))) == ["b"]
    assert names(allowed(replicas("a"), found.avoid("fp_1"))) == ["a"]
    monkeypatch.setattr(circuit_breaker, "REST_S", 0.0)
    found.failed(ReplicaError("it is gone", "a"), "")
    assert found.avoid("") == Avoid()


def test_claims_do_not_fill_the_memory() -> None:
    found = CircuitBreaker()
    for index in range(1000):
        found.failed(OtherFingerprintError("it is another", "a"), f"fp_{index}")
    assert len(found.refused) == MOST_FINGERPRINTS
    assert found.avoid("fp_999").unable == {"a"}


@pytest.mark.parametrize("kind", [ReplicaError, OtherFingerprintError])
def test_the_errors_cross_processes(kind: type[Any]) -> None:
    found = pickle.loads(pickle.dumps(kind("it is gone", "a")))
    assert (type(found), str(found), found.replica) == (kind, "it is gone", "a")
