"""The KV cache: one pool of slots per layer. Sequences own ranges of slots; all policies share one attention path. The
host prepares a pass with lists and integers; the device then writes KV and attends.

A policy is two methods: `slots_for` returns how many slots a new sequence gets; `place` decides which tokens of a span
are forwarded, at which positions, into which slots, and which slots they see.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from triforce_core.attention import Kernel, Partial, Scoring, merge, over_tree, tree_mask
from triforce_core.kv.folds import Fold, Reading, plan
from triforce_core.kv.in_blocks import BlockReading
from triforce_core.kv.ranges import Range, RangeAllocator
from triforce_core.messages import SequenceSpec, Span, Tree, agreement

NO_TREE = Tree((), ())


@dataclass(frozen=True, slots=True)
class Windows:
    """Sliding windows: in these layers a token sees the last `size` tokens alone, itself included."""

    size: int = 0
    layers: frozenset[int] = frozenset()

    def of(self, layer: int) -> int | None:
        return self.size if layer in self.layers else None


NO_WINDOWS = Windows()


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The shape of one model's KV."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    windows: Windows = NO_WINDOWS

    @property
    def whole_layers(self) -> list[int]:
        """The layers without a window, ascending."""
        return [layer for layer in range(self.num_layers) if layer not in self.windows.layers]

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def new_pool(self, pool_tokens: int, layers: int | None = None) -> Tensor:
        """A new pool for all layers, or some, [layers, 2, kv_heads, pool_tokens, head_dim]: keys, then values."""
        layers = self.num_layers if layers is None else layers
        shape = (layers, 2, self.num_kv_heads, pool_tokens, self.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Forward:
    """One sequence's part of a pass: bring its KV up to `span`, with logits for its last `num_sampled` tokens."""

    span: Span
    num_sampled: int  # 0: no logits are needed
    num_drafted: int = 0  # how many of its last tokens are drafts, which the caller may take back
    # Tokens that follow the span, for this pass alone: what is forwarded next overwrites their KV. They count in
    # `num_sampled`, as the last.
    tree: Tree = NO_TREE


@dataclass(slots=True)
class Held:
    """A tier's state of one sequence: the `tokens` last stated, and which of their KV the policy keeps."""

    spec: SequenceSpec
    tokens: list[int] = field(default_factory=list)
    # KV is held below this position; a policy may keep only part of it. `place` counts what the prepared pass will
    # write. So after a pass that failed a tier releases its sequences, and a target ends with its engine.
    cached: int = 0
    # Slots of its tokens, in order. The sequence may share the first of these ranges with others.
    ranges: list[Range] = field(default_factory=list)
    unchanged: int = 0  # `tokens` below this position are as they were at the last draw (models/drawing.py)
    drafted: int = 0  # how many of the last statement's tokens are drafts, which may be taken back
    tree: Tree = NO_TREE  # of the last statement


@dataclass(frozen=True, slots=True)
class Placement:
    """A policy's decision for one sequence: the tokens to forward, and the slots that they write and see."""

    tokens: list[int]
    positions: range  # one per token, for the rotary embedding
    writes: list[Range]  # slots for the new KV, in order; one range if there is a tree
    visible: list[Range]  # slots of the earlier KV that all these tokens see
    left: int = 0  # last tokens of the statement that another pass must forward, after this one
    tree: Tree = NO_TREE  # follows the tokens
    # In layers with a window, the slots that all these tokens see, if the policy does not show these tokens all that
    # the others see. The full cache heeds windows by itself, and exactly.
    near: list[Range] | None = None

    @property
    def all_tokens(self) -> list[int]:
        return [*self.tokens, *self.tree.tokens]

    @property
    def all_positions(self) -> list[int]:
        return [*self.positions, *(self.positions.stop + depth for depth in self.tree.depths)]

    @property
    def count(self) -> int:
        return len(self.tokens) + len(self.tree.tokens)


@dataclass(frozen=True, slots=True)
class Lack:
    """Why a sequence could not be forwarded; its proposal reports this.

    With both defaults, neither tokens nor a snapshot would help: the pool has no room, the text is longer than the
    model's positions, or the statement asks for logits at positions that the snapshot covers, which cannot be forwarded
    any more (the statement is outdated).
    """

    missing_from: int | None = None
    snapshot_wanted: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a packed pass."""

    sequence_id: int
    first: int  # index of its first token in the packed batch
    placed: Placement
    num_sampled: int

    @property
    def stop(self) -> int:
        return self.first + self.placed.count


class Attending(Protocol):
    """The part of a cache that a model's attention calls."""

    def attend(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, batch: Batch
    ) -> Tensor: ...


@dataclass(slots=True)
class Batch:
    """A prepared forward pass. The model's attention hands it to `attend`."""

    cache: Attending
    rows: list[Row] = field(default_factory=list)
    lacking: dict[int, Lack] = field(default_factory=dict)  # by sequence id
    rest: list[Forward] = field(default_factory=list)  # for the next pass: what the policy cannot take in this one
    reading: Reading | BlockReading | None = None  # which rows read what together; None: each reads alone
    in_window: BlockReading | None = None  # as `reading`, in layers with a window
    # Of rows with trees, by `Row.first` and the number of keys: the same in all layers that see the same keys.
    masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.rows[-1].stop if self.rows else 0


class KVCache(ABC):
    """Holds KV for one model; subclasses are the policies."""

    @property
    def most_nodes(self) -> int:
        """The most tokens of a tree in a pass. Where there may be any, `place` heeds `Held.tree`."""
        return 0

    def __init__(
        self, geometry: KVGeometry, pool_tokens: int, kernel: Kernel, pools: Sequence[Tensor] | None = None
    ) -> None:
        """`pools`: as by `KVGeometry.new_pool`, of all layers in order. By default a new one, with a dump slot more."""
        self.pools = [geometry.new_pool(pool_tokens + 1)] if pools is None else pools
        self.keys = [layer[0] for pool in self.pools for layer in pool]  # per layer: [kv_heads, pool_tokens, head_dim]
        self.values = [layer[1] for pool in self.pools for layer in pool]
        self.geometry, self.kernel = geometry, kernel
        # The first slot behind the pool, where the pools made here have one: padding tokens of a pass are written to it
        # (shaped.py), and it is never read.
        self.dump_slot = pool_tokens
        self.allocator = RangeAllocator(pool_tokens)
        self.held: dict[int, Held] = {}

    def rows(self, layers: Tensor, kv_heads: Tensor, slots: Tensor) -> tuple[Tensor, int]:
        """The rows of these keys, int64, in a pool of all layers that is flattened to [rows, head_dim]; and how many
        rows behind its keys the values of a layer lie. The three broadcast to one shape.
        """
        heads, size, _ = self.keys[0].shape
        return (2 * layers * heads + kv_heads) * size + slots, heads * size

    # -- host side -----------------------------------------------------------------------------------------------------

    def prepare(self, forwards: list[Forward]) -> Batch:
        """Align every sequence to its span and lay out one packed pass over the missing tokens."""
        batch = Batch(self)
        for forward in forwards:
            sequence_id = forward.span.sequence_id
            placed = self._align(forward)
            if isinstance(placed, Lack):
                batch.lacking[sequence_id] = placed
                continue
            if placed.count:
                num_sampled = max(0, forward.num_sampled - placed.left)
                batch.rows.append(Row(sequence_id, batch.num_tokens, placed, num_sampled))
            if placed.left:
                batch.rest.append(replace(forward, num_sampled=min(forward.num_sampled, placed.left)))
        batch.reading = self._plan(batch.rows)
        return batch

    def _plan(self, rows: list[Row]) -> Reading | BlockReading | None:
        """Which rows read what together."""
        if len(rows) < 2:
            return None
        return plan([row.placed.visible for row in rows], [row.placed.count for row in rows])

    def _align(self, forward: Forward) -> Placement | Lack:
        """The align rule: keep the longest common prefix of the held and the stated tokens, forward the rest."""
        span = forward.span
        held = self.held.get(span.sequence_id)
        if held is None and span.start > 0:
            return Lack(missing_from=0)
        if held is None:
            assert span.spec is not None, "a span from 0 carries the spec"
            held = self.open(span.sequence_id, span.spec)
        if held is None:
            return Lack()
        if span.start > len(held.tokens):
            return Lack(missing_from=len(held.tokens))
        most = min(span.end, len(held.tokens)) - span.start
        common = span.start + agreement(held.tokens[span.start : span.end], 0, [*span.tokens], 0, most)
        held.tokens[common:] = span.tokens[common - span.start :]
        held.unchanged = min(held.unchanged, common)
        held.drafted, held.tree = forward.num_drafted, forward.tree
        # A token whose logits are needed is forwarded again even if its KV is held.
        num_sampled = max(0, forward.num_sampled - len(forward.tree.tokens))
        keep = min(held.cached, common, span.end - num_sampled)
        placed = self.place(span.sequence_id, held, keep, span.end, num_sampled)
        return replace(placed, tree=forward.tree) if forward.tree.tokens and isinstance(placed, Placement) else placed

    def open(self, sequence_id: int, spec: SequenceSpec) -> Held | None:
        """Allocate slots for a new sequence; None when the pool has too few."""
        ranges = self.allocator.allocate(self.slots_for(spec))
        if ranges is None:
            return None
        held = self.held[sequence_id] = self.new_held(spec, ranges)
        return held

    def release(self, sequence_id: int) -> None:
        """Forget a sequence and give its slots back; unknown ids are ignored."""
        if held := self.held.pop(sequence_id, None):
            self.allocator.free(held.ranges)

    @property
    def used_tokens(self) -> int:
        """How many slots sequences own."""
        return self.allocator.num_slots - self.allocator.num_free

    @property
    def kept_tokens(self) -> int:
        """How many slots only texts of earlier sequences hold, for later ones with the same prefix."""
        return 0

    @property
    def dropped_tokens(self) -> int:
        """How many tokens of such texts have been dropped so far."""
        return 0

    def spare(self, count: int) -> list[Range] | None:
        """Slots for a pass that leaves the cache as it is, to be freed after it; None when the pool has too few."""
        return self.allocator.allocate(count)

    def room(self, held: Held) -> int:
        """The most tokens that a statement of this sequence may have."""
        return held.spec.max_length

    def new_held(self, spec: SequenceSpec, ranges: list[Range]) -> Held:
        return Held(spec, ranges=ranges)

    @abstractmethod
    def slots_for(self, spec: SequenceSpec) -> int:
        """How many slots of the pool a new sequence gets by default. Only the full cache grows after that."""

    @abstractmethod
    def place(self, sequence_id: int, held: Held, keep: int, end: int, num_sampled: int) -> Placement | Lack:
        """Decide what to forward so that KV is held up to `end`, given that KV up to `keep` agrees with the span."""

    # -- device side ---------------------------------------------------------------------------------------------------

    def on_device(self, layer: int) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer that attention reads and writes, [kv_heads, pool_tokens, head_dim] each."""
        return self.keys[layer], self.values[layer]

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, batch: Batch) -> Tensor:
        """Store the new KV and attend. query [heads, tokens, head_dim], keys and values [kv_heads, tokens, head_dim].

        Returns [tokens, heads, head_dim]. The tokens of a row see its visible slots, and one another causally.
        """
        pool_keys, pool_values = self.on_device(layer)
        for row in batch.rows:
            first = row.first
            for start, stop in row.placed.writes:
                new = slice(first, first + stop - start)
                pool_keys[:, start:stop] = keys[:, new]
                pool_values[:, start:stop] = values[:, new]
                first = new.stop
        return self._attended(layer, query, (keys, values), (pool_keys, pool_values), scoring, batch)

    def _attended(
        self,
        layer: int,
        query: Tensor,
        new: tuple[Tensor, Tensor],
        pool: tuple[Tensor, Tensor],
        scoring: Scoring,
        batch: Batch,
    ) -> Tensor:
        """The result of `attend`, once the KV of the pass, `new`, is in the pool as well."""
        (keys, values), (pool_keys, pool_values) = new, pool
        output = query.new_empty(query.shape[1], query.shape[0], query.shape[2])
        assert not isinstance(batch.reading, BlockReading)
        reading, scale = batch.reading or Reading([], [row.placed.visible for row in batch.rows]), scoring.scale
        if layer in self.geometry.windows.layers:
            placed = [row.placed for row in batch.rows]
            reading = Reading([], [each.visible if each.near is None else each.near for each in placed])
        together = self._attend_together(query, pool_keys, pool_values, scale, batch.rows, reading.folds)
        for row, alone, parts in zip(batch.rows, reading.alone, together, strict=True):
            own = slice(row.first, row.stop)
            if row.placed.tree.tokens:
                *ranges, (start, stop) = joined(alone, row.placed.writes)
                near, near_values = pool_keys[:, start:stop], pool_values[:, start:stop]
                which = row.first, stop - start
                if which not in batch.masks:
                    batch.masks[which] = tree_mask(self.kernel, query[:, own], near, row.placed.tree.parents)
                mask = batch.masks[which]
                parts.append(over_tree(self.kernel, query[:, own], near, near_values, scale, mask))
            elif len(row.placed.writes) == 1:  # the last range ends with the new tokens: one causal call covers it
                *ranges, (start, stop) = joined(alone, row.placed.writes)
                parts.append(
                    self.kernel(query[:, own], pool_keys[:, start:stop], pool_values[:, start:stop], scale, True)
                )
            else:
                ranges = alone
                parts.append(self.kernel(query[:, own], keys[:, own], values[:, own], scale, True))
            parts += [
                self.kernel(query[:, own], pool_keys[:, start:stop], pool_values[:, start:stop], scale, False)
                for start, stop in ranges
            ]
            output[own] = merge(parts + scoring.sink(query[:, own])).transpose(0, 1)
        return output

    def _attend_together(
        self, query: Tensor, pool_keys: Tensor, pool_values: Tensor, scale: float, rows: list[Row], folds: list[Fold]
    ) -> list[list[Partial]]:
        """Attend to each folded range in one call; returns each row's results."""
        parts: list[list[Partial]] = [[] for _ in rows]
        for fold in folds:
            start, stop = fold.keys
            queries = torch.cat([query[:, rows[i].first : rows[i].stop] for i in fold.rows], dim=1)
            found = self.kernel(queries, pool_keys[:, start:stop], pool_values[:, start:stop], scale, False)
            counts = [rows[i].stop - rows[i].first for i in fold.rows]
            pieces = zip(found.output.split(counts, dim=1), found.lse.split(counts, dim=1), strict=True)
            for i, (output, lse) in zip(fold.rows, pieces, strict=True):
                parts[i].append(Partial(output, lse))
        return parts


def joined(ranges: list[Range], more: list[Range]) -> list[Range]:
    """`ranges` followed by `more`, with adjacent ranges merged."""
    out: list[Range] = []
    for start, stop in [*ranges, *more]:
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return out
