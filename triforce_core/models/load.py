"""Load a causal language model from transformers, unmodified, with attention going through our KV caches.

Models with features that this engine does not support are refused, naming the feature.
"""

import logging
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, GgufConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging as transformers_logging

from triforce_core.attention import Scoring
from triforce_core.attention.reference import reference
from triforce_core.errors import InvalidValueError, UnknownModelError, UnsupportedModelError, reason_of, require
from triforce_core.kv.base import Batch, Forward, KVGeometry, Windows
from triforce_core.kv.full import FullKV
from triforce_core.machine.device import DTYPES, check_dtype, torch_device
from triforce_core.messages import SamplingParams, SequenceSpec, Span
from triforce_core.models.dequantise import PASSED_OVER, method_of
from triforce_core.models.fallback import out_of_memory
from triforce_core.models.files import check_ranks, check_stored, kv_shape, load_config, resolve, windows
from triforce_core.models.gguf import complete, is_gguf
from triforce_core.models.longrope import fix_longrope
from triforce_core.models.passing import BATCH
from triforce_core.models.rank_group import Group
from triforce_core.models.refused import CAUSAL_LM
from triforce_core.models.runner import ModelRunner
from triforce_core.models.text_part import NAMES, is_of_another_part

log = logging.getLogger(__name__)

ATTENTION = "triforce"
PASSES = (5, 3)  # tokens of the passes that are compared with transformers' own attention
OWN_ATTENTION = "its attention cannot be replaced"
NARROW = 3  # tokens of a window in this comparison
# By how much of their size logits may differ by rounding: several times what models of up to 40 layers have shown.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
TINY = torch.finfo(torch.float32).tiny
UNSUPPORTED_KEYWORDS = ("softcap", "position_bias")  # arguments that models may pass


def attention_through_kv(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in place of its own: query [1, heads, tokens, head_dim], key and
    value [1, kv_heads, tokens, head_dim], learned sinks `s_aux` [heads].

    Returns [1, tokens, heads, head_dim]. Queries and keys are already rotated to the positions of the batch.
    Windows are known to the cache (`KVGeometry.windows`).
    """
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise UnsupportedModelError("attention that is not plainly causal is not supported")
    for keyword in UNSUPPORTED_KEYWORDS:
        if asked.get(keyword) is not None:
            raise UnsupportedModelError(f"attention with {keyword} is not supported")
    kv: Batch = BATCH.get()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    return kv.cache.attend(layer, query[0], key[0], value[0], Scoring(scale, s_aux), kv).unsqueeze(0), None


AttentionInterface.register(ATTENTION, attention_through_kv)


def load_model(
    name: str, role: str, dtype: str, device: str, group: Group | None = None, longest: int | None = None
) -> PreTrainedModel:
    """The model with weights in `dtype` on `device`, in evaluation mode, for texts of up to `longest` tokens.
    Safetensors or a GGUF file only, no remote code.

    With a group, this rank's share of the model, by transformers' own tensor-parallel plan; all ranks must load it at
    the same time.
    """
    require(dtype in DTYPES, "dtype", dtype, f"must be one of {', '.join(DTYPES)}")
    where = torch_device(device)
    check_dtype(dtype, where)
    path, config = resolve(name, role), load_config(name, role)
    if group is not None:
        check_ranks(config, name, group.world, "tensor_parallel")
    if stored := method_of(config):
        config.quantization_config["dequantize"] = True
    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            Path(path).parent if is_gguf(path) else path,
            gguf_file=Path(path).name if is_gguf(path) else None,
            quantization_config=GgufConfig(dequantize=True) if is_gguf(path) else None,
            dtype=DTYPES[dtype],
            attn_implementation=ATTENTION,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            config=config,
            key_mapping=NAMES,
            distributed_config=group and DistributedConfig(tp_size=group.world, tp_plan="auto"),
        )
    except Exception as error:  # the code of any architecture runs here, with any configuration
        if out_of_memory(error):
            raise too_large(role, name, error) from None
        if ATTENTION in reason_of(error):  # the architecture looks it up among its own classes
            raise UnsupportedModelError(f"model {name!r}: {OWN_ATTENTION} ({error}): {CAUSAL_LM}") from None
        raise UnknownModelError(role, name, f"holds no weights that load ({reason_of(error)})") from None
    if stored is None:
        check_stored(name, role)  # again: a hub id's files are only now here
    model, info = loaded
    unused = complete(model, path) if is_gguf(path) else info["unexpected_keys"]
    unused = [key for key in unused if not is_of_another_part(key) and not (stored and key.endswith(PASSED_OVER))]
    check_weights(model, name, role, [*info["missing_keys"], *info["mismatched_keys"]], unused)
    if stored:
        log.info("%s: dequantised from %s to %s", name, stored, dtype)
    try:
        model.to(where).eval()
    except RuntimeError as error:
        if out_of_memory(error):
            raise too_large(role, name, error) from None
        raise
    fix_longrope(model, longest)
    if group is not None:
        group.barrier()  # ranks may load at different speeds, but passes have a deadline
    check_attention(model, name)
    return model  # type: ignore[no-any-return]


def check_weights(model: PreTrainedModel, name: str, role: str, absent: list[object], unused: list[str]) -> None:
    """Raise `UnknownModelError` unless the model has got the weights that it needs, and no more were there."""
    if absent:
        some = ", ".join(sorted(map(str, absent))[:3])
        raise UnknownModelError(role, name, f"lacks weights or holds them in other shapes: {some}")
    if unused:
        some = f"{len(unused)} weights that {type(model).__name__} has not: {', '.join(sorted(unused)[:3])}"
        raise UnknownModelError(role, name, f"holds {some}: serve the checkpoint as it was published, unquantised")
    if odd := [key for key, weight in model.named_parameters() if weight.dtype not in DTYPES.values()]:
        raise UnknownModelError(role, name, f"lacks the scale of {odd[0]}, which is quantised: download it again")


def too_large(role: str, name: str, error: Exception) -> InvalidValueError:
    return InvalidValueError(role, name, f"takes more memory than there is ({reason_of(error)})")


class Recorded(FullKV):
    """A full cache that records which layers called it."""

    def __init__(self, geometry: KVGeometry) -> None:
        super().__init__(geometry, sum(PASSES), reference)
        self.layers: list[int] = []

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, batch: Batch) -> Tensor:
        self.layers.append(layer)
        geometry = self.geometry
        shape = (geometry.num_kv_heads, query.shape[1], geometry.head_dim)
        if keys.shape != shape or values.shape != shape:
            raise UnsupportedModelError(f"KV of shape {tuple(keys.shape)} where its configuration says {shape}")
        return super().attend(layer, query, keys, values, scoring, batch)


@torch.inference_mode()
def check_attention(model: PreTrainedModel, name: str) -> None:
    """Raise `UnsupportedModelError` unless eight tokens in two passes, attending through one of our caches, have the
    logits that they have in one pass with transformers' own attention.

    This reveals what the configuration does not say: layers without attention, attention of other code. Windows are
    narrowed for it, so that eight tokens are longer than they.
    """
    vocab = model.config.vocab_size
    # Tokens from all over the vocabulary, because its first and last ones are often untrained.
    tokens = tuple(vocab * (index + 1) // (sum(PASSES) + 1) for index in range(sum(PASSES)))
    window = getattr(model.config, "sliding_window", None)
    if window:
        model.config.sliding_window = min(window, NARROW)
    kv = Recorded(kv_geometry(model))
    runner, spec = ModelRunner(model, kv), SequenceSpec(SamplingParams(), 0, sum(PASSES), sum(PASSES))
    inputs = torch.tensor([tokens, range(sum(PASSES))], device=model.device)
    try:
        parts = [
            runner.forward([Forward(Span(0, 0, tokens[:stop], spec), count)])[0]
            for count, stop in zip(PASSES, accumulate(PASSES), strict=True)
        ]
        model.set_attn_implementation("eager")
        whole = model(input_ids=inputs[:1], position_ids=inputs[1:], use_cache=False).logits[0].float()
        model.set_attn_implementation(ATTENTION)
    except Exception as error:  # the code of any architecture may run here
        raise UnsupportedModelError(f"model {name!r}: {OWN_ATTENTION} ({reason_of(error)}): {CAUSAL_LM}") from None
    finally:
        if window:
            model.config.sliding_window = window
    if kv.layers != list(range(model.config.num_hidden_layers)) * len(PASSES):
        raise UnsupportedModelError(f"model {name!r}: {OWN_ATTENTION} in all layers: {CAUSAL_LM}")
    if not whole.isfinite().all():
        rule = f"its logits are not finite in {model.dtype}: choose another dtype, or download its weights again"
        raise UnsupportedModelError(f"model {name!r}: {rule}")
    found = max(distance(ours, theirs) for ours, theirs in zip(parts, whole.split(PASSES), strict=True))
    if not found <= TOLERANCE[model.dtype]:
        rule = f"attention through our caches changes its logits by {found:.1%}, which is more than rounding"
        raise UnsupportedModelError(f"model {name!r}: {rule}")


def distance(ours: Tensor, theirs: Tensor) -> float:
    """By how much logits differ, as a share of their own size: the median over the tokens, because a token whose
    experts are chosen by a narrow margin may differ more by rounding alone. Both [tokens, vocab].
    """
    spread = (theirs - theirs.mean(-1, keepdim=True)).norm(dim=-1)
    return float(((ours - theirs).norm(dim=-1) / spread.clamp_min(TINY)).median())


def kv_geometry(model: PreTrainedModel) -> KVGeometry:
    """The shape of the model's KV, from its configuration; that of this rank's share if the model is divided."""
    layers, kv_heads, head_dim = kv_shape(model.config)
    ours = kv_heads // (model.tp_size or 1)
    return KVGeometry(layers, ours, head_dim, model.dtype, model.device, Windows(*windows(model.config)))
