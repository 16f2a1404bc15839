"""SnapKV's selector: the attention that the last queries really paid to each chunk (Li et al. 2024, arXiv 2404.14469).

Mean keys and bounds guess at attention; this computes it, for the last queries, over all keys. The paper pools the
attention of neighbouring tokens, so that the neighbours of a token with much attention are kept with it. Here chunks
are chosen whole, so the chunk takes the place of the pooling kernel.
"""

from dataclasses import dataclass

from torch import Tensor

from triforce_core.kv.selectors.base import Chunks


@dataclass(frozen=True, slots=True)
class SnapKV:
    """Scores a chunk by the sum of the attention weights of its tokens, averaged over the last queries, and over the
    query heads that share the KV head.

    It reads all keys at every cut and keeps nothing of them until the next. The softmax over all keys follows exactly
    from the log-sum-exps of the chunks.
    """

    # The paper's window is 32 for long prompts. With the demo pair a window of 8 chooses equally well and costs a
    # quarter.
    num_queries: int = 8

    def scores(self, chunks: Chunks) -> Tensor:
        return chunks.log_sums().softmax(-1)[..., : chunks.count].mean(1)
