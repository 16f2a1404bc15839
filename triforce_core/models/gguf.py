"""GGUF files of the families Llama and Qwen: the configuration that a file's metadata stand for, and what of a file
transformers' reader leaves out. The reader dequantises the weights, and builds the tokenizer with its chat template.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig
from transformers.configuration_utils import PretrainedConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

KINDS = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}  # to transformers' names
FIELDS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
OPTIONAL = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
ROPE = {"factor": "factor", "original_max_position_embeddings": "original_context_length"}
IGNORED = {"type", "finetuned"}  # of what describes a scaling of RoPE, besides
SPLIT_AS_GPT2 = ("gpt-2", "default")  # what transformers does where it does not know how texts are split into words
DIGITS_APART = ("smollm",)  # the same, and each digit is a word; transformers does not know it
ENDS = ("eos", "eot", "eom")  # of a text, of a turn, of a message that awaits a tool's answer
FACTORS = "rope_freqs.weight"  # by which Llama 3's frequencies are divided, in place of a description of its RoPE


def is_gguf(path: str | Path) -> bool:
    return Path(path).suffix == ".gguf"


def gguf_config(file: str) -> PretrainedConfig:
    """The configuration of a file. Raises many kinds of errors for one that is damaged or cut off, and `ValueError`
    for what this engine does not know.
    """
    from transformers.integrations.gguf.reader import read_gguf_metadata

    metadata, names = read_gguf_metadata(file)
    kind = metadata["general.architecture"]
    if kind not in KINDS:
        raise ValueError(f"architecture {kind!r} must be one of {', '.join(KINDS)}")
    said = {key.removeprefix(f"{kind}."): value for key, value in metadata.items()}
    if lacking := FIELDS.values() - said.keys():
        raise ValueError(f"it lacks {kind}.{min(lacking)}")
    fields = {ours: said[theirs] for ours, theirs in (FIELDS | OPTIONAL).items() if theirs in said}
    heads, width = fields["num_attention_heads"], fields["hidden_size"]
    fields = {"num_key_value_heads": heads, "head_dim": width // heads} | fields
    if said.get("rope.dimension_count", fields["head_dim"]) != fields["head_dim"]:
        raise ValueError(f"{kind}.rope.dimension_count must be the size of a head, {fields['head_dim']}")
    ends = [said[key] for each in ENDS if (key := f"tokenizer.ggml.{each}_token_id") in said]
    return AutoConfig.for_model(
        KINDS[kind],
        **fields,
        vocab_size=said["tokenizer.ggml.tokens"],  # of which the reader tells the number
        rope_parameters=rope(said),
        tie_word_embeddings="output.weight" not in names,
        norm_topk_prob=True,  # of Qwen3's experts; llama.cpp has no field for it
        bos_token_id=said.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=list(dict.fromkeys(ends)) or None,
        pad_token_id=None,
    )


def rope(said: dict[str, Any]) -> dict[str, Any]:
    """The RoPE that metadata describe, in transformers' words; what those cannot say raises `ValueError`."""
    scaling = {key.removeprefix("rope.scaling."): value for key, value in said.items() if "rope.scaling." in key}
    if odd := scaling.keys() - ROPE.values() - IGNORED:
        raise ValueError(f"rope.scaling.{min(odd)} is not supported")
    found = {ours: scaling[theirs] for ours, theirs in ROPE.items() if theirs in scaling}
    if "rope.scale_linear" in said:  # of older files
        found = {"factor": said["rope.scale_linear"]}
    kind = scaling.get("type", "linear" if found.get("factor", 1.0) != 1.0 else "none")
    plain = {"rope_type": "default", "rope_theta": said.get("rope.freq_base", 10000.0)}
    return plain if kind == "none" else plain | {"rope_type": kind} | found


def complete(model: PreTrainedModel, file: str) -> list[str]:
    """Divide the model's RoPE frequencies by the factors that the file holds. Returns the names of the tensors that
    neither this nor transformers' reader, which passes over what it does not know, has read.
    """
    import torch
    from gguf import GGUFReader
    from transformers import modeling_gguf_pytorch_utils as reader

    header = GGUFReader(file)
    kind = header.fields["general.architecture"].contents()
    processor: Any = reader.TENSOR_PROCESSORS.get(kind, reader.TensorProcessor)
    read = {name.removesuffix(".weight") for name in reader.get_gguf_hf_weights_map(model, processor())}
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if FACTORS in tensors:
        frequencies = model.base_model.get_buffer("rotary_emb.inv_freq")
        frequencies /= torch.tensor(tensors.pop(FACTORS).data)  # buffers have no gradients
    types = {tensor.tensor_type.name for tensor in tensors.values() if len(tensor.shape) > 1}
    log.info("%s: dequantised from %s to %s", file, ", ".join(sorted(types)), str(model.dtype).removeprefix("torch."))
    return sorted(name for name in tensors if name.removesuffix(".weight") not in read)


def count_weights(file: str) -> int:
    """The number of weights in a file."""
    from gguf import GGUFReader

    return sum(int(tensor.n_elements) for tensor in GGUFReader(file).tensors)


def split_words(tokenizer: Any, file: str) -> None:
    """Let a tokenizer that transformers made of a file split texts into words as the file says, if transformers does
    not know how.
    """
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    from transformers.integrations.gguf.reader import read_gguf_metadata

    metadata, _ = read_gguf_metadata(file)
    how = metadata.get("tokenizer.ggml.pre", "default")
    if metadata.get("tokenizer.ggml.model") != "gpt2" or how in GGUF_PRE_TOKENIZER_SPLITS or how in SPLIT_AS_GPT2:
        return
    if how in DIGITS_APART:
        apart = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(apart)
    else:
        rule = "is not known here: texts are split into words as for GPT-2, so some tokens may be unusual for the model"
        log.warning("%s: tokenizer.ggml.pre = %r %s", file, how, rule)
