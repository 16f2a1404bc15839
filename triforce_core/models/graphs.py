"""Passes over few tokens with constant buffers, captured as CUDA graphs: one launch in place of a thousand kernel
launches, which are most of the cost of a small model on a GPU. A batch goes to the smallest shape (sequences, tokens of
each) that has room for it, or else to an ordinary pass. The eager pass runs the same code on any device, without
capture. docs/decisions/0015-graphs.md
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel

from triforce_core.attention import ON_CUDA, gathered, kernel_name, ranged_for
from triforce_core.attention.ranged import joined_with_own
from triforce_core.config import Settings
from triforce_core.kv.base import Batch, KVCache
from triforce_core.kv.fixed import FixedKV
from triforce_core.kv.full import FullKV
from triforce_core.kv.heavy_hitter import HeavyHitterKV
from triforce_core.kv.offloaded import OffloadedKV
from triforce_core.kv.shaped import PassShape, ShapedBatch, VerifyBatch
from triforce_core.models.chain import Chain, best
from triforce_core.models.fallback import LOWER, fall_back, ignored, out_of_memory, shortage
from triforce_core.models.files import context_length
from triforce_core.models.fuse import compiled, compiling, give_up
from triforce_core.models.passing import run_pass

PROGRAMS = 2  # that a multiprocessor of an H100 runs at the same time, each of which reads one item of one KV head
WARM_UPS = 2  # passes before capture, in which libraries allocate their permanent buffers


class EagerPass:
    """The pass of constant shape, run without capture."""

    def __init__(self, model: PreTrainedModel, batch: ShapedBatch) -> None:
        self.model, self.batch = model, batch

    @torch.inference_mode()
    def run(self) -> Tensor:
        """Logits of the tokens loaded into `batch`, [tokens of the shape, vocab] float32, the sampled tokens' first."""
        batch = self.batch
        batch.unpack()
        output = run_pass(
            self.model,
            batch,
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            logits_to_keep=batch.sampled,
        )
        logits: Tensor = output.logits[0].float()
        return logits


class CapturedPass:
    """An eager pass captured as a CUDA graph, with its memory in `pool`. Capturing runs passes over an empty batch,
    which write to the dump slot.

    `logits` [at least the shape's tokens, vocab] float32 is a buffer shared by several passes; it holds the result of
    the latest.
    """

    def __init__(self, eager: EagerPass, pool: Any, logits: Tensor, side: torch.cuda.Stream) -> None:
        """`side`: the stream for warm-ups and capture. Libraries keep buffers for each stream that they have seen
        (cuBLAS 32 MiB on Hopper), so all passes of a runner share one.
        """
        self.batch = eager.batch
        self.logits = logits[: eager.batch.shape.tokens]
        device = eager.batch.inputs.device
        self.graph = graph_of(lambda: self.logits.copy_(eager.run()), pool, side, device)

    def run(self) -> Tensor:
        self.graph.replay()
        return self.logits.clone()


def graph_of(
    run: Callable[[], object],
    pool: Any,
    side: torch.cuda.Stream,
    device: torch.device,
    warm_up: Callable[[], object] | None = None,
) -> torch.cuda.CUDAGraph:
    """What `run` does, captured after warm-ups, with its memory in `pool`. `warm_up`: by default `run`."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        current = torch.cuda.current_stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                (warm_up or run)()
        current.wait_stream(side)
        # Other threads may use the GPU meanwhile: only this thread is barred from calls that a graph cannot hold.
        with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
            run()
    return graph


ShapedPass = EagerPass | CapturedPass


class ShapedPasses:
    """The passes of constant shape of one runner, by number of tokens. `chains`: by number of sequences, if any."""

    def __init__(self, passes: list[ShapedPass], chains: list[Chain] | None = None) -> None:
        self.passes = sorted(passes, key=lambda each: each.batch.shape.tokens)
        self.chains = sorted(chains or [], key=lambda each: each.sequences)

    def forward(self, batch: Batch) -> Tensor | None:
        """The sampled tokens' logits, [Σ num_sampled, vocab] float32, in the rows' order; None if no shape has room."""
        smallest = next((each for each in self.passes if each.batch.has_room(batch)), None)
        if smallest is None:
            return None
        smallest.batch.load(batch)
        logits = smallest.run()
        smallest.batch.settle(batch)
        return logits[: sum(row.num_sampled for row in batch.rows)]

    @property
    def ahead(self) -> int:
        """How many tokens of a sequence a chain draws at most; 0 without chains."""
        return self.chains[0].most if self.chains else 0

    def chain(self, sequences: int) -> Chain | None:
        """The smallest with room for so many sequences."""
        return next((each for each in self.chains if each.sequences >= sequences), None)


def shaped_passes(
    model: PreTrainedModel, kv: KVCache, settings: Settings, most_queries: int, *, fused: bool = False, ahead: int = 0
) -> ShapedPasses | None:
    """The passes for batches of up to `max_sequences` sequences with up to `most_queries` tokens each. None if the
    settings ask for none, the cache does not support them, or with `graphs: auto` memory runs out, which the log says;
    other values raise `InvalidValueError` then. `fused`: also compile the attention to the pass's own tokens. `ahead`:
    how many tokens of a sequence are drafted together at most; then there are chains.
    """
    capture = settings.graphs == "on" or (settings.graphs == "auto" and settings.device_type == "cuda")
    if not capture and settings.graphs != "eager":
        return None
    if why := next(unshaped(kv, settings, most_queries, capture=capture), None):
        ignored("graphs", settings.graphs, why)
        return None
    try:
        return build_passes(model, kv, settings, most_queries, capture=capture, fused=fused, ahead=ahead)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        remedy = f"{LOWER}, or set graphs: off"
        fall_back("graphs", settings.graphs, "no graphs", shortage(settings, error), remedy)
    if kv.geometry.device.type == "cuda":
        torch.cuda.empty_cache()  # frees the memory of the passes made so far for other uses
    return None


def unshaped(kv: KVCache, settings: Settings, most_queries: int, *, capture: bool) -> Iterator[str]:
    """Why this cache has no passes of constant shape; nothing if it has them."""
    window, kernel = kv.geometry.windows.size, kernel_name(settings)
    if isinstance(kv, OffloadedKV):
        yield f"with target.offload: {settings.target.offload} what the target copies differs from pass to pass"
    if isinstance(kv, FullKV) and kv.in_blocks:
        yield f"with exact: {settings.exact} the target attends in blocks of keys, which these passes do not"
    if 0 < window < most_queries:
        yield f"sliding windows of {window} tokens are shorter than a pass of {most_queries}"
    if capture and isinstance(kv, FullKV) and kernel not in ON_CUDA:
        yield f"with attention: {kernel} a graph of the target would copy every context at its greatest length"
    if isinstance(kv, HeavyHitterKV):
        yield "the heavy-hitter cache keeps the queries of each pass, which these passes do not"
    if not isinstance(kv, FixedKV | FullKV):
        yield f"the cache policy {type(kv).__name__} has no passes of constant shape"
    if capture and kernel in ON_CUDA and ranged_for(settings) is gathered:
        yield "without Triton, attention of a graph would copy all keys that it may see"


def build_passes(
    model: PreTrainedModel,
    kv: KVCache,
    settings: Settings,
    most_queries: int,
    *,
    capture: bool,
    fused: bool,
    ahead: int,
) -> ShapedPasses:
    """The passes of all shapes, captured if `capture`; arguments as for `shaped_passes`."""
    sizes, queries = doubling(settings.max_sequences), doubling(most_queries)
    eager_passes = [EagerPass(model, batch) for batch in shaped_batches(model, kv, settings, sizes, queries)]
    # For drafts of two tokens or more: a single one is drawn after an ordinary pass.
    one_token = [each for each in eager_passes if ahead > 1 and each.batch.shape.queries == 1]
    chains = [Chain(each, model.config.vocab_size, ahead) for each in one_token]
    if fused:
        compile_parts(eager_passes, chains, settings)
    return captured(eager_passes, chains, model, kv) if capture else ShapedPasses([*eager_passes], chains)


def captured(eager_passes: list[EagerPass], chains: list[Chain], model: PreTrainedModel, kv: KVCache) -> ShapedPasses:
    """The passes as graphs, captured from the largest down, so that the smaller ones reuse its memory in the pool."""
    pool, side = torch.cuda.graph_pool_handle(), torch.cuda.Stream(kv.geometry.device)
    most = max(eager.batch.shape.tokens for eager in eager_passes)
    logits = torch.empty(most, model.config.vocab_size, dtype=torch.float32, device=kv.geometry.device)
    largest_first = track(eager_passes[::-1], f"capturing {len(eager_passes)} graphs", console=Console(stderr=True))
    passes = {eager.batch.shape: CapturedPass(eager, pool, logits, side) for eager in largest_first}
    for chain in chains:
        chain.step = passes[chain.step.batch.shape]
        for noisy in chain.best:
            draws = (partial(draw, noisy=noisy) for draw in (chain.draw, chain.first_draw))
            chain.graphs[noisy] = graph_of(next(draws), pool, side, kv.geometry.device, next(draws))
    return ShapedPasses([*passes.values()], chains)


def compile_parts(eager_passes: list[EagerPass], chains: list[Chain], settings: Settings) -> None:
    """Compile the attention to the passes' own tokens, and the draws of chains. A failure is handled as in `fuse`."""
    join, draw = compiled(joined_with_own), compiled(best)
    try:
        with compiling():
            for eager in eager_passes:
                eager.batch.join = join
                eager.run()
            for chain in chains:
                chain.best[True] = draw
                chain.first_draw(noisy=True)
    except Exception as error:  # a compiler that is broken may raise anything
        for eager in eager_passes:
            eager.batch.join = joined_with_own
        for chain in chains:
            chain.best[True] = best
        give_up(settings, error)


def shaped_batches(
    model: PreTrainedModel, kv: KVCache, settings: Settings, sizes: list[int], queries: list[int]
) -> Iterator[ShapedBatch]:
    """A batch for each pair of a number of sequences and a number of tokens per sequence, the largest last."""
    geometry, ranged = kv.geometry, ranged_for(settings)
    cuda = geometry.device.type == "cuda"
    workers = PROGRAMS * torch.cuda.get_device_properties(geometry.device).multi_processor_count if cuda else 1
    shapes = [PassShape(n, q) for n in sizes for q in queries]
    if isinstance(kv, FixedKV):
        for shape in shapes:
            yield ShapedBatch(kv, shape, kv.slots_each, ranged, workers)
    elif isinstance(kv, FullKV):
        longest = min(kv.allocator.num_slots, settings.target.context_length or context_length(model.config))
        heads = model.config.num_attention_heads // (model.tp_size or 1)
        kept = torch.empty(
            *(geometry.num_layers, heads, shapes[-1].tokens, geometry.head_dim),
            dtype=geometry.dtype,
            device=geometry.device,
        )
        for shape in shapes:
            yield VerifyBatch(kv, shape, longest, ranged, workers, kept)


def doubling(most: int) -> list[int]:
    """The powers of two below `most`, then `most`."""
    return [*(2**i for i in range((most - 1).bit_length())), most]
