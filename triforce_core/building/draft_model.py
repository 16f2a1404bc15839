"""The draft tier that runs a model."""

from transformers import PreTrainedModel

from triforce_core.attention import kernel_for
from triforce_core.building.drafters import most_nodes
from triforce_core.building.runners import grammars_for, runner_for
from triforce_core.config import Settings
from triforce_core.errors import require
from triforce_core.kv.heavy_hitter import HeavyHitterKV
from triforce_core.kv.sizes import draft_heavy_hitters, draft_window
from triforce_core.kv.streaming import StreamingKV
from triforce_core.machine.memory import check_room
from triforce_core.models.files import context_length
from triforce_core.models.load import kv_geometry
from triforce_core.speculation.drafting import ModelProposer
from triforce_core.speculation.leaf import Leaf

FEW_DRAFT_TOKENS = 4  # per sequence: a drafting step has one token or a tree, the first step after a round a few


def draft_proposer(model: PreTrainedModel, settings: Settings) -> Leaf:
    """The draft tier that runs `model`, and looks up too where it is asked to."""
    kv = heavy_hitter_kv(model, settings) if settings.draft.cache == "heavy_hitter" else streaming_kv(model, settings)
    few, ahead = max(FEW_DRAFT_TOKENS, most_nodes(settings)), settings.speculation.effective[1]
    runner = runner_for(model, kv, settings, few, ahead=ahead)
    return Leaf(ModelProposer(runner, grammars_for(settings, model.config.vocab_size)))


def streaming_kv(model: PreTrainedModel, settings: Settings) -> StreamingKV:
    """The draft tier's cache of sinks and window."""
    window = draft_window(settings)
    positions = context_length(model.config)
    rule = f"makes a cache of {window.capacity} tokens, which must fit the drafter's {positions} positions"
    require(window.capacity <= positions, "draft.window", window.window, rule)
    geometry, sequences = kv_geometry(model), settings.max_sequences
    num_bytes = geometry.bytes_per_token * window.capacity * sequences
    check_room(geometry.device, num_bytes, "max_sequences", sequences, "lower it or draft.window")
    return StreamingKV(geometry, sequences, window, kernel_for(settings, geometry.head_dim))


def heavy_hitter_kv(model: PreTrainedModel, settings: Settings) -> HeavyHitterKV:
    """The draft tier's cache of heavy hitters. Texts longer than the drafter's positions are not drafted by it."""
    sizes, num_heads = draft_heavy_hitters(settings), model.config.num_attention_heads
    geometry, sequences = kv_geometry(model), settings.max_sequences
    num_bytes = sequences * sizes.bytes_each(geometry, num_heads)
    check_room(geometry.device, num_bytes, "max_sequences", sequences, "lower it or draft.window")
    kernel, positions = kernel_for(settings, geometry.head_dim), context_length(model.config)
    return HeavyHitterKV(geometry, sequences, sizes, kernel, num_heads, positions)
