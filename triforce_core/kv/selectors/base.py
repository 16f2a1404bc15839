"""What a selector is, and what it sees of a text."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

# keys [kv_heads, chunks, chunk, head_dim] → a landmark of each chunk, [kv_heads, chunks, …]. It depends on the keys of
# its chunk alone, so that it may be kept for as long as the chunk.
Landmark = Callable[[Tensor], Tensor]


class Chunks(Protocol):
    """One layer of a text, in chunks, at the cut of a snapshot. `count` chunks can be chosen; all lie before the recent
    window, which is always in the snapshot. Tensors are on the device that computes.
    """

    count: int
    kv_heads: int
    # [heads, rows, head_dim], of the last tokens before the cut. There are `num_queries` rows (fewer in a short text),
    # or one row if the selector's `num_queries` is None.
    queries: Tensor

    def landmarks(self, landmark: Landmark) -> Tensor:
        """The landmarks of the chunks, [kv_heads, count, …]; they are kept from one cut to the next."""
        ...

    def log_sums(self) -> Tensor:
        """Of each query the log-sum-exp of its attention logits over each chunk, [kv_heads, heads per KV head × rows,
        chunks] float32. The chunks of the recent window follow the `count` others; the last may be incomplete.
        """
        ...

    def mass(self) -> Tensor:
        """How much attention each chunk got from all queries before the cut, [kv_heads, count] float32. Only for
        requests whose selector has `num_queries` None.
        """
        ...


class Selector(Protocol):
    """Ranks the chunks of a text. It has no state and must be picklable, because it is sent to the other ranks."""

    @property
    def num_queries(self) -> int | None:
        """How many of the latest queries it needs; None: all, summed as the text grows (`Chunks.mass`)."""
        ...

    def scores(self, chunks: Chunks) -> Tensor:
        """[kv_heads, chunks.count] float32, higher for better. Query heads that share a KV head share one selection."""
        ...


def grouped(queries: Tensor, kv_heads: int) -> Tensor:
    """queries [heads, rows, head_dim] by the KV head that they read, [kv_heads, heads per KV head × rows, head_dim]."""
    own: Tensor = queries.unflatten(0, (kv_heads, -1))
    return own.flatten(1, 2)
