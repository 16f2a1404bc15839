"""How the texts of a pass are read in blocks of keys (attention/blocks.py): where the blocks lie, and which of them
several texts share. The result for a token depends on neither.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter

import torch
from torch import Tensor

from triforce_core.attention.base import Partial, Scoring
from triforce_core.attention.blocks import BLOCK, future, in_rows, merged, most_queries, of_heads, over_blocks, past
from triforce_core.kv.folds import MOST_QUERIES
from triforce_core.kv.ranges import Range, size_of, sliced


@dataclass(frozen=True, slots=True)
class Group:
    """Tokens of a pass that lie in one block of one text."""

    tokens: slice  # of the pass
    block: int  # the number of the block in the text
    first: int  # the index of the first of these tokens in the block
    own: list[Range]  # the slots of that block, at least up to the last of these tokens
    text: list[Range]  # the slots of the text
    # With a window: the number of the block in which the windows of all these tokens begin, and the index of the first
    # key that the first token sees there. None: they see all keys from the text's beginning.
    edge: tuple[int, int] | None = None

    @property
    def whole(self) -> range:
        """The numbers of the blocks that all these tokens see in full."""
        return range(self.edge[0] + 1 if self.edge else 0, self.block)

    @property
    def ends(self) -> list[list[Range]]:
        """The slots of the blocks that they see in part."""
        if self.edge is None or self.edge[0] == self.block:
            return [self.own]
        return [sliced(self.text, self.edge[0] * BLOCK, (self.edge[0] + 1) * BLOCK), self.own]


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks that are read in one call, for one group or for several whose texts share them."""

    first: int  # the number of the first of these blocks in the texts
    slots: tuple[Range, ...]  # one range of whole blocks, or the pieces of one block
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockReading:
    """How a pass reads the KV of its texts."""

    groups: list[Group]
    runs: list[Run]
    # By group and the first of its tokens that attend at once: all layers use the same masks.
    masks: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The number of keys read, relative to the number that would be read if each group read alone."""
        sizes = [(size_of([*run.slots]), len(run.groups)) for run in self.runs]
        seen = sum(keys * groups for keys, groups in sizes)
        return sum(keys for keys, _ in sizes) / seen if seen else 1.0


def groups_of(first: int, positions: range, text: list[Range], window: int | None = None) -> list[Group]:
    """The tokens of a pass from index `first` on, at these positions of a text that has these slots. Those behind the
    tokens must hold finite numbers. `window`: how many of the last tokens, itself included, a token sees.

    With a window, the tokens of a group also have the first block that they see in common, so that a token's result
    is merged of the same blocks whatever else is in the pass.
    """
    groups, edges = [], {positions.start, positions.stop}
    for change in (0,) if window is None else (0, window - 1):  # modulo the block, where another group begins
        edges.update(range(positions.start + (change - positions.start) % BLOCK, positions.stop, BLOCK))
    for start, stop in pairwise(sorted(edges)):
        block = start // BLOCK
        tokens = slice(first + start - positions.start, first + stop - positions.start)
        whole = sliced(text, block * BLOCK, (block + 1) * BLOCK)
        own = whole if is_view(whole) else sliced(text, block * BLOCK, stop)
        edge = divmod(start - window + 1, BLOCK) if window is not None and start >= window - 1 else None
        groups.append(Group(tokens, block, start - block * BLOCK, own, text, edge))
    return groups


def plan_blocks(groups: list[Group]) -> BlockReading:
    """Which blocks are read together. A group of many tokens reads alone, for the reason of `MOST_QUERIES`."""
    readers: dict[tuple[int, tuple[Range, ...], int], list[int]] = {}  # by number, slots, and who reads alone
    for index, group in enumerate(groups):
        alone = index if group.tokens.stop - group.tokens.start > MOST_QUERIES else -1
        for block in group.whole:
            slots = tuple(sliced(group.text, block * BLOCK, (block + 1) * BLOCK))
            readers.setdefault((block, slots, alone), []).append(index)
    latest: dict[tuple[int, ...], Run] = {}  # by who reads it
    runs: list[Run] = []
    for (block, slots, _), found in readers.items():
        run = Run(block, slots, tuple(found))
        last = latest.get(run.groups)
        if last is not None and follows(last, run):
            runs.remove(last)
            run = Run(last.first, ((last.slots[0][0], slots[0][1]),), run.groups)
        runs.append(run)
        latest[run.groups] = run
    return BlockReading(groups, runs)


def follows(last: Run, run: Run) -> bool:
    """Whether the blocks of the second lie right behind those of the first, in the texts and in the pool."""
    whole = len(last.slots) == len(run.slots) == 1 and last.slots[0][1] == run.slots[0][0]
    return whole and last.first + size_of([*last.slots]) // BLOCK == run.first


def attend_in_blocks(query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, reading: BlockReading) -> Tensor:
    """query [heads, tokens, head_dim]; keys and values [kv_heads, pool_tokens, head_dim], which hold the KV of the
    pass. Returns [tokens, heads, head_dim], with zeros for tokens of no group.
    """
    (heads, tokens, head_dim), kv_heads, scale = query.shape, len(keys), scoring.scale
    output = query.new_zeros(tokens, heads, head_dim)
    alone: list[list[Run]] = [[] for _ in reading.groups]
    together: list[list[tuple[int, Partial]]] = [[] for _ in reading.groups]
    for run in reading.runs:
        queries = sum(reading.groups[i].tokens.stop - reading.groups[i].tokens.start for i in run.groups)
        blocks_read = -(-size_of([*run.slots]) // BLOCK)
        if len(run.groups) == 1 or queries > most_queries(heads, head_dim, blocks_read, together=True):
            for index in run.groups:
                alone[index].append(run)
        else:
            found = over_shared(query, *blocks(keys, values, run.slots), scale, [reading.groups[i] for i in run.groups])
            for index, part in zip(run.groups, found, strict=True):
                together[index].append((run.first, part))
    for index, (group, runs, shared) in enumerate(zip(reading.groups, alone, together, strict=True)):
        step = max(MOST_QUERIES, most_queries(heads, head_dim, len(group.whole)))
        ends = [blocks(keys, values, slots) for slots in group.ends]
        for start in range(group.tokens.start, group.tokens.stop, step):
            some = slice(start, min(start + step, group.tokens.stop))
            queries = some.stop - start
            rows = in_rows(query[:, some], kv_heads)
            parts = [(run.first, over_blocks(rows, *blocks(keys, values, run.slots), scale)) for run in runs] + shared
            whole = [part for _, part in sorted(parts, key=itemgetter(0))]
            if (index, start) not in reading.masks:
                reading.masks[index, start] = masks_of(group, start, queries, rows)
            masked = zip(ends, reading.masks[index, start], strict=True)
            *edge, own = [over_blocks(rows, *end, scale, mask) for end, mask in masked]
            sinks = [
                in_rows(part.lse.unsqueeze(-1), kv_heads, query.dtype).squeeze(-1)[None]
                for part in scoring.sink(query[:, some])
            ]
            result = merged([*edge, *whole, own], sinks)
            output[some] = of_heads(result, heads, queries).transpose(0, 1)
    return output


def masks_of(group: Group, start: int, queries: int, rows: Tensor) -> list[Tensor]:
    """The masks of the blocks that the group sees in part, for its tokens from `start` of the pass on."""
    after = start - group.tokens.start
    own = future(group.first + after, queries, rows)
    if group.edge is None:
        return [own]
    number, first = group.edge
    edge = past(first + after, queries, rows)
    return [own + edge] if number == group.block else [edge, own]


def over_shared(query: Tensor, keys: Tensor, values: Tensor, scale: float, groups: list[Group]) -> list[Partial]:
    """Each group's result over blocks that all of these groups see, read once."""
    slices, kv_heads = [group.tokens for group in groups], keys.shape[1]
    queries = torch.cat([query[:, each] for each in slices], dim=1)
    found = over_blocks(in_rows(queries, kv_heads), keys, values, scale)
    outputs = of_heads(found.output, *queries.shape[:2])
    lses = of_heads(found.lse.unsqueeze(-1), *queries.shape[:2])
    counts = [each.stop - each.start for each in slices]
    pieces = zip(outputs.split(counts, dim=2), lses.split(counts, dim=2), strict=True)
    return [
        Partial(in_rows(output, kv_heads), in_rows(lse, kv_heads, output.dtype).squeeze(-1)) for output, lse in pieces
    ]


def is_view(slots: list[Range]) -> bool:
    """Whether whole blocks lie in one piece."""
    return len(slots) == 1 and size_of(slots) % BLOCK == 0


def blocks(keys: Tensor, values: Tensor, slots: Iterable[Range]) -> tuple[Tensor, Tensor]:
    """The keys and values of a run, [blocks, kv_heads, BLOCK, head_dim] each: a view, or if they lie in pieces a copy,
    with zeros behind the last slot.
    """
    found = [*slots]
    if is_view(found):
        one, other = (each[:, slice(*found[0])].unflatten(1, (-1, BLOCK)).transpose(0, 1) for each in (keys, values))
        return one, other
    copies = keys.new_zeros(2, 1, len(keys), BLOCK, keys.shape[-1])
    first = 0
    for start, stop in found:
        copies[0, 0, :, first : first + stop - start] = keys[:, start:stop]
        copies[1, 0, :, first : first + stop - start] = values[:, start:stop]
        first += stop - start
    return copies[0], copies[1]
