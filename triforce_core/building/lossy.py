"""The lossy mode, `target.eviction`: the target decodes alone, with a cache that forgets. docs/eviction.md"""

from transformers import PreTrainedModel

from triforce_core.attention import kernel_for
from triforce_core.config import Settings
from triforce_core.kv.base import KVGeometry
from triforce_core.kv.lossy import LossyHeavyHitterKV, LossyStreamingKV
from triforce_core.kv.sizes import target_heavy_hitters, target_window
from triforce_core.machine.memory import check_room
from triforce_core.messages import Proposal, Work
from triforce_core.models.load import kv_geometry

Lossy = LossyHeavyHitterKV | LossyStreamingKV


class NothingBelow:
    """Stands for the tiers below a target that decodes alone. It is never asked."""

    def submit(self, work: list[Work]) -> None:
        assert not work, "requests that ask for drafts are refused"

    def collect(self, timeout_s: float) -> list[Proposal]:
        return []

    def release(self, sequence_ids: list[int]) -> None:
        """Nothing is held."""


def lossy_bytes(geometry: KVGeometry, num_heads: int, settings: Settings) -> int:
    """The bytes of KV of one request, at any length."""
    if settings.target.eviction == "heavy_hitter":
        return target_heavy_hitters(settings).bytes_each(geometry, num_heads)
    return target_window(settings).capacity * geometry.bytes_per_token


def lossy_kv(model: PreTrainedModel, settings: Settings) -> Lossy:
    """The cache of a target with `eviction`. Raises `InvalidValueError` if there is no room for it."""
    geometry, num_heads, sequences = kv_geometry(model), model.config.num_attention_heads, settings.max_sequences
    num_bytes = sequences * lossy_bytes(geometry, num_heads, settings)
    remedy = "lower it or target.kv_budget"
    check_room(geometry.device, num_bytes, "max_sequences", sequences, remedy)
    kernel = kernel_for(settings, geometry.head_dim)
    if settings.target.eviction == "heavy_hitter":
        return LossyHeavyHitterKV(geometry, sequences, target_heavy_hitters(settings), kernel, num_heads)
    return LossyStreamingKV(geometry, sequences, target_window(settings), kernel)
