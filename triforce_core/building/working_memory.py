"""What the target takes beside its KV pool. A pool that leaves no room for it is refused at the start; otherwise memory
would run out at the first cut, after a long prefill. Computed from the shapes; peaks of passes, cuts and draws do not
coincide, so only the largest counts. What libraries take by themselves is a guess.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.configuration_utils import PretrainedConfig

from triforce_core.attention.chunk_sums import MOST_LOGITS as SUM_LOGITS
from triforce_core.config import Settings
from triforce_core.kv.base import KVGeometry
from triforce_core.kv.full import MOST_RANGES
from triforce_core.kv.full_held import MOST_QUERIES, RECENT_QUERIES
from triforce_core.kv.landmarks import READ_TOGETHER
from triforce_core.kv.mass import MOST_LOGITS as MASS_LOGITS
from triforce_core.kv.selectors import SELECTORS, Landmark
from triforce_core.models.files import kv_shape

MOST_LOGITS = 1 << 25  # of a pass whose prompt tokens get logprobs: 128 MiB in float32
LIBRARIES = 256 << 20  # on CUDA: cuBLAS's workspaces, attention's partial results, the driver's part of graphs
WIDE = 4 + 8 + 8 + 8  # bytes of a logit while tokens are drawn: float32, float64, and two of the noise


@dataclass(frozen=True, slots=True)
class Beside:
    """Bytes beside a pool."""

    landmarks: int = 0  # what the selector keeps of all tokens of the pool; counted where their KV lies
    fixed: int = 0  # on the device: snapshots on their way, kept queries, graphs and what libraries take
    passing: int = 0  # on the device, for a moment: the largest of a pass, a cut and a draw

    @property
    def on_device(self) -> int:
        return self.fixed + self.passing


def beside_pool(config: PretrainedConfig, geometry: KVGeometry, pool_tokens: int, settings: Settings) -> Beside:
    """The bytes for a target of this configuration, on one rank; `geometry` is that of the rank's share of the KV."""
    landmarks = landmark_bytes(geometry, settings) * pool_tokens
    rows = settings.max_sequences * (sum(settings.speculation.effective) + 1)
    graphs = 0
    if settings.device_type == "cuda":
        graphs = LIBRARIES
        if settings.graphs in ("auto", "on"):
            # Twice, because the retrieval tier, which may share the device, captures its graphs after this check.
            graphs += 2 * (pass_bytes(config, geometry, rows, rows, parts=MOST_RANGES) + 4 * rows * config.vocab_size)
    chunked = min(settings.target.prefill_chunk, pool_tokens)
    scored = min(chunked, max(64, MOST_LOGITS // config.vocab_size))
    prefill = pass_bytes(config, geometry, chunked, settings.max_sequences, parts=2)
    passing = (
        prefill,
        pass_bytes(config, geometry, scored, scored, parts=2),  # of a prompt whose logprobs are asked
        rows * config.vocab_size * WIDE,
        cut_bytes(config, geometry, pool_tokens, settings),
    )
    return Beside(landmarks, snapshot_bytes(config, geometry, settings) + graphs, max(passing))


def heads_of(config: PretrainedConfig, geometry: KVGeometry) -> int:
    """The query heads of this rank."""
    return int(config.num_attention_heads * geometry.num_kv_heads // kv_shape(config)[1])


def pass_bytes(config: PretrainedConfig, geometry: KVGeometry, tokens: int, sampled: int, parts: int) -> int:
    """The activations of a pass. `parts`: the partial results of attention that are merged."""
    item, heads = geometry.dtype.itemsize, heads_of(config, geometry)
    hidden = config.hidden_size
    # Some configurations name the feed-forward width otherwise, or not at all: four times the hidden is usual.
    inner = (getattr(config, "intermediate_size", None) or 4 * hidden) * heads // config.num_attention_heads
    width = heads * geometry.head_dim
    norm = hidden * (3 * item + 2 * 4)  # in float32 inside
    new_kv = 2 * item * geometry.num_kv_heads * geometry.head_dim
    attention = hidden * item + width * (3 * item + parts * item + 2 * 4) + new_kv
    feed_forward = hidden * 2 * item + 3 * inner * item
    logits = sampled * (config.vocab_size * (item + 4) + hidden * item)  # in the model's precision, and as float32
    return int(max(tokens * max(norm, attention, feed_forward), logits))


def snapshot_bytes(config: PretrainedConfig, geometry: KVGeometry, settings: Settings) -> int:
    """The bytes of a snapshot of each sequence on its way, and of what is kept to cut the next."""
    chunks = geometry.num_layers * geometry.num_kv_heads * settings.retrieval.budget // settings.retrieval.chunk
    queries = geometry.num_layers * heads_of(config, geometry) * max(RECENT_QUERIES, MOST_QUERIES) * geometry.head_dim
    each = geometry.bytes_per_token * settings.retrieval.budget + 2 * 8 * chunks + queries * geometry.dtype.itemsize
    return settings.max_sequences * each


def cut_bytes(config: PretrainedConfig, geometry: KVGeometry, pool_tokens: int, settings: Settings) -> int:
    """The bytes for choosing chunks and copying them; the snapshot itself is not counted."""
    item, chunk, budget = geometry.dtype.itemsize, settings.retrieval.chunk, settings.retrieval.budget
    heads, kv_heads, layers = heads_of(config, geometry), geometry.num_kv_heads, geometry.num_layers
    asking, chunks = heads * RECENT_QUERIES, pool_tokens // chunk
    moved = 0
    if settings.target.offload != "none":  # few keys at a time are brought to the device
        moved = 2 * kv_heads * geometry.head_dim * item * min(READ_TOGETHER * chunk, pool_tokens)
    # Of one layer: logits, which only the Triton kernel does without, and what each query gives each chunk.
    logits = min(SUM_LOGITS[geometry.device.type], asking * pool_tokens) * (item + 4 + 1)
    sums = logits + moved + 3 * 4 * asking * chunks
    # A layer's landmarks are joined with new ones, and widened to float32.
    widened = landmark_bytes(geometry, settings) * pool_tokens // layers * (1 + 4 // item)
    counting = 0
    if SELECTORS[settings.retrieval.selector]().num_queries is None:
        counting = MASS_LOGITS[geometry.device.type] * (item + 2 * 4)
        counting += pool_tokens * (geometry.head_dim * item + 2 * 4 * kv_heads)
    # Of all layers: the scores and their order; then the places of the chosen tokens, int64, in the text and in
    # the pool, for keys and for values.
    scores, places = 2 * 4 * layers * kv_heads * chunks, 5 * 8 * layers * kv_heads * budget
    return int(8 * pool_tokens + max(scores + max(sums, widened, counting), places))


def landmark_bytes(geometry: KVGeometry, settings: Settings) -> int:
    """What the configured selector keeps of a token, in all layers: found by asking it about chunks without data."""
    selector, chunk = SELECTORS[settings.retrieval.selector](), settings.retrieval.chunk
    probe = Probe(geometry, chunk, selector.num_queries or 1)
    selector.scores(probe)
    return geometry.num_layers * probe.kept // (probe.count * chunk)


class Probe:
    """Two chunks of a text without data; see `Chunks`. Notes the bytes that are kept of them."""

    count = 2

    def __init__(self, geometry: KVGeometry, chunk: int, rows: int) -> None:
        self.kv_heads, self.kept = geometry.num_kv_heads, 0
        shape = (self.kv_heads, self.count, chunk, geometry.head_dim)
        self.keys = torch.empty(shape, dtype=geometry.dtype, device="meta")
        self.queries = torch.empty(self.kv_heads, rows, geometry.head_dim, dtype=geometry.dtype, device="meta")

    def landmarks(self, landmark: Landmark) -> Tensor:
        found = landmark(self.keys)
        self.kept += found.nbytes
        return found

    def log_sums(self) -> Tensor:
        return torch.empty(*self.queries.shape[:2], self.count + 1, device="meta")

    def mass(self) -> Tensor:
        self.kept += 4 * self.kv_heads * self.count * self.keys.shape[2]
        return torch.empty(self.kv_heads, self.count, device="meta")
