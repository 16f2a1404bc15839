"""Snapshots of changes, and exact KV between them, change no token; where they are exact, they reject none either."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace

import pytest

from tests.exactness.cases import COVERING, PERFECT, Case, decode_plainly, engine_for, finish, random_prompts
from triforce_core.config import Settings
from triforce_core.kv.snapshot import Snapshot, SnapshotSink

NUM_TOKENS = 60


@dataclass(frozen=True)
class Resynced(Case):
    """A case in which the target sends exact KV between snapshots."""

    resync_every: int | None = None

    @property
    def settings(self) -> Settings:
        settings = super().settings
        retrieval = settings.retrieval.model_copy(update={"resync_every": self.resync_every})
        return settings.model_copy(update={"retrieval": retrieval})


def resynced(case: Case, resync_every: int | None) -> Resynced:
    return Resynced(**{f.name: getattr(case, f.name) for f in fields(Case)}, resync_every=resync_every)


class CountingSink:
    """Counts what kinds of snapshots pass, and their bytes."""

    def __init__(self, sink: SnapshotSink, events: Counter[str]) -> None:
        self.sink, self.events = sink, events
        self.busy, self.confirmed = sink.busy, sink.confirmed

    def deliver(self, snapshot: Snapshot) -> None:
        changes = snapshot.changes
        kind = "whole" if changes is None else "changes" if len(changes.places) else "additions"
        self.events[kind] += 1
        self.events[f"tokens of {kind}"] += snapshot.num_tokens
        self.events[f"bytes of {kind}"] += snapshot.num_bytes
        self.sink.deliver(snapshot)


@pytest.mark.parametrize("resync_every", [None, 1, 5])
@pytest.mark.parametrize("case", [*[c for c in COVERING if c.budget < 1024][::6], PERFECT], ids=str)
def test_hand_overs_change_no_token(case: Case, resync_every: int | None) -> None:
    case = resynced(case, resync_every)
    text = random_prompts(case)
    requests = case.requests(NUM_TOKENS, text)
    engine, sent = engine_for(case, Counter(), requests), Counter[str]()
    engine.snapshots.sink = CountingSink(engine.snapshots.sink, sent)
    assert finish(engine, requests).tokens == decode_plainly(case, NUM_TOKENS, text)
    assert sent["whole"] > 0
    assert sent["additions"] > 5 or resync_every is None
    refreshed = case.refresh[0] < NUM_TOKENS and case.chunk < 32  # so few chunks of 32 fit that they stay the same
    assert (sent["changes"] > 0) == refreshed
    if refreshed:
        size = {kind: sent[f"bytes of {kind}"] / sent[f"tokens of {kind}"] for kind in ("whole", "changes")}
        assert size["changes"] < size["whole"], "bytes for each token that the tier then holds"


@pytest.mark.parametrize("resync_every", [1, 5])
def test_exact_kv_between_snapshots_is_the_targets(resync_every: int) -> None:
    """Drafters that are the target, and see everything, are always accepted: what was sent is in its place."""
    case = resynced(replace(PERFECT, refresh=(1000, 600)), resync_every)
    text = random_prompts(case)
    events: Counter[str] = Counter()
    requests = case.requests(150, text)
    engine = engine_for(case, events, requests)
    engine.snapshots.sink = CountingSink(engine.snapshots.sink, events)
    outcome = finish(engine, requests)
    for request, levels in zip(requests, outcome.tallies, strict=True):
        if len(request.prompt) + 150 <= case.budget:
            for level in levels[: sum(map(bool, request.lookaheads))]:
                assert level.rejected == 0
                assert level.accepted > 50
    assert events["additions"] > 40
