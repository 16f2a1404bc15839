"""Times the attention of captured passes alone: each way to read one range of keys, in a graph, as passes run it.

On a GPU it compares our kernel in Triton, over one, two and four items for each multiprocessor, with FlashAttention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from triforce_core.attention import Ranged, gathered
from triforce_core.attention.cuda_flash import flash_ranged
from triforce_core.attention.flash_decoding import triton_ranged
from triforce_core.attention.ranged import WorkItems, cut, num_splits, over_items
from triforce_core.kv.shaped import ShapedBatch, VerifyBatch
from triforce_tools.bench.decode import Report
from triforce_tools.bench.peaks import measure_peaks, seconds

MOST_LAYERS, READ_BYTES = 32, 1 << 29  # a run reads the KV of several layers, so that no cache of the device holds it
WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One sequence that sees one range of keys."""

    heads: int
    kv_heads: int
    queries: int  # tokens of the pass
    keys: int
    longest: int  # keys for which the pass has room: a graph serves all lengths up to this
    head_dim: int = 128
    least: int = ShapedBatch.LEAST_SPLITS  # items, which the pass has whatever the way


class Way(NamedTuple):
    """A way to attend to ranges of keys, and the number of workers for which a pass cuts the ranges into items."""

    ranged: Ranged
    workers: int


# A retrieval step at budget 4096; the target at 124,928 tokens, and with a short text in a pass with room for a long
# one. Multi-head as in Llama-2-7B, then 32 heads on 8 as in Llama-3.1-8B.
CASES = tuple(
    AttentionCase(32, kv_heads, queries, keys, longest, least=batch.LEAST_SPLITS)
    for kv_heads in (32, 8)
    for keys, longest, batch in (
        (4_096, 4_096, ShapedBatch),
        (124_928, 124_928, VerifyBatch),
        (4_096, 124_928, VerifyBatch),
    )
    for queries in (1, 4, 8)
)


def ways(device: torch.device) -> dict[str, Way]:
    if device.type != "cuda":
        return {"gathered": Way(gathered, 1)}
    workers = torch.cuda.get_device_properties(device).multi_processor_count
    return {
        f"{name}, {each} each": Way(ranged, each * workers)
        for name, ranged in (("triton_ranged", triton_ranged), ("flash_ranged", flash_ranged))
        for each in (1, 2, 4)
    }


@torch.inference_mode()
def bench_attention(
    device: torch.device, dtype: torch.dtype, cases: tuple[AttentionCase, ...], report: Report
) -> dict[str, Any]:
    """Microseconds a layer of each way and case, and the share of the copy bandwidth at which it reads the KV."""
    peaks, found = measure_peaks(device, dtype), list[dict[str, Any]]()
    for case in cases:
        pools, query = inputs(case, device, dtype)
        for name, way in ways(device).items():
            taken = seconds(runner(way, case, pools, query), device) / len(pools)
            read = 2 * case.kv_heads * case.keys * case.head_dim * dtype.itemsize
            share = read / taken / 1e9 / peaks.copy_gb_s
            found.append({"way": name, **asdict(case), "us": 1e6 * taken, "share": share})
            report(f"{name}: {case.kv_heads} KV heads, {case.queries} × {case.keys}: {1e6 * taken:.1f} µs a layer")
        del pools
    return {"copy_bandwidth_gb_s": peaks.copy_gb_s, "attention": found}


def inputs(case: AttentionCase, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Pools of several layers [layers, 2, kv_heads, keys, head_dim], the same values in each; and a query
    [kv_heads, group, 1, queries, head_dim].
    """
    shape = (2, case.kv_heads, case.keys, case.head_dim)
    one = torch.randn(shape, device=device).to(dtype)
    layers = min(MOST_LAYERS, ceil(READ_BYTES / one.nbytes)) if device.type == "cuda" else 1
    query = torch.randn(case.kv_heads, case.heads // case.kv_heads, 1, case.queries, case.head_dim, device=device)
    return one.expand(layers, *shape).clone(), query.to(dtype)


def items_of(way: Way, case: AttentionCase, device: torch.device) -> WorkItems:
    """The work items of one range, as a pass of constant shape makes them (kv/shaped.py)."""
    splits = max(case.least, num_splits(way.workers, 1, case.kv_heads, case.longest))
    starts, lengths = zip(*cut([(0, case.keys)], splits), strict=True)
    numbers = torch.arange(splits + 1, dtype=torch.int32, device=device)
    each = case.heads // case.kv_heads * case.queries
    return WorkItems(
        torch.tensor([*starts, 0], dtype=torch.int32, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        numbers * each,
        case.longest,
        splits,
    )


def runner(way: Way, case: AttentionCase, pools: Tensor, query: Tensor) -> Callable[[], object]:
    """A function that attends once in every layer; on a GPU a captured graph's replay."""
    items, scale = items_of(way, case, pools.device), case.head_dim**-0.5

    def layers() -> None:
        for keys, values in pools:
            past = over_items(way.ranged, query, keys, values, scale, items)
            past.lse.logsumexp(0)  # the merge of the items, with which `joined_with_own` begins

    if pools.device.type != "cuda":
        return layers
    with torch.cuda.device(pools.device):
        side, current = torch.cuda.Stream(pools.device), torch.cuda.current_stream(pools.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                layers()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers()
    return graph.replay
