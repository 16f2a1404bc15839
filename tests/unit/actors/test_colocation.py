"""What `placement.colocate: auto` is, and what is said about few cores."""

from typing import Any

import pytest
import torch

from actors import colocation
from actors.colocation import arranged, why
from triforce_core.config import load_settings


def of(cores: int, gpus: int, monkeypatch: pytest.MonkeyPatch, **given: Any) -> tuple[str, list[float]]:
    """What auto is on a machine with these, and the GPUs of each process."""
    monkeypatch.setattr(colocation, "usable_cores", lambda: cores)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    given["placement"] = {"colocate": "auto"} | given.get("placement", {})
    found = arranged(load_settings(**given)).placement
    return found.colocate, [group.gpus for group in found.groups]


@pytest.mark.parametrize(
    ("cores", "gpus", "given", "expected"),
    [
        (1, 0, {}, ("all", [0])),
        (2, 8, {}, ("all", [0])),
        (3, 0, {}, ("none", [0, 0, 0])),
        (4, 0, {"server": {"replicas": {"max": 2}}}, ("all", [0])),
        (2, 1, {"device": "cuda"}, ("all", [1])),
        (2, 2, {"device": "cuda"}, ("draft_with_retrieval", [1, 1])),
        (2, 3, {"device": "cuda"}, ("none", [1, 1, 1])),
        (2, 0, {"placement": {"cpus": 0.5, "cpu_latency_us": 0}}, ("all", [0])),
    ],
)
def test_as_few_processes_as_suit_the_machine(
    cores: int, gpus: int, given: dict[str, Any], expected: tuple[str, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert of(cores, gpus, monkeypatch, **given) == expected


@pytest.mark.parametrize(
    "given",
    [
        {"placement": {"strategy": "SPREAD"}},
        {"placement": {"draft": {"cores": (1,)}}},
        {"placement": {"target": {"labels": {"zone": "a"}}}},
        {"speculation": {"micro_batches": 2}},
        {"target": {"tensor_parallel": 2}},
        {"device": "cuda:1"},
    ],
    ids=str,
)
def test_what_is_said_explicitly_holds(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert of(1, 0, monkeypatch, **given)[0] == "none"
    explicit = load_settings(placement={"colocate": "none"})
    assert arranged(explicit) is explicit


def test_where_one_process_is_needed_auto_is_all() -> None:
    assert (
        load_settings(placement={"colocate": "auto"}, deterministic=True, max_sequences=1).placement.colocate == "all"
    )


def test_in_a_cluster_auto_is_none() -> None:
    """There nothing replaces it."""
    assert len(load_settings(placement={"colocate": "auto"}).placement.groups) == 3


@pytest.mark.parametrize(
    ("cores", "gpus", "given", "expected"),
    [
        (
            2,
            0,
            {},
            "cores for each replica: 2, on which 3 processes take turns; one may be faster: placement.colocate: all",
        ),
        (2, 0, {"placement": {"colocate": "all"}}, "cores for each replica: 2, too few for a process for each tier"),
        (
            4,
            0,
            {"placement": {"colocate": "all"}, "server": {"replicas": {"max": 2}}},
            "cores for each replica: 2, too few",
        ),
        (2, 0, {"placement": {"colocate": "draft_with_retrieval"}}, "cores for each replica: 2, too few"),
        (2, 1, {"device": "cuda", "placement": {"colocate": "all"}}, "GPUs for each replica: 1, too few"),
        (2, 1, {"device": "cuda"}, "GPUs for each replica: 1, on which 3 processes take turns"),
        (2, 3, {"device": "cuda"}, ""),
        (3, 0, {}, ""),
        (2, 0, {"placement": {"target": {"cores": [0]}}}, ""),
    ],
)
def test_few_cores_or_gpus_are_told(
    cores: int, gpus: int, given: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(colocation, "usable_cores", lambda: cores)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    found = why(load_settings(**given))
    assert found.startswith(expected)
    assert bool(found) == bool(expected)
