"""Reading once: which ranges of slots several rows of a pass attend to in one call. Plain integers, no tensors.

Sequences that share a document see the same slots. What a row sees besides, it attends to alone, and the results are
merged by their log-sum-exps. docs/decisions/0025-read-once.md
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter

from triforce_core.kv.ranges import Range, size_of, without

# Least keys of a range that is folded. Folding a smaller range saves nothing, because rows that read the same few keys
# find them in the processor's cache. And if the range continues into a row's own slots, the fold costs that row a
# second call.
LEAST_KEYS = 256
# Most queries of a row that takes part in a fold. Kernels work on blocks of queries, and each block reads all keys. A
# row with more queries fills whole blocks by itself, so its time goes into arithmetic and not into reading.
MOST_QUERIES = 32


@dataclass(frozen=True, slots=True)
class Fold:
    """A range that several rows see in full: their queries attend to it together."""

    keys: Range
    rows: tuple[int, ...]  # numbers of the rows in the pass, ascending


@dataclass(frozen=True, slots=True)
class Reading:
    """How the rows of a pass read the KV of earlier tokens. Each row reads each slot that it sees exactly once."""

    folds: list[Fold]
    alone: list[list[Range]]  # by row: the slots that it sees and that no fold reads for it

    @property
    def share(self) -> float:
        """The number of keys read, relative to the number that would be read if each row read alone."""
        alone = sum(map(size_of, self.alone))
        folded = [(fold.keys[1] - fold.keys[0], len(fold.rows)) for fold in self.folds]
        seen = alone + sum(keys * rows for keys, rows in folded)
        return (alone + sum(keys for keys, _ in folded)) / seen if seen else 1.0


def plan(visible: list[list[Range]], queries: list[int]) -> Reading:
    """How the rows of a pass read. By row, `visible` are the slots that it sees, `queries` how many queries it has."""
    able = {row: visible[row] for row, count in enumerate(queries) if count <= MOST_QUERIES}
    folds = [Fold(keys, rows) for keys, rows in overlaps(able) if len(rows) > 1 and keys[1] - keys[0] >= LEAST_KEYS]
    read: list[list[Range]] = [[] for _ in visible]
    for fold in folds:
        for row in fold.rows:
            read[row].append(fold.keys)
    return Reading(folds, [without(ranges, gone) for ranges, gone in zip(visible, read, strict=True)])


def overlaps(visible: Mapping[int, list[Range]]) -> list[tuple[Range, tuple[int, ...]]]:
    """The slots that any row sees, cut where the rows that see them change: ascending ranges, each with its rows."""
    edges = sorted((edge, row) for row, ranges in visible.items() for one in ranges for edge in one)
    rows: frozenset[int] = frozenset()
    changes: list[tuple[int, frozenset[int]]] = []  # a slot, and the rows that see the slots from it on
    for slot, there in groupby(edges, key=itemgetter(0)):
        before = rows
        # A row with one range that ends here and another that begins here occurs twice, so it stays as it was.
        for _, row in there:
            rows ^= {row}
        if rows != before:
            changes.append((slot, rows))
    return [((start, stop), tuple(sorted(seeing))) for (start, seeing), (stop, _) in pairwise(changes) if seeing]
