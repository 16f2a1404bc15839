"""The time of a snapshot: cut whole, cut as changes to an earlier one, and installed in the retrieval tier."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from triforce_core.bench.peaks import synchronize
from triforce_core.bench.stages import newest
from triforce_core.engine.engine import Engine
from triforce_core.engine.sequence import Sequence
from triforce_core.kv.base import Forward
from triforce_core.kv.full import FullKV
from triforce_core.kv.retrieval import RetrievalKV
from triforce_core.kv.selectors import SELECTORS
from triforce_core.kv.snapshot import Snapshot

REPEATS = 3


@torch.inference_mode()
def cut_ms(engine: Engine, full: FullKV, sparse: RetrievalKV, sequence: Sequence) -> dict[str, float]:
    """Median milliseconds of each step: `whole`, `changes` (to a snapshot `refresh_every` tokens ago), `install_whole`
    and `install_changes`. Both tiers must hold the sequence.
    """
    schedule, device, taken = engine.snapshots, full.geometry.device, dict[str, list[float]]()
    selector, end = SELECTORS[sequence.spec.selector](), len(sequence.tokens) - 1

    def timed(step: str, run: Callable[[], Snapshot]) -> Snapshot:
        synchronize(device)
        began = time.perf_counter()
        found = run()
        synchronize(device)
        taken.setdefault(step, []).append(1e3 * (time.perf_counter() - began))
        return found

    def cut(position: int, base: int = 0) -> Snapshot:
        return full.cut(sequence.sequence_id, position, schedule.chunks, selector, base)

    def install(snapshot: Snapshot) -> Snapshot:
        assert sparse.take(snapshot), "it is newer than those before"
        sparse.prepare([Forward(newest(sequence), 1)])
        return snapshot

    for _ in range(REPEATS + 1):  # the first is a warm-up
        whole = timed("whole", lambda: cut(end))
        timed("install_whole", partial(install, whole))
        base = install(cut(max(1, end - schedule.refresh_every)))
        changes = timed("changes", partial(cut, end, base.version))
        timed("install_changes", partial(install, changes))
    return {step: statistics.median(times[1:]) for step, times in taken.items()}
