"""Attention in layers with a sliding window over whole texts, by kernels that know nothing of windows.

The tokens of a pass are cut at multiples of the window. A piece attends to the keys that all its tokens see and to its
own, which is causal attention; and to the window's lower edge, of which each token sees one key less than the token
before it: read backwards, that is causal attention, too.
"""

import torch
from torch import Tensor

from triforce_core.attention import Kernel, Partial, Scoring, merge
from triforce_core.kv.ranges import Range, sliced


def attend_in_window(
    kernel: Kernel,
    query: Tensor,
    pool: tuple[Tensor, Tensor],
    scoring: Scoring,
    texts: list[tuple[int, range, list[Range]]],
    window: int,
) -> Tensor:
    """query [heads, tokens, head_dim]; `pool` holds keys and values [kv_heads, pool_tokens, head_dim], those of the
    pass included; `texts`: the index of the first token in the pass, the tokens' positions, the slots of the text.

    Returns [tokens, heads, head_dim]. A token sees the last `window` tokens of its text, itself included.
    """
    output = query.new_empty(query.shape[1], query.shape[0], query.shape[2])
    for first, positions, text in texts:
        for start in range(positions.start // window * window, positions.stop, window):
            piece = range(max(start, positions.start), min(start + window, positions.stop))
            part = slice(first + piece.start - positions.start, first + piece.stop - positions.start)
            parts = attended(kernel, query[:, part], pool, scoring.scale, text, piece, window)
            output[part] = merge(parts + scoring.sink(query[:, part])).transpose(0, 1)
    return output


def attended(
    kernel: Kernel,
    query: Tensor,
    pool: tuple[Tensor, Tensor],
    scale: float,
    text: list[Range],
    piece: range,
    window: int,
) -> list[Partial]:
    """The parts of one piece: it is at most as long as the window, and ends within it or begins behind it."""
    parts = [kernel(query, *read(pool, sliced(text, max(0, piece.stop - window), piece.stop)), scale, True)]
    if piece.start >= window and len(piece) > 1:
        keys, values = read(pool, sliced(text, piece.start - window + 1, piece.stop - window))
        back = kernel(query[:, :-1].flip(1), keys.flip(1), values.flip(1), scale, True)
        # The last token sees nothing of the edge.
        output = torch.cat([back.output.flip(1), torch.zeros_like(query[:, :1])], dim=1)
        parts.append(Partial(output, torch.nn.functional.pad(back.lse.flip(1), (0, 1), value=-torch.inf)))
    return parts


def read(pool: tuple[Tensor, Tensor], ranges: list[Range]) -> tuple[Tensor, Tensor]:
    """The keys and values in these slots, [kv_heads, slots, head_dim] each: views, or copies of several ranges."""
    if len(ranges) == 1:
        start, stop = ranges[0]
        return pool[0][:, start:stop], pool[1][:, start:stop]
    keys, values = (torch.cat([each[:, start:stop] for start, stop in ranges], dim=1) for each in pool)
    return keys, values
