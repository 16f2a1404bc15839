"""A Llama model's folder as a GGUF file, which llama.cpp serves: with the same weights, and what its tokenizer needs to
spell tokens. Prompts are sent as token ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map, quants
from safetensors.torch import load_file

from triforce_core.errors import require

STORED = {
    "float32": GGMLQuantizationType.F32,
    "float16": GGMLQuantizationType.F16,
    "bfloat16": GGMLQuantizationType.BF16,
}


def as_gguf(folder: Path, dtype: str, into: Path) -> Path:
    """The model in this folder, whose matrices get this dtype, as a file in the folder `into`; written if missing."""
    weights, said = folder / "model.safetensors", folder / "config.json"
    there = weights.is_file() and said.is_file()
    require(there, "target.model", folder, "must be a folder with one file of weights for llama.cpp")
    config = json.loads(said.read_text())
    plain = config["model_type"] == "llama" and config.get("rope_parameters", {}).get("rope_type") == "default"
    require(plain, "target.model", folder, "must be a Llama model with default rotation for llama.cpp")
    made = weights.stat()
    path = into / f"{folder.name}-{dtype}-{made.st_size:x}-{made.st_mtime_ns:x}.gguf"
    if path.is_file():
        return path
    part = path.with_suffix(".part")
    writer = GGUFWriter(part, "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), config)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, weight in load_file(weights).items():
        stem, _, suffix = name.rpartition(".")
        values = weight.float().numpy()
        if stem.endswith(("q_proj", "k_proj")):
            values = interleaved(values, heads if stem.endswith("q_proj") else kv_heads)
        kind = STORED[dtype] if values.ndim > 1 else GGMLQuantizationType.F32
        values = quants.quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return part.rename(path)


def add_tokenizer(writer: GGUFWriter, said: dict[str, Any], config: dict[str, Any]) -> None:
    tokens = [""] * config["vocab_size"]
    kinds = [TokenType.UNUSED] * config["vocab_size"]
    for token, number in said["model"]["vocab"].items():
        tokens[number], kinds[number] = token, TokenType.NORMAL
    for added in said["added_tokens"]:
        tokens[added["id"]], kinds[added["id"]] = added["content"], TokenType.CONTROL
    merges = said["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token or f"[unused {number}]" for number, token in enumerate(tokens)])
    writer.add_token_types(kinds)
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Queries' or keys' rows as llama.cpp rotates them: the two halves of a head interleaved."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
