"""What the target takes on a GPU beside weights and caches, measured: the largest pass of each kind, a draw and a cut
run once, for each selector, on KV without values.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from triforce_core.config import Settings
from triforce_core.kv.base import Forward, KVCache
from triforce_core.kv.full import FullKV
from triforce_core.kv.kept_queries import KeptQueries
from triforce_core.kv.selectors import SELECTORS
from triforce_core.kv.snapshot import ChunkSettings
from triforce_core.messages import GREEDY, SamplingParams, SequenceSpec, Span
from triforce_core.models.runner import ModelRunner
from triforce_core.models.scoring import token_logprobs
from triforce_core.sampling.draw import Draw, drawn

MOST_LOGITS = 1 << 25  # of a pass whose prompt tokens get logprobs: 128 MiB in float32
LIBRARIES = 256 << 20  # cuBLAS's workspaces in the stream of graphs, the driver's part of graphs
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95)
SHORT_CHUNK = 128  # tokens of a prompt's pass that is tried with the selectors that only requests name
SEQUENCE = 1  # the id of the only sequence of a trial


def scored_tokens(settings: Settings, vocab_size: int) -> int:
    """The most prompt tokens of a pass whose logprobs are asked for."""
    return min(settings.target.prefill_chunk, max(64, MOST_LOGITS // vocab_size))


def decoded_tokens(settings: Settings) -> int:
    """Most tokens per sequence in a decoding pass of the target: the longest block and the token before it."""
    return sum(settings.speculation.effective) + 1


@dataclass(frozen=True, slots=True)
class Taken:
    """The bytes that one text takes beyond its KV."""

    reading: int  # at most, in a pass over its prompt
    decoding: int  # at most, in a decoding pass and the draws of its tokens
    most: int  # at any time
    kept: int  # between passes, with a snapshot on its way to the tier below


@torch.inference_mode()
def working_bytes(model: PreTrainedModel, kv: FullKV, length: int, settings: Settings) -> int:
    """The bytes on the GPU beside weights and caches, for texts of up to `length` tokens, which must fit the pool of
    `kv`; this is empty afterwards. Raises torch's own error where memory runs out.
    """
    configured = settings.retrieval.selector
    longest_pass = max(settings.target.prefill_chunk, settings.max_sequences * decoded_tokens(settings))
    own = text_bytes(model, kv, length, settings, configured, longest_pass)
    # Requests may name any other selector. A long prompt with it takes as much more as a short one does.
    others = [text_bytes(model, kv, length, settings, name, SHORT_CHUNK) for name in SELECTORS if name != configured]
    more = max(each.reading for each in others) - min(each.reading for each in others)
    kept = settings.max_sequences * max(each.kept for each in (own, *others))
    graphs = 0 if settings.graphs == "off" else own.decoding + LIBRARIES
    return kept + graphs + max(each.most for each in (own, *others)) + more


def text_bytes(model: PreTrainedModel, kv: FullKV, length: int, settings: Settings, selector: str, chunk: int) -> Taken:
    """Measured with a text of `length` tokens, of which the last `chunk` are computed."""
    device, vocab_size, runner = kv.geometry.device, model.config.vocab_size, ModelRunner(model, kv)
    spec, known = SequenceSpec(GREEDY, 0, length, length, selector=selector), max(0, length - chunk)
    held = kv.open(SEQUENCE, spec, length)
    assert held is not None, "the pool is empty, and has room for a text of this length"

    def forward(most_tokens: int, most_sampled: int) -> Tensor:
        """A pass over the text's last tokens, which are new ones each time."""
        tokens = min(most_tokens, length - known)
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
        return kv.cut(SEQUENCE, length, chunks, SELECTORS[selector]())

    KVCache.prepare(kv, [Forward(Span(SEQUENCE, 0, (0,) * known, spec), 0)])  # held, without having been computed
    held.queries, held.count_to = KeptQueries(kv.geometry.num_layers), known
    held.mass = {layer: each.new_ones(len(each), known) for layer, each in held.mass.items()}
    forward(chunk, 1)  # libraries allocate what they keep
    reading, _ = taken(lambda: forward(chunk, settings.max_sequences), device)
    scoring, _ = taken(score, device)
    decoding, _ = taken(decode, device)
    cutting, snapshot = taken(cut, device)
    before = torch.cuda.memory_allocated(device)
    kv.release(SEQUENCE)
    kv.tree.drop_until(lambda: False)  # nobody may find what was not computed
    kept = before - torch.cuda.memory_allocated(device)  # queries, layouts, and what the selector keeps
    return Taken(reading, decoding, max(reading, scoring, decoding, cutting), kept + snapshot)


def taken(run: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """The bytes that it allocates at most, and those that it leaves, its result included."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = run()
    left = torch.cuda.memory_allocated(device) - before
    del result
    return torch.cuda.max_memory_allocated(device) - before, left
