"""GGUF files of small random models, written as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants
from transformers import PreTrainedModel

TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
BYTES = 256


def spelled(byte: int) -> str:
    """A byte as byte-level tokenizers spell it."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return chr(byte) if byte in printable else chr(256 + [b for b in range(256) if b not in printable].index(byte))


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Queries' or keys' rows as llama.cpp rotates them: the two halves of a head interleaved."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: str,
    stored: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    extra: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> str:
    """Write a model whose vocabulary are the 256 bytes. `extra`: fields, by their whole names, in place of the usual
    ones; None leaves one out. `tensors`: more of them.
    """
    config: Any = model.config
    fields: dict[str, Any] = {
        f"{kind}.context_length": config.max_position_embeddings,
        f"{kind}.embedding_length": config.hidden_size,
        f"{kind}.feed_forward_length": config.intermediate_size,
        f"{kind}.block_count": config.num_hidden_layers,
        f"{kind}.attention.head_count": config.num_attention_heads,
        f"{kind}.attention.head_count_kv": config.num_key_value_heads,
        f"{kind}.attention.key_length": getattr(config, "head_dim", 16),
        f"{kind}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{kind}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*(spelled(byte) for byte in range(BYTES - 1)), "ab"],  # no text has the last byte
        "tokenizer.ggml.token_type": [1] * BYTES,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 7,
        "tokenizer.ggml.eot_token_id": 9,
        "tokenizer.chat_template": TEMPLATE,
    }
    writer = GGUFWriter(path, kind)
    for name, value in (fields | (extra or {})).items():
        if value is not None:
            of_kind = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
            add: Any = of_kind.get(type(value), writer.add_string if isinstance(value, str) else writer.add_array)
            add(name, value)
    names = get_tensor_name_map(next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == kind), 8)
    for name, weight in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        values = weight.float().numpy()
        if kind == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            values = permuted(values, heads)
        if suffix == "gate_up_proj":  # of all experts
            for part, each in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                add_tensor(writer, f"blk.{stem.split('.')[2]}.ffn_{part}_exps.weight", each, stored)
        elif suffix == "down_proj":
            add_tensor(writer, f"blk.{stem.split('.')[2]}.ffn_down_exps.weight", values, stored)
        else:
            add_tensor(writer, f"{names.get_name(stem)}.{suffix}", values, stored)
    for name, values in (tensors or {}).items():
        add_tensor(writer, name, values, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def add_tensor(writer: GGUFWriter, name: str, values: np.ndarray, stored: GGMLQuantizationType) -> None:
    """Vectors, such as norms and biases, are never quantised."""
    kind = stored if values.ndim > 1 else GGMLQuantizationType.F32
    writer.add_tensor(name, quants.quantize(values.copy(), kind), raw_dtype=kind)


def as_stored(model: PreTrainedModel, stored: GGMLQuantizationType) -> PreTrainedModel:
    """Round the matrices of a model, in place, to what a file of this type holds."""
    for weight in model.parameters():
        if weight.ndim > 1:
            rounded = quants.dequantize(quants.quantize(weight.detach().numpy(), stored), stored)
            weight.data.copy_(weight.data.new_tensor(rounded))
    return model
