"""A model's files without its weights: configuration, tokenizer, end-of-sequence tokens.

Models with features that this engine does not support are refused here, naming the feature. Processes that run no model
import this module alone, in half the time of load.py.
"""

import json
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import hf_hub_download, try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.configuration_utils import PretrainedConfig

from triforce_core.demo import smollm2_file, weights_dir
from triforce_core.errors import UnknownModelError, UnsupportedModelError, reason_of, require
from triforce_core.models.dequantise import method_of
from triforce_core.models.gguf import gguf_config, is_gguf, split_words
from triforce_core.models.refused import FILES, NOT, SLIDING, TOKENIZERS, UNQUANTISED, check_files, check_supported
from triforce_core.models.text_part import text_part

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NOT_DIVIDED = "weights that are dequantised at load are not divided over ranks: serve an unquantised checkpoint"
NOT_GGUF = "download it again, or serve the model's safetensors"
FLOATS = {"F64", "F32", "F16", "BF16"}  # the dtypes of weights that are not quantised, as safetensors names them


def resolve(name: str, role: str) -> str:
    """The path or hub id that transformers loads: `demo` names the demo pair; any other name is a directory or a GGUF
    file, or else a hub id.

    `role` is `target`, `drafter` or `self-drafter`; errors name it as their field.
    """
    if name == "demo":
        return str(weights_dir(role))
    if name == "smollm2":
        return str(smollm2_file(role))
    path = Path(name).expanduser()
    if path.exists() or is_gguf(path) or name.startswith(("/", ".", "~")):
        check_files(path.parent if is_gguf(path) else path, name, role, FILES[:1])  # transformers would apply it
        if not (path if is_gguf(path) else path / "config.json").is_file():
            raise UnknownModelError(role, name, "is not a directory with a config.json, or a *.gguf file")
        return str(path)
    return name


def load_config(name: str, role: str) -> PretrainedConfig:
    """The model's configuration, checked for what this engine supports."""
    path = resolve(name, role)
    try:
        if is_gguf(path):
            config = gguf_config(path)
        else:
            config = text_part(AutoConfig.from_pretrained(path, trust_remote_code=False))
    except Exception as error:  # configurations raise many kinds of errors for wrong values
        rule = f"is neither a model directory nor a hub id that loads ({reason_of(error)})"
        if is_gguf(path):
            rule = f"is no GGUF file that loads ({reason_of(error)}): {NOT_GGUF}"
        raise UnknownModelError(role, name, rule) from None
    check_supported(config, name)
    if method_of(config) is None:
        check_stored(name, role)
    # A configuration may name code on the hub as its implementation. The engine chooses its own.
    config._attn_implementation = config._experts_implementation = None
    return config


def weight_files(name: str, role: str) -> list[Path] | None:
    """The files of the model's weights, which need not exist; None for a hub id that is not downloaded.

    Raises `UnknownModelError` for an index that names anything but safetensors files in the model's own folder: other
    files could run code when they are loaded, or be anyone's.
    """
    path = resolve(name, role)
    if is_gguf(path):
        return [Path(path)]
    folder = Path(path)
    if not folder.is_dir():
        cached = try_to_load_from_cache(path, "config.json")
        if not isinstance(cached, str):
            return None
        folder = Path(cached).parent
        with suppress(OSError):  # there is no index, or the hub cannot be reached
            hf_hub_download(path, INDEX)
    check_files(folder, name, role, FILES)
    index = folder / INDEX
    if (folder / SINGLE).exists() or not index.exists():
        return [folder / SINGLE]
    try:
        found = json.loads(index.read_bytes())
        names = sorted({str(each) for each in found["weight_map"].values()})
        found["metadata"].keys()  # transformers reads it, too
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise UnknownModelError(role, name, f"has a {INDEX} that is none: download it again") from None
    for each in names:
        if Path(each).name != each or not each.endswith(".safetensors"):
            rule = f"must hold all files that its {INDEX} names, as *.safetensors in the same folder: {each!r} is not"
            raise UnknownModelError(role, name, rule)
    return [folder / each for each in names]


def check_stored(name: str, role: str) -> None:
    """Raise `UnsupportedModelError` for weights that are stored quantised, by the headers of the files that are here.

    transformers would load them as they are, without their scales.
    """
    for file in weight_files(name, role) or []:
        if is_gguf(file):
            continue  # it tells how its weights are stored, and loading dequantises them
        try:
            with safe_open(file, "numpy") as tensors:
                stored = {key: tensors.get_slice(key).get_dtype() for key in tensors.keys()}  # noqa: SIM118  # no dict
        except (OSError, SafetensorError):
            continue  # missing or damaged, as loading will say
        for key, dtype in stored.items():
            if key.endswith("weight") and dtype not in FLOATS:
                rule = f"its weights are stored as {dtype} ({key}), which {NOT}"
                raise UnsupportedModelError(f"model {name!r}: {rule}: {UNQUANTISED}")


def context_length(config: PretrainedConfig) -> int:
    """The most tokens, prompt and output together, that the model's positions allow."""
    return int(config.max_position_embeddings)


def kv_shape(config: PretrainedConfig) -> tuple[int, int, int]:
    """The numbers of layers and of KV heads, and the dimension of a head."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return config.num_hidden_layers, kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def windows(config: PretrainedConfig) -> tuple[int, frozenset[int]]:
    """The length in tokens of the model's sliding windows, and the layers that have one; 0 and none for no windows."""
    size = getattr(config, "sliding_window", None)
    if not size or not getattr(config, "use_sliding_window", True):
        return 0, frozenset()
    kinds = getattr(config, "layer_types", None) or [SLIDING] * config.num_hidden_layers
    layers = frozenset(layer for layer, kind in enumerate(kinds) if kind == SLIDING)
    return size if layers else 0, layers


def check_ranks(config: PretrainedConfig, name: str, world: int, field: str) -> None:
    """Raise an error for a model that cannot be divided over `world` ranks; `field` is the setting that asks for it."""
    if world == 1:
        return
    if is_gguf(resolve(name, "target")) or method_of(config):
        raise UnsupportedModelError(f"model {name!r}: {field} = {world}: {NOT_DIVIDED}")
    if not getattr(config, "base_model_tp_plan", None):
        raise UnsupportedModelError(f"model {name!r}: transformers has no tensor-parallel plan for {config.model_type}")
    for what, heads in (("attention", config.num_attention_heads), ("KV", kv_shape(config)[1])):
        require(heads % world == 0, field, world, f"must divide the {heads} {what} heads of {name!r}")


def check_tokenizer(name: str, role: str = "target") -> None:
    """Raise `UnknownModelError` if the model's folder is here and has no tokenizer that loads, by its files' names."""
    if (folder := Path(resolve(name, role))).is_dir():
        check_files(folder, name, role, TOKENIZERS)


def load_tokenizer(name: str, role: str = "target") -> Any:
    """The model's tokenizer, as transformers loads it."""
    check_tokenizer(name, role)  # transformers makes an empty one of nothing
    path = resolve(name, role)
    try:
        if not is_gguf(path):
            return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        with TemporaryDirectory() as empty:  # it would prefer files beside the GGUF file, which may be another model's
            file = str(Path(path).absolute())
            tokenizer = AutoTokenizer.from_pretrained(empty, gguf_file=file, trust_remote_code=False)
        split_words(tokenizer, path)
        return tokenizer
    except Exception as error:  # tokenizers raise bare `Exception`s
        raise UnknownModelError(role, name, f"has no tokenizer that loads ({reason_of(error)})") from None


def generation_config(name: str) -> dict[str, Any]:
    """What the target's generation_config.json states; nothing where there is none."""
    path = resolve(name, "target")
    try:
        # A GGUF file holds the ids itself; a file beside it may be another model's.
        return {} if is_gguf(path) else GenerationConfig.from_pretrained(path).to_diff_dict()
    except OSError:
        return {}
    except Exception as error:  # as for configurations
        rule = f"has a generation_config.json that does not load ({reason_of(error)})"
        raise UnknownModelError("target", name, rule) from None


def stop_token_ids(name: str) -> tuple[int, ...]:
    """The target's end-of-sequence ids, from its generation config where there is one, else from its configuration."""
    config, found = load_config(name, "target"), generation_config(name).get("eos_token_id")
    found = config.eos_token_id if found is None else found
    ids = found if isinstance(found, list) else [] if found is None else [found]
    size = config.vocab_size
    right = all(isinstance(each, int) and 0 <= each < size for each in ids)
    rule = f"must have token ids below {size}, its vocabulary, as eos_token_id, not {found!r}: correct it in"
    require(right, "target", name, f"{rule} generation_config.json, or in config.json if there is none")
    return tuple(ids)


def end_token_ids(tokenizer: Any) -> tuple[int, ...]:
    """The tokenizer's end-of-sequence id, which usually is one of the model's; empty if it has none."""
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)


OR_NONE = "or set draft.model: ngram, which needs no model"


def check_pair(target: str, drafter: str | None) -> None:
    """Raise an error for models whose vocabularies differ, because tiers exchange token ids. Loads no weights.

    The sizes must agree, and the vocabularies too if the drafter has a tokenizer. `drafter` may be None.
    """
    target_config = load_config(target, "target")
    if drafter is None:
        return
    sizes = [target_config.vocab_size, load_config(drafter, "drafter").vocab_size]
    rule = f"has {sizes[1]} tokens: must have the target's {sizes[0]}, {OR_NONE}"
    require(sizes[0] == sizes[1], "drafter", drafter, rule)
    try:
        theirs = load_tokenizer(drafter, "drafter").get_vocab()
    except UnknownModelError:
        return
    same = theirs == load_tokenizer(target).get_vocab()
    rule = f"has a vocabulary other than that of the target {target!r}: take another, {OR_NONE}"
    require(same, "drafter", drafter, rule)


def check_self_drafter(target: str, name: str) -> None:
    """Raise an error for a model of the retrieval tier whose vocabulary or KV shape differs from the target's."""
    ours, theirs = load_config(target, "target"), load_config(name, "self-drafter")
    for what, one, other in (
        ("a vocabulary of {} tokens", ours.vocab_size, theirs.vocab_size),
        ("KV of {} (layers, KV heads, dimension)", kv_shape(ours), kv_shape(theirs)),
        ("sliding windows of {} (tokens, layers)", windows(ours), windows(theirs)),
    ):
        rule = f"has {what.format(other)}: must have the target's {one}"
        require(one == other, "retrieval.model", name, rule)
