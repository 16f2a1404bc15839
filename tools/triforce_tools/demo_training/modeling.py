"""The two models of the pair as plain `transformers` Llamas, and their losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from triforce_tools.demo_training.corpus import EOS
from triforce_tools.demo_training.planting import plant_induction
from triforce_tools.demo_training.settings import Geometry

VOCAB_SIZE = 4096


def llama_config(geometry: Geometry, *, max_positions: int) -> LlamaConfig:
    """The `transformers` configuration of a geometry; multi-head, tied embeddings."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=geometry.hidden_size,
        intermediate_size=geometry.intermediate_size,
        num_hidden_layers=geometry.layers,
        num_attention_heads=geometry.heads,
        num_key_value_heads=geometry.heads,
        head_dim=geometry.head_dim,
        max_position_embeddings=max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": geometry.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=EOS,
        eos_token_id=EOS,
    )


def build_model(geometry: Geometry, *, max_positions: int, seed: int) -> LlamaForCausalLM:
    """A model with fresh weights in float32 that depend on the seed only. With two layers or more it has induction
    heads.
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM(llama_config(geometry, max_positions=max_positions))
    if geometry.layers >= 2:
        plant_induction(model, geometry, torch.Generator().manual_seed(seed))
    return model


def logits(model: LlamaForCausalLM, ids: Tensor, positions: Tensor) -> Tensor:
    """Logits of a causal pass, [rows, length, vocab].

    The layers are called one by one, because the model's `forward` would take jumping positions for borders of packed
    texts.

    Args:
        ids: [rows, length] int64.
        positions: [rows, length] int64, rising.
    """
    hidden = model.model.embed_tokens(ids)
    rotary = model.model.rotary_emb(hidden, positions)
    for layer in model.model.layers:
        hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
    scores: Tensor = model.lm_head(model.model.norm(hidden))
    return scores


def token_losses(model: LlamaForCausalLM, ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each label, nats, [rows, length] float32."""
    scores = logits(model, ids, positions).float()
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


def distillation_losses(model: LlamaForCausalLM, ids: Tensor, positions: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher ‖ model) at each position, nats, [rows, length] float32.

    Args:
        teacher: logits of the target, [rows, length, vocab].
    """
    log_q = F.log_softmax(logits(model, ids, positions).float(), dim=-1)
    log_p = F.log_softmax(teacher.float(), dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)
