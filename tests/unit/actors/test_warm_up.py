"""The actors' side of the warm-up, over a pipeline that answers at once and notes what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from actors import warm_up as module
from actors.warm_up import warm_up
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import Settings, load_settings
from triforce_core.engine.limits import Limits

SETTINGS = load_settings(dtype="float32", retrieval={"refresh_every": 4})
ALL = {"target": 2, "retrieval": 2, "draft": 2}


class Remote:
    """A method of an actor handle."""

    def __init__(self, function: Any) -> None:
        self.function = function

    async def remote(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Actor:
    """All tiers in one. `kept`: the threads that its machine remembers."""

    def __init__(self, kept: dict[str, int]) -> None:
        self.kept, self.told = kept, list[tuple[dict[str, int], bool]]()
        self.limits = Remote(lambda: Limits(16384, 32768, 100))
        self.threads = Remote(lambda: {tier: (most, self.kept.get(tier)) for tier, most in ALL.items()})
        self.decode_on = Remote(self._decode_on)

    def _decode_on(self, threads: dict[str, int], *, keep: bool) -> None:
        self.told.append((threads, keep))
        if keep:
            self.kept = threads


class Recorder:
    """A pipeline. `now` goes on by the seconds of a round, which are fewer with one thread each."""

    def __init__(self, kept: dict[str, int]) -> None:
        self.actor, self.now, self.requests = Actor(kept), 0.0, list[pb.DecodeRequest]()
        self.actors = self

    @property
    def target(self) -> Actor:
        return self.actor

    def each(self) -> list[Actor]:
        return [self.actor]

    async def decode(self, request: pb.DecodeRequest) -> AsyncGenerator[pb.DecodeEvent, None]:
        self.requests.append(request)
        for _ in range(request.max_tokens // 9 + 1):
            threads = self.actor.told[-1][0] if self.actor.told else ALL
            self.now += 0.01 * sum(threads.values())
            yield pb.DecodeEvent(token_ids=[1] * 9)


def warmed(settings: Settings, kept: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> Recorder:
    pipeline = Recorder(kept)
    monkeypatch.setattr("triforce_core.engine.warm_up.time.perf_counter", lambda: pipeline.now)
    asyncio.run(warm_up(pipeline, settings))  # type: ignore[arg-type]
    return pipeline


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_what_is_best_is_found_used_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = warmed(SETTINGS, {}, monkeypatch)
    told = pipeline.actor.told
    assert told[0] == (ALL, False), "the first arrangement is set, too"
    assert told[-1] == ({"target": 1, "retrieval": 1, "draft": 1}, True)
    assert [keep for _, keep in told].count(True) == 1
    tried = [threads for threads, _ in told]
    assert {"target": 1, "retrieval": 2, "draft": 2} in tried, "the target first"
    assert len(pipeline.requests) == 5


def test_when_time_is_up_the_best_is_used_and_not_what_was_in_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit_s in (0.3, 0.5, 0.7, 0.9):
        monkeypatch.setattr("triforce_core.engine.warm_up.SEARCH_S", limit_s)
        pipeline = warmed(SETTINGS, {}, monkeypatch)
        assert pipeline.actor.told[-1] == (ALL, True), "no comparison had ended"


def test_what_is_known_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = warmed(SETTINGS, {"target": 2, "retrieval": 1, "draft": 1}, monkeypatch)
    assert pipeline.actor.told == []
    assert len(pipeline.requests) == 4
    partly = warmed(SETTINGS, {"target": 2}, monkeypatch)
    assert partly.actor.told[-1][1], "measured together, or not at all"


def test_threads_that_are_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(dtype="float32", threads=2)
    assert warmed(settings, {}, monkeypatch).actor.told == []


def test_a_warm_up_that_does_not_end_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Hangs(Recorder):
        async def decode(self, request: pb.DecodeRequest) -> AsyncGenerator[pb.DecodeEvent, None]:
            await asyncio.sleep(3600)
            yield pb.DecodeEvent()

    monkeypatch.setattr(module, "WARM_UP_S", 0.2)
    asyncio.run(warm_up(Hangs(ALL), SETTINGS))  # type: ignore[arg-type]
    assert "not warm after" in caplog.text
