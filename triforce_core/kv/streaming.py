"""The draft tier's cache: attention sinks and a window of the last tokens (StreamingLLM, Xiao et al. 2023), at the
positions 0, 1, 2 … of a small cache. When it is full, the last `window` tokens are forwarded again directly after the
sinks: one small pass every `slack` tokens, exact for any rotary embedding. docs/decisions/0003-streaming-window.md
"""

from dataclasses import dataclass

from triforce_core.attention import Kernel
from triforce_core.kv.base import Held, KVGeometry, Placement
from triforce_core.kv.fixed import FixedKV
from triforce_core.kv.ranges import Range, sliced
from triforce_core.messages import SequenceSpec


@dataclass(frozen=True, slots=True)
class WindowSettings:
    """Sizes in tokens."""

    sinks: int = 4  # as in the paper; more sinks gain nothing
    window: int = 252
    slack: int = 128  # tokens by which the window may grow, drafted ones included, before it is moved

    @property
    def capacity(self) -> int:
        return self.sinks + self.window + self.slack


@dataclass(slots=True)
class StreamingHeld(Held):
    """KV is held for positions below `sinks` and from `window_start` to `cached`."""

    window_start: int = 0


class StreamingKV(FixedKV):
    """A sequence owns `settings.capacity` slots."""

    def __init__(self, geometry: KVGeometry, max_sequences: int, settings: WindowSettings, kernel: Kernel) -> None:
        super().__init__(geometry, max_sequences, settings.capacity, kernel)
        self.settings = settings

    @property
    def most_nodes(self) -> int:
        return self.settings.slack  # after a move of the window, no more slots are free

    def room_ahead(self, sequence_id: int) -> int:
        """How many tokens may follow the text, one after another, before the window must be moved."""
        held = self.held[sequence_id]
        assert isinstance(held, StreamingHeld)
        return self.settings.capacity - self.settings.sinks + held.window_start - len(held.tokens)

    def new_held(self, spec: SequenceSpec, ranges: list[Range]) -> StreamingHeld:
        return StreamingHeld(spec, ranges=ranges, window_start=self.settings.sinks)

    def place(self, sequence_id: int, held: Held, keep: int, end: int, num_sampled: int) -> Placement:
        assert isinstance(held, StreamingHeld)
        sinks, tokens = self.settings.sinks, held.tokens
        behind = end + len(held.tree.tokens)
        num_sinks = min(keep, sinks)  # sinks whose KV is held and valid
        contiguous = held.window_start == sinks
        if (keep < held.window_start and not contiguous) or sinks + behind - held.window_start > self.settings.capacity:
            held.window_start = max(sinks, end - max(self.settings.window, num_sampled))
            kept, new = num_sinks, tokens[num_sinks:sinks] + tokens[held.window_start : end]
        else:
            kept = keep if contiguous else sinks + keep - held.window_start
            new = tokens[keep:end]
        held.cached = end
        return Placement(
            tokens=new,
            positions=range(kept, kept + len(new)),
            writes=sliced(held.ranges, kept, kept + len(new) + len(held.tree.tokens)),
            visible=sliced(held.ranges, 0, kept),
        )
