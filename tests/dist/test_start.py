"""Tier actors that cannot start. Nothing stays behind, and the actors can be started again."""

from __future__ import annotations

import gc
import threading
import time
import warnings
from typing import Any
from weakref import WeakSet

import pytest
from transformers import PreTrainedModel

from actors import tiers
from actors.admission import Address
from actors.tiers import DraftActor, RetrievalActor, TargetActor, TierActor
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import Settings, load_settings
from triforce_core.errors import UnavailableError
from triforce_core.speculation.leaf import Leaf

ELSEWHERE = "192.0.2.77"  # of no machine


def settings(colocate: str, host: str | None = None) -> Settings:
    return load_settings(
        dtype="float32", target={"kv_pool_tokens": 1000}, placement={"colocate": colocate}, server={"tier_host": host}
    )


def loaded_models() -> WeakSet[PreTrainedModel]:
    gc.collect()
    with warnings.catch_warnings(action="ignore"):  # torch warns even if its objects are only looked at
        return WeakSet(each for each in gc.get_objects() if isinstance(each, PreTrainedModel))


def statuses(actor: TierActor) -> dict[str, pb.TierStatus]:
    found = [pb.TierStatus.FromString(status) for status in actor.status()]
    return {status.tier: status for status in found}


@pytest.fixture
def no_draft_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(name: str) -> Address:
        raise UnavailableError("the draft tier is elsewhere")

    monkeypatch.setattr(tiers, "address_of", nowhere)
    monkeypatch.setattr(tiers, "CONNECT_TIMEOUT_S", 0.1)


@pytest.mark.ci
@pytest.mark.usefixtures("no_draft_tier")
@pytest.mark.parametrize(
    ("cls", "colocate", "below", "held"),
    [
        (DraftActor, "none", (), {"draft"}),
        (RetrievalActor, "none", ("pipeline-draft",), {"retrieval"}),
        (RetrievalActor, "draft_with_retrieval", (), {"retrieval", "draft"}),
        (TargetActor, "all", (), {"target", "retrieval", "draft"}),
    ],
    ids=["draft", "retrieval", "both", "all"],
)
def test_of_a_start_that_fails_nothing_stays(
    cls: type[TierActor], colocate: str, below: tuple[str, ...], held: set[str]
) -> None:
    actor: Any = cls(settings(colocate, ELSEWHERE), *below)
    threads, models = set(threading.enumerate()), loaded_models()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=ELSEWHERE):
            actor.start()
        until = time.monotonic() + 5
        while left := set(threading.enumerate()) - threads:
            assert time.monotonic() < until, left
            time.sleep(0.01)
        assert loaded_models() <= models
        assert statuses(actor).keys() == held
        assert not any(status.ready or status.address for status in statuses(actor).values())
    actor.settings = settings(colocate)
    try:
        address = actor.start()
        assert address.place.startswith("127.0.0.1:")
        assert actor.start() == address, "it is started once"
        assert loaded_models() > models
        assert statuses(actor).keys() == held
        assert all(status.ready and status.address == address.place for status in statuses(actor).values())
    finally:
        actor.server.stop(0.0)
        actor.undo.close()


def test_a_start_that_takes_long_is_not_waited_for_longer_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier above asks again and again: each call takes a thread of the actor's, of which there are few."""
    actor = DraftActor(settings("none"))
    go_on = threading.Event()
    monkeypatch.setattr(actor, "proposer", lambda: go_on.wait(30) and Leaf())
    loading = threading.Thread(target=actor.start)
    loading.start()
    while not actor.starting.locked():
        time.sleep(0.01)
    with pytest.raises(UnavailableError, match="the draft tier is still loading"):
        actor.start(0.1)
    assert not statuses(actor)["draft"].ready
    go_on.set()
    loading.join(10)
    assert actor.start(0.1) == actor.start()
    assert statuses(actor)["draft"].ready
    assert actor.server is not None
    actor.server.stop(0.0)
    actor.undo.close()


def test_models_are_loaded_by_a_thread_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP's helpers of the loading thread would be threads beyond the cores, and slow all passes down."""
    actor, loading = DraftActor(settings("none")), list[threading.Thread]()
    monkeypatch.setattr(actor, "proposer", lambda: loading.append(threading.current_thread()) or Leaf())
    actor.start()
    assert actor.server is not None
    try:
        assert [thread.is_alive() for thread in loading] == [False]
    finally:
        actor.server.stop(0.0)
        actor.undo.close()
