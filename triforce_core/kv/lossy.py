"""The target's caches that forget. The memory of a request does not grow with its length, but its tokens are no longer
the tokens that the model gives with its full cache. docs/eviction.md
"""

from collections.abc import Sequence
from math import ceil
from typing import NoReturn

from triforce_core.kv.base import Held, Placement
from triforce_core.kv.fixed import FixedKV
from triforce_core.kv.heavy_hitter import HeavyHitterKV
from triforce_core.kv.prefix_tree import Cursor
from triforce_core.kv.ranges import sliced
from triforce_core.kv.selectors import Selector
from triforce_core.kv.snapshot import ChunkSettings, Snapshot
from triforce_core.kv.streaming import StreamingHeld, StreamingKV
from triforce_core.messages import SequenceSpec


class LossyKV(FixedKV):
    """What the scheduler and the engine ask of the target's cache, where all sequences own the same number of slots."""

    def look(self, spec: SequenceSpec, text: list[int]) -> Cursor | None:
        return None

    def matched(self, cursor: Cursor) -> int:
        return 0

    def can_open(self, spec: SequenceSpec, tokens: int, cursor: Cursor | None = None) -> bool:
        return self.allocator.num_free >= self.slots_each

    def open(
        self, sequence_id: int, spec: SequenceSpec, tokens: int | None = None, text: Sequence[int] = ()
    ) -> Held | None:
        return super().open(sequence_id, spec)

    def grow(self, sequence_id: int, tokens: int) -> bool:
        """A sequence never needs more slots than it has."""
        return True

    def keys_after(self, tokens: int) -> int:
        return min(tokens, self.slots_each)

    def hemmed_in(self, sequence_id: int) -> bool:
        return False

    # As source and sink of snapshots: there are none, because no tier below takes part.

    def cut(
        self, sequence_id: int, position: int, chunks: ChunkSettings, selector: Selector, base: int = 0
    ) -> NoReturn:
        raise AssertionError("requests that would need a snapshot are refused")

    def deliver(self, snapshot: Snapshot) -> NoReturn:
        raise AssertionError("requests that would need a snapshot are refused")

    def busy(self, sequence_id: int) -> bool:
        return True

    def confirmed(self, sequence_id: int) -> int:
        return 0


class LossyHeavyHitterKV(LossyKV, HeavyHitterKV):
    """H2O."""


class LossyStreamingKV(LossyKV, StreamingKV):
    """StreamingLLM. The draft tier's window moves when it is full. The window here moves at fixed positions of the
    text, every `slack` tokens, so that the output depends neither on chunks nor on other requests.

    Prompt tokens whose logits are not asked for are only forwarded if they are in the last window.
    """

    @property
    def most_nodes(self) -> int:
        return 0  # the target verifies no trees

    def place(self, sequence_id: int, held: Held, keep: int, end: int, num_sampled: int) -> Placement:
        assert isinstance(held, StreamingHeld)
        # A pass that samples nothing forwards nothing. The next pass that samples forwards all tokens of its window.
        if not num_sampled:
            held.cached = keep
            return Placement(tokens=[], positions=range(0), writes=[], visible=[])
        start = self._window_start(end - num_sampled + 1)
        stop = min(end, start + self.settings.window + self.settings.slack)  # the tokens that see this window
        sinks, tokens = self.settings.sinks, held.tokens
        num_sinks = min(keep, sinks)
        if start == held.window_start and keep >= start:
            kept, new = sinks + keep - start, tokens[keep:stop]
        else:
            kept, new = num_sinks, tokens[num_sinks:sinks] + tokens[start:stop]
        held.window_start, held.cached = start, stop
        return Placement(
            tokens=new,
            positions=range(kept, kept + len(new)),
            writes=sliced(held.ranges, kept, kept + len(new)),
            visible=sliced(held.ranges, 0, kept),
            left=end - stop,
        )

    def _window_start(self, end: int) -> int:
        """Where the window starts for the last token of a text of `end` tokens."""
        beyond = max(0, end - self.settings.capacity)
        return self.settings.sinks + ceil(beyond / self.settings.slack) * self.settings.slack
