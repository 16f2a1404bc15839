"""Snapshots that carry only changes alter no token. Where they are exact, no proposal is rejected because of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.exactness.cases import COVERING, PERFECT, Case, decode_plainly, engine_for, finish, random_prompts
from tests.stating import num_bytes
from triforce_core.kv.snapshot import Snapshot, SnapshotSink

NUM_TOKENS = 60


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
        self.events[f"bytes of {kind}"] += num_bytes(snapshot)
        self.sink.deliver(snapshot)


CASES = [case for case in COVERING if case.budget < 1024][::6]


@pytest.mark.parametrize("refresh_every", [None, 1, 5])
@pytest.mark.parametrize("case", [*CASES, pytest.param(PERFECT, marks=pytest.mark.ci)], ids=str)
def test_hand_overs_change_no_token(case: Case, refresh_every: int | None) -> None:
    """Snapshots are cut as often as the case says, or more often."""
    if refresh_every is not None:
        case = replace(case, refresh=(refresh_every, case.refresh[1]))
    text = random_prompts(case)
    requests = case.requests(NUM_TOKENS, text)
    engine, sent = engine_for(case, Counter(), requests), Counter[str]()
    engine.snapshots.sink = CountingSink(engine.snapshots.sink, sent)
    assert finish(engine, requests).tokens == decode_plainly(case, NUM_TOKENS, text)
    assert sent["whole"] > 0
    assert sent["changes"] + sent["additions"] > 5 or refresh_every is None
    refreshed = case.refresh[0] < NUM_TOKENS and case.chunk < 32  # so few chunks of 32 fit that they stay the same
    assert (sent["changes"] > 0) == refreshed
    if refreshed:
        size = {kind: sent[f"bytes of {kind}"] / sent[f"tokens of {kind}"] for kind in ("whole", "changes")}
        assert size["changes"] < size["whole"], "bytes for each token that the tier then holds"


@pytest.mark.parametrize("refresh_every", [1, 5])
def test_snapshots_of_everything_are_the_targets_kv(refresh_every: int) -> None:
    """The drafters are the target and see everything. All their proposals are accepted if what was sent is in its
    place.
    """
    case = replace(PERFECT, refresh=(refresh_every, 600))
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
    assert events["changes"] + events["additions"] > 40
