"""The evicting cache of H2O (Zhang et al. 2023, arXiv 2306.14048): of each KV head it keeps the tokens that have had
the most attention, the heavy hitters, and the latest tokens. Memory is fixed; what is evicted is forgotten.

A sequence evicts at fixed positions of its text, every `slack` tokens, where all queries since the last are counted
from a buffer, and no pass forwards settled tokens on both sides of one. So what it keeps is a function of its text
alone: a token that is taken back has its query overwritten. Keys stay rotated to their positions in the text.
docs/decisions/0023-heavy-hitters.md
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from triforce_core.attention import Kernel, Scoring
from triforce_core.kv.base import Batch, Held, KVGeometry, Lack, Placement
from triforce_core.kv.fixed import FixedKV
from triforce_core.kv.ranges import Range, sliced
from triforce_core.messages import SequenceSpec

QUERIES = 64  # counted together, which bounds the memory of their scores


@dataclass(frozen=True, slots=True)
class HeavyHitterSettings:
    """Sizes in tokens."""

    budget: int = 1024  # kept when tokens are evicted
    heavy: int = 512  # of them, heavy hitters; the others are the latest tokens. The paper divides evenly.
    slack: int = 256  # tokens between evictions, by which the cache grows beyond its budget
    lag: int = 0  # last tokens of a statement, before its drafts, that the level above may still take back
    most_drafts: int = 0  # most drafts in a statement

    @property
    def recent(self) -> int:
        return self.budget - self.heavy

    @property
    def fresh(self) -> int:
        """The most tokens since the last eviction. Their queries are not counted yet."""
        return self.slack + self.lag + self.most_drafts

    @property
    def capacity(self) -> int:
        return self.budget + self.fresh

    def bytes_each(self, geometry: KVGeometry, num_heads: int) -> int:
        """The bytes of one sequence: its KV and its buffer of queries, of `num_heads` heads."""
        query_bytes = geometry.num_layers * num_heads * geometry.head_dim * geometry.dtype.itemsize
        return self.capacity * geometry.bytes_per_token + self.fresh * query_bytes


@dataclass(slots=True)
class HeavyHeld(Held):
    """The first slots hold the kept tokens, whose positions are below `start`. The next slots hold all later tokens."""

    start: int = 0  # the position of the last eviction
    positions: Tensor = field(default_factory=lambda: torch.empty(0))  # [layers, kv_heads, kept] int32, ascending
    # The attention that each kept token has had: summed over queries and over the query heads of a KV head, same shape.
    attention: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def num_kept(self) -> int:
        return self.positions.shape[-1]


class HeavyHitterKV(FixedKV):
    """A sequence owns `settings.capacity` slots.

    A text that diverges below the last eviction is forwarded again from its first token, because what was evicted
    cannot be restored.
    """

    held: dict[int, HeavyHeld]  # type: ignore[assignment]

    def __init__(
        self,
        geometry: KVGeometry,
        max_sequences: int,
        settings: HeavyHitterSettings,
        kernel: Kernel,
        num_heads: int,
        most_tokens: float = math.inf,
    ) -> None:
        """`num_heads`: query heads of the model. `most_tokens`: the model's positions; longer texts are refused."""
        super().__init__(geometry, max_sequences, settings.capacity, kernel)
        self.settings, self.most_tokens = settings, most_tokens
        shape = num_heads, max_sequences * settings.fresh, geometry.head_dim
        # Per layer: the queries of tokens since the last eviction, by sequence and then by position.
        self.queries = [
            torch.empty(shape, dtype=geometry.dtype, device=geometry.device) for _ in range(geometry.num_layers)
        ]
        self.scale = 0.0  # of the model's attention; every pass sets it

    def new_held(self, spec: SequenceSpec, ranges: list[Range]) -> HeavyHeld:
        held = HeavyHeld(spec, ranges=ranges)
        self._empty(held)
        return held

    def _empty(self, held: HeavyHeld) -> None:
        shape, device = (self.geometry.num_layers, self.geometry.num_kv_heads, 0), self.geometry.device
        held.start = held.cached = 0
        held.positions = torch.empty(shape, dtype=torch.int32, device=device)
        held.attention = torch.empty(shape, dtype=torch.float32, device=device)

    def place(self, sequence_id: int, held: Held, keep: int, end: int, num_sampled: int) -> Placement | Lack:
        assert isinstance(held, HeavyHeld)
        if end > self.most_tokens:
            held.cached = min(held.cached, keep)
            return Lack()
        if keep < held.start:
            self._empty(held)
            keep = 0
        settled = end - held.drafted - self.settings.lag
        point = held.start + self.settings.slack
        if min(settled, keep) >= point and end > point:
            self._evict(held, point)
            # Tokens from `point` on may have been forwarded before this eviction. Without drafts they would have come
            # after it, so they are forwarded again.
            keep, point = point, point + self.settings.slack
        stop = min(end, point) if settled >= point else end
        assert stop - held.start <= self.settings.fresh, "a statement has no more drafts than the settings say"
        held.cached = stop
        before = held.num_kept - held.start  # position + before: the slot of a token since the last eviction
        return Placement(
            tokens=held.tokens[keep:stop],
            positions=range(keep, stop),
            writes=sliced(held.ranges, before + keep, before + stop),
            visible=sliced(held.ranges, 0, before + keep),
            left=end - stop,
        )

    # -- device side ---------------------------------------------------------------------------------------------------

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, batch: Batch) -> Tensor:
        self.scale = scoring.scale
        for row in batch.rows:
            held, positions = self.held[row.sequence_id], row.placed.positions
            own = self._queries_of(held, positions.start, positions.stop)
            self.queries[layer][:, own] = query[:, row.first : row.stop]
        return super().attend(layer, query, keys, values, scoring, batch)

    def _queries_of(self, held: HeavyHeld, start: int, stop: int) -> slice:
        """Where the queries of tokens [start, stop) are; they must not be below the last eviction."""
        [(first_slot, _)] = held.ranges
        first = first_slot // self.slots_each * self.settings.fresh - held.start
        return slice(first + start, first + stop)

    @torch.inference_mode()
    def _evict(self, held: HeavyHeld, point: int) -> None:
        """Count the queries below the position `point`. For each KV head, keep `budget` of the tokens below `point`:
        the latest tokens, and the other tokens that have had the most attention. The kept tokens move to the first
        slots, in the order of the text.
        """
        [(first, _)] = held.ranges
        kept, size = held.num_kept, held.num_kept + point - held.start
        own, queries = slice(first, first + size), self._queries_of(held, held.start, point)
        attention, positions = [], []
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            sums = attention_sums(self.queries[layer][:, queries], keys[:, own], self.scale)
            sums[:, :kept] += held.attention[layer]
            fresh = torch.arange(held.start, point, dtype=torch.int32, device=sums.device).expand(len(sums), -1)
            places = torch.cat([held.positions[layer], fresh], dim=1)
            if size > self.settings.budget:
                chosen = self._chosen(sums)
                sums, places = sums.gather(1, chosen), places.gather(1, chosen)
                rows = chosen.unsqueeze(-1).expand(-1, -1, keys.shape[-1])
                for pool in (keys, values):
                    pool[:, first : first + self.settings.budget] = pool[:, own].gather(1, rows)
            attention.append(sums)
            positions.append(places)
        held.start, held.attention, held.positions = point, torch.stack(attention), torch.stack(positions)

    def _chosen(self, sums: Tensor) -> Tensor:
        """The tokens to keep, [kv_heads, budget] int64, ascending, by the attention that all have had, `sums`."""
        first_recent = sums.shape[1] - self.settings.recent
        heavy = sums[:, :first_recent].topk(self.settings.heavy, dim=1).indices
        recent = torch.arange(first_recent, sums.shape[1], device=sums.device).expand(len(sums), -1)
        return torch.cat([heavy.sort(1).values, recent], dim=1)


def attention_sums(query: Tensor, keys: Tensor, scale: float) -> Tensor:
    """The attention that each key has from the queries, [kv_heads, keys] float32: summed over them and over the query
    heads of a KV head.

    query [heads, queries, head_dim] and keys [kv_heads, keys, head_dim]: the last keys belong to the tokens of the
    queries, one per query. No query sees keys after its own token's.
    """
    kv_heads, num_keys, _ = keys.shape
    before, grouped, wide = num_keys - query.shape[1], query.unflatten(0, (kv_heads, -1)), keys.float().mT
    sums = torch.zeros(kv_heads, num_keys, dtype=torch.float32, device=keys.device)
    for some in grouped.split(QUERIES, dim=2):
        _, group, queries, _ = some.shape
        seen = before + queries
        scores = some.float().flatten(1, 2) @ wide[:, :, :seen] * scale
        future = torch.ones(queries, queries, dtype=torch.bool, device=keys.device).triu(1)
        scores[:, :, before:].masked_fill_(future.repeat(group, 1), -torch.inf)
        sums[:, :seen] += scores.softmax(-1).sum(1)
        before = seen
    return sums
