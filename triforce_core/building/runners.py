"""What the tiers of a process share: how models run, and the grammars of the target's vocabulary."""

from functools import cache, partial

from transformers import PreTrainedModel

from triforce_core.config import Settings
from triforce_core.kv.base import KVCache
from triforce_core.machine.threads import threads_for
from triforce_core.models.files import load_tokenizer
from triforce_core.models.fuse import fuse, fused_noisiest
from triforce_core.models.graphs import shaped_passes
from triforce_core.models.join import join_projections
from triforce_core.models.pack import pack_weights
from triforce_core.models.replay import LeadingKV, LeadingRunner
from triforce_core.models.runner import ModelRunner
from triforce_core.sampling.draw import noisiest
from triforce_core.sampling.grammars import Grammars


def runner_for(
    model: PreTrainedModel, kv: KVCache | LeadingKV, settings: Settings, few_tokens: int, *, ahead: int = 0
) -> ModelRunner:
    """The runner of a model and its cache, or of this rank's share of them. Where the settings ask for it and the
    machine allows it, the model runs fused kernels from now on, and passes over up to `few_tokens` tokens of each
    sequence have constant shapes; up to `ahead` tokens of a sequence are drafted together. On some CPUs the model's
    weights are packed.
    """
    own, kind = (kv.kv, LeadingRunner) if isinstance(kv, LeadingKV) else (kv, ModelRunner)
    if settings.device_type == "cuda":
        join_projections(model)
    fused = fuse(model, settings)
    if settings.device_type == "cpu" and not fused:
        pack_weights(model)
    shaped = shaped_passes(model, own, settings, few_tokens, fused=fused, ahead=ahead)
    drawing = fused_noisiest(settings, model.config.vocab_size, own.geometry.device) if fused else noisiest
    return kind(model, kv, threads_for(settings), shaped, drawing)


def grammars_for(settings: Settings, vocab_size: int) -> Grammars:
    """The grammars of the target's vocabulary; tiers in one process share them."""
    return shared_grammars(settings.target.model, vocab_size)


@cache
def shared_grammars(target: str, vocab_size: int) -> Grammars:
    return Grammars(partial(load_tokenizer, target), vocab_size)
