"""The time of snapshots: cut whole, cut as changes to the last one, and installed in the retrieval tier."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial

from triforce_core.engine.engine import Engine, SnapshotSource
from triforce_core.engine.sequence import Sequence
from triforce_core.kv.base import Forward
from triforce_core.kv.retrieval import RetrievalKV
from triforce_core.kv.selectors import SELECTORS, Selector
from triforce_core.kv.snapshot import ChunkSettings, Snapshot
from triforce_tools.bench.peaks import synchronize
from triforce_tools.bench.stages import newest

TIMES = 2  # of each step, after one that is not counted


class Watch:
    """Stands between an engine and the caches of its process, and times what goes through. A snapshot is installed at
    once, as otherwise the retrieval tier's next pass would do.
    """

    def __init__(self, kv: SnapshotSource, sparse: RetrievalKV, sequences: list[Sequence]) -> None:
        self.kv, self.sparse, self.sequences = kv, sparse, {each.sequence_id: each for each in sequences}
        self.busy, self.confirmed, self.is_live = sparse.busy, sparse.confirmed, sparse.is_live
        self.ms: dict[str, list[float]] = defaultdict(list)
        self.replaced = 0.0  # the share of chunks that the last changes replaced

    def timed(self, step: str, run: Callable[[], object]) -> None:
        synchronize(self.sparse.geometry.device)
        began = time.perf_counter()
        run()
        synchronize(self.sparse.geometry.device)
        self.ms[step].append(1e3 * (time.perf_counter() - began))

    def cut(
        self, sequence_id: int, position: int, chunks: ChunkSettings, selector: Selector, base: int = 0
    ) -> Snapshot:
        found: list[Snapshot] = []
        cut = partial(self.kv.cut, sequence_id, position, chunks, selector, base)
        self.timed("changes" if base else "whole", lambda: found.append(cut()))
        if changes := found[0].changes:
            layers, kv_heads, _, _ = found[0].keys.shape
            self.replaced = len(changes.places) / (layers * kv_heads * changes.kept // chunks.chunk)
        return found[0]

    def deliver(self, snapshot: Snapshot) -> None:
        self.sparse.take(snapshot)
        forward = Forward(newest(self.sequences[snapshot.sequence_id]), 1)
        step = "install_changes" if snapshot.changes else "install_whole"
        self.timed(step, lambda: self.sparse.prepare([forward]))


def cut_figures(engine: Engine, sparse: RetrievalKV, sequences: list[Sequence]) -> dict[str, float]:
    """Median milliseconds of each step: `whole`, `install_whole`, and `changes` and `install_changes` as the engine
    orders them while it decodes; and the share of chunks that the last changes replaced.
    """
    schedule, first = engine.snapshots, sequences[0]
    before, watch = (schedule.kv, schedule.sink), Watch(schedule.kv, sparse, sequences)
    schedule.kv = schedule.sink = watch
    selector, position = SELECTORS[first.spec.selector](), len(first.tokens) - 1
    for _ in range(TIMES + 1):
        watch.deliver(watch.cut(first.sequence_id, position, schedule.chunks, selector))
    while len(watch.ms.get("install_changes", ())) <= TIMES:
        assert engine.run_once(), "the sequences have room for some refreshes"
    schedule.kv, schedule.sink = before
    return {step: statistics.median(times[1:]) for step, times in watch.ms.items()} | {"replaced": watch.replaced}
