"""What the target takes on a GPU beside weights and caches, measured: the largest pass of each kind, a draw and a cut
run once, on KV without values.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from triforce_core.config import Settings
from triforce_core.kv.base import Forward, KVCache
from triforce_core.kv.full import FullKV
from triforce_core.kv.selectors import SELECTORS
from triforce_core.kv.snapshot import ChunkSettings
from triforce_core.messages import GREEDY, SamplingParams, SequenceSpec, Span
from triforce_core.models.runner import ModelRunner
from triforce_core.models.scoring import token_logprobs
from triforce_core.sampling.draw import Draw, drawn

MOST_LOGITS = 1 << 25  # of a pass whose prompt tokens get logprobs: 128 MiB in float32
LIBRARIES = 256 << 20  # cuBLAS's workspaces in the stream of graphs, the driver's part of graphs
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95)
SEQUENCE = 1  # the id of the only sequence of a trial


def scored_tokens(settings: Settings, vocab_size: int) -> int:
    """The most prompt tokens of a pass whose logprobs are asked for."""
    return min(settings.target.prefill_chunk, max(64, MOST_LOGITS // vocab_size))


def decoded_tokens(settings: Settings) -> int:
    """Most tokens per sequence in a decoding pass of the target: the longest block and the token before it."""
    return sum(settings.speculation.effective) + 1


@dataclass(frozen=True, slots=True)
class Taken:
    """Bytes beyond those that were allocated before."""

    most: int  # at any time
    left: int  # at the end, with the result still there


def taken(run: Callable[[], object], device: torch.device) -> Taken:
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = run()
    left = torch.cuda.memory_allocated(device) - before
    del result
    return Taken(torch.cuda.max_memory_allocated(device) - before, left)


@torch.inference_mode()
def working_bytes(model: PreTrainedModel, kv: FullKV, length: int, settings: Settings) -> int:
    """The bytes on the GPU beside weights and caches, for texts of up to `length` tokens, at most the pool of `kv`.
    Raises torch's own error where memory runs out.
    """
    device, vocab_size, runner = kv.geometry.device, model.config.vocab_size, ModelRunner(model, kv)
    spec = SequenceSpec(GREEDY, 0, length, length, selector=settings.retrieval.selector)
    held = kv.open(SEQUENCE, spec, length)
    assert held is not None, "the pool is empty, and has room for a text of this length"

    def forward(most_tokens: int, most_sampled: int) -> Tensor:
        """A pass over the text's last tokens, which are new ones each time."""
        tokens = min(most_tokens, length)
        span = Span(SEQUENCE, length - tokens, (runner.passes % 2,) * tokens)
        return runner.forward([Forward(span, min(most_sampled, tokens))])[0]

    def decode() -> object:
        logits = forward(*[settings.max_sequences * decoded_tokens(settings)] * 2)
        return drawn(logits, [Draw(SAMPLED, 0, row) for row in range(len(logits))])

    def score() -> object:
        logits = forward(*[scored_tokens(settings, vocab_size)] * 2)
        return token_logprobs(logits, [0] * len(logits), 0)

    def cut() -> object:
        chunks = ChunkSettings.halved(settings.retrieval.budget, settings.retrieval.chunk)
        return kv.cut(SEQUENCE, length, chunks, SELECTORS[spec.selector]())

    chunk = settings.target.prefill_chunk
    beginning = Span(SEQUENCE, 0, (0,) * max(0, length - chunk), spec)
    KVCache.prepare(kv, [Forward(beginning, num_sampled=0)])  # held from here on, without having been computed
    held.mass = [each.new_ones(len(each), held.count_to) for each in held.mass]
    forward(chunk, 1)  # libraries allocate what they keep
    prompt, scoring = taken(lambda: forward(chunk, settings.max_sequences), device), taken(score, device)
    decoding, cutting = taken(decode, device), taken(cut, device)
    before = torch.cuda.memory_allocated(device)
    kv.release(SEQUENCE)
    of_text = before - torch.cuda.memory_allocated(device)  # queries, layouts, and what the selector keeps
    # A snapshot of each text may be on its way to the tier below.
    kept = settings.max_sequences * (of_text + cutting.left)
    graphs = 0 if settings.graphs == "off" else decoding.most + LIBRARIES
    return kept + graphs + max(prompt.most, scoring.most, decoding.most, cutting.most)
