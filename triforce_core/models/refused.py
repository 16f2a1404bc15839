"""What a model's configuration may say, and its folder may hold or lack, that this engine does not support: one row for
each kind, with the way out.

To refuse another kind, add a row to `REFUSED`, `FILES` or `TOKENIZERS`, and a case to
`tests/unit/core/models/test_refused.py`.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from transformers.configuration_utils import PretrainedConfig

from triforce_core.errors import UnknownModelError, UnsupportedModelError
from triforce_core.models.dequantise import method_of, missing_package

SLIDING = "sliding_attention"  # the kind of a layer with a window, in `layer_types`
# Kinds whose frequencies do not depend on the current length. longrope.py fixes those of longrope, unless kinds of
# layers have each their own.
SUPPORTED_ROPE = {"default", "linear", "llama3", "longrope", "yarn"}
OWN_ATTENTION = ("bloom", "mpt")  # kinds that compute it within the model, with a bias by distance
CAUSAL = ("ForCausalLM", "LMHeadModel")  # how transformers' classes of causal language models end


class Refused(NamedTuple):
    # What the configuration says, as `field = value`, or which files the folder has; empty if this row does not apply.
    what: Callable[[Any], str]
    rule: str
    way_out: str


def said(field: str, value: object) -> str:
    return f"{field} = {value!r}" if value else ""


def set_to_anything(field: str) -> Callable[[Any], str]:
    return lambda config: said(field, getattr(config, field, None))


def no_size(field: str) -> Callable[[Any], str]:
    def what(config: Any) -> str:
        value = getattr(config, field, None)
        return "" if isinstance(value, int) and value > 0 else f"{field} = {value!r}"

    return what


def several_models(config: Any) -> str:
    parts = sorted(type(config).sub_configs)
    return f"model_type = {config.model_type!r}, made of parts ({', '.join(parts)})," if parts else ""


def quantization(config: Any) -> str:
    """The older of compressed-tensors' formats names its field otherwise."""
    if method_of(config):
        return ""
    found = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if not isinstance(found, dict):
        return said("quantization_config", found)
    form = found.get("quant_algo") or found.get("format") if "quant_method" in found else None  # such as NVFP4
    return said("quantization_config", found.get("quant_method", found)) + (f" ({form})" if form else "")


def lacking_package(config: Any) -> str:
    package = missing_package(config)
    return f"quantization_config = {method_of(config)!r}: the package {package}" if package else ""


def own_attention(config: Any) -> str:
    return said("model_type", config.model_type) if config.model_type in OWN_ATTENTION else ""


def layer_kinds(config: Any) -> str:
    kinds = getattr(config, "layer_types", None) or []
    return said("layer_types", sorted(set(kinds) - {"full_attention", SLIDING}))


def no_window(config: Any) -> str:
    """Of layers that are said to have one."""
    sliding = SLIDING in (getattr(config, "layer_types", None) or [])
    return no_size("sliding_window")(config) if sliding or getattr(config, "sliding_window", None) else ""


def rope(config: Any) -> str:
    found = getattr(config, "rope_parameters", None) or {}
    every = [
        found,
        *(each for each in found.values() if isinstance(each, dict)),
    ]  # some have one for each kind of layer
    kinds = [(each is found, each.get("rope_type", "default")) for each in every]
    odd = [kind for sole, kind in kinds if kind not in SUPPORTED_ROPE or (kind == "longrope" and not sole)]
    return f"rope_type = {odd[0]!r}" if odd else ""


def own_longrope(config: Any) -> str:
    """Phi-3.5-MoE computes its LongRoPE in its own way, by the longest text of a pass."""
    found = getattr(config, "rope_parameters", None) or {}
    return said("rope_parameters", sorted({"long_mscale", "short_mscale"} & found.keys()))


def no_causal_model(config: Any) -> str:
    names = getattr(config, "architectures", None) or []
    names = [names] if isinstance(names, str) else names
    return "" if not names or any(str(name).endswith(CAUSAL) for name in names) else f"architectures = {names!r}"


def no_divisor(config: Any) -> str:
    kv_heads = getattr(config, "num_key_value_heads", None)
    fits = kv_heads is None or (
        no_size("num_key_value_heads")(config) == "" and config.num_attention_heads % kv_heads == 0
    )
    return "" if fits else f"num_key_value_heads = {kv_heads!r}"


NOT = "is not supported"
SIZE = "must be a whole number of at least 1"
WHOLE = "serve a model in which every layer attends to the whole text or to a sliding window"
CAUSAL_LM = "serve a causal language model, such as Llama or Qwen"
UNQUANTISED = "serve its unquantised weights; retrieval.quantization quantises the retrieval tier's copy of them"
DOWNLOAD = "compare config.json with the published one"

# In this order, so that a model is refused for what it is, rather than for what therefore lacks.
REFUSED = [
    Refused(set_to_anything("is_encoder_decoder"), NOT, CAUSAL_LM),
    Refused(own_attention, "computes attention in a way that cannot be replaced", CAUSAL_LM),
    Refused(several_models, NOT, "serve a model of its family that takes and gives text alone"),
    Refused(no_causal_model, f"names no causal language model ({' or '.join(f'*{end}' for end in CAUSAL)})", CAUSAL_LM),
    Refused(quantization, NOT, UNQUANTISED),
    Refused(lacking_package, "must be installed to read it", "pip install compressed-tensors"),
    Refused(set_to_anything("transformers_weights"), NOT, "name the file of the weights model.safetensors instead"),
    Refused(set_to_anything("is_heterogeneous"), NOT, "serve a model whose layers are all alike"),
    Refused(layer_kinds, NOT, WHOLE),
    Refused(rope, f"must be one of {', '.join(sorted(SUPPORTED_ROPE))}", "serve a model with one of these"),
    Refused(own_longrope, NOT, "serve a model whose rotary embeddings do not depend on the length of texts"),
    Refused(set_to_anything("attn_logit_softcapping"), NOT, "serve a model without it"),
    Refused(set_to_anything("attention_chunk_size"), NOT, WHOLE),
    Refused(set_to_anything("kv_lora_rank"), NOT, "serve a model without latent attention"),
    *(
        Refused(no_size(field), SIZE, f"{DOWNLOAD}; a model of another kind, without it, is not supported")
        for field in (
            "num_attention_heads",
            "num_hidden_layers",
            "hidden_size",
            "vocab_size",
            "max_position_embeddings",
        )
    ),
    Refused(no_window, SIZE, DOWNLOAD),
    Refused(no_divisor, "must be a divisor of num_attention_heads", DOWNLOAD),
]


def files(*patterns: str, without: str = "", unless_installed: str = "") -> Callable[[Path], str]:
    """Whether a folder has a file of these patterns and none of the pattern `without`, and a package is missing."""

    def what(folder: Path) -> str:
        found = sorted(path.name for pattern in patterns for path in folder.glob(pattern))
        spared = (without and any(folder.glob(without))) or (unless_installed and find_spec(unless_installed))
        return "" if spared or not found else found[0]

    return what


def no_tokenizer(folder: Path) -> str:
    known = (
        "tokenizer.json",
        "*.model",
        "*.tiktoken",
        "tekken.json",
        "vocab.json",
        "vocab.txt",
    )
    return "" if any(any(folder.glob(pattern)) for pattern in known) else "no tokenizer.json"


SAVE = "load it with transformers where you trust it, and save it with save_pretrained"
FILES = [
    Refused(
        files("adapter_config.json"),
        "belongs to a LoRA or another adapter, which is not supported",
        "merge it into its model (merge_and_unload of peft), and serve that",
    ),
    Refused(files("shard-*.safetensors"), "belongs to a distributed checkpoint", "save it with save_pretrained"),
    Refused(
        files("*.bin", "*.pth", "*.pt", "*.ckpt", without="*.safetensors"),
        "could run code when it is loaded, and there are no safetensors",
        f"take the checkpoint's safetensors, or {SAVE}",
    ),
]
TOKENIZERS = [
    Refused(
        no_tokenizer,
        "is there, nor another tokenizer",
        "copy tokenizer.json and tokenizer_config.json from the published checkpoint",
    ),
    Refused(
        files("tokenizer.model", "spiece.model", without="tokenizer.json", unless_installed="sentencepiece"),
        "alone needs packages that are not installed",
        "copy tokenizer.json from the published checkpoint, or pip install sentencepiece tiktoken",
    ),
]


def check_files(folder: Path, name: str, role: str, rows: list[Refused]) -> None:
    """Raise `UnknownModelError` for a folder to which one of the rows applies."""
    for row in rows:
        if what := row.what(folder):
            raise UnknownModelError(role, name, f"{what} {row.rule}: {row.way_out}")


def check_supported(config: PretrainedConfig, name: str) -> None:
    """Raise `UnsupportedModelError` for a feature that this engine lacks and that changes the model's output."""
    for row in REFUSED:
        if what := row.what(config):
            raise UnsupportedModelError(f"model {name!r}: {what} {row.rule}: {row.way_out}")
