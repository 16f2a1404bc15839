"""The two models of the pair as plain `transformers` Llamas: first weights, losses, and the target's text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from triforce_tools.demo_training.corpus import EOS, Tokens
from triforce_tools.demo_training.settings import Shape

VOCAB_SIZE = 4096
ROWS = 32  # texts that the target writes at a time
PROMPT = 64  # tokens of the corpus that each of them begins with
NEW = 192  # generated tokens of each

_SHARPNESS = 7.0  # amplitude of a positional head's query and key in each rotary pair
_MATCH = 4.0  # row norm of a matching head's query and key maps
_EMBEDDING = 0.08  # standard deviation of the embeddings: too large for the first training steps to erase the heads
_CARRIED = 3.5 * _EMBEDDING  # gain of a positional head's output
_COPIED = 5.0 * _EMBEDDING  # gain of a matching head's output


def build_model(shape: Shape, *, max_positions: int, seed: int) -> LlamaForCausalLM:
    """A model with fresh weights in float32 that depend on the seed only. With two layers or more it has induction
    heads.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        **shape.model_dump(exclude={"rope_theta"}),
        num_key_value_heads=shape.num_attention_heads,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=EOS,
        eos_token_id=EOS,
    )
    model = LlamaForCausalLM(config)
    if shape.num_hidden_layers >= 2:
        plant_induction(model, shape, torch.Generator().manual_seed(seed))
    return model


@torch.no_grad()
def plant_induction(model: LlamaForCausalLM, shape: Shape, generator: torch.Generator) -> None:
    """Give a fresh model induction heads, which it would learn only from far more tokens than a CPU can train on.

    An induction head predicts the token that followed an earlier occurrence of the latest tokens (Olsson et al. 2022).
    It takes two layers. Heads of the first copy the tokens one, two … places back to each position. Heads of the second
    look for the position whose copied tokens equal the latest tokens, and write the token at that position. Both are
    linear maps between random projections, so they can be constructed directly; training then adapts them. Half of the
    heads of the two layers are set, and all other maps into the residual stream become zero.
    """
    hidden, size, heads = shape.hidden_size, shape.head_dim, (shape.num_attention_heads + 1) // 2
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    # Coordinate 0 is the same for all tokens, so a head can ignore their content; it shifts all logits equally.
    embedding = model.model.embed_tokens.weight
    embedding *= _EMBEDDING / model.config.initializer_range
    embedding[:, 0] = _EMBEDDING * math.sqrt(hidden)
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    frequencies = model.model.rotary_emb.inv_freq
    directions, copied = _orthonormal(hidden, generator), _orthonormal(hidden, generator)
    width = min(size // 2, (hidden - 1) // (heads + 1))  # how many coordinates of a token are carried
    content, *carried = directions[: (heads + 1) * width].split(width)

    num_pairs = 3 * size // 16  # the slowest rotary pairs: they hardly turn within the context
    slow = [size // 2 - 1 - pair for pair in range(num_pairs)]
    dims = torch.tensor(slow + [size // 2 + pair for pair in slow])
    per_token = len(dims) // heads
    ratio = _EMBEDDING / (_CARRIED * math.sqrt(0.5))  # scale of a token's own coordinates relative to carried ones
    for head in range(heads):
        rows = slice(head * size, (head + 1) * size)
        _look_back(first.q_proj.weight[rows], first.k_proj.weight[rows], head + 1, frequencies)
        first.v_proj.weight[rows] = 0
        first.v_proj.weight[rows][:width] = content
        first.o_proj.weight[:, rows][:, :width] = _CARRIED * carried[head].T

        query, key = second.q_proj.weight[rows], second.k_proj.weight[rows]
        query[dims], key[dims] = 0.0, 0.0
        # Match the token `back` places before the query with the one `back` + 1 places before the key.
        for back in range(heads):
            mine = dims[back * per_token : (back + 1) * per_token]
            some = (torch.arange(per_token) + head * per_token) % width
            query[mine] = _MATCH * (content[some] if back == 0 else ratio * carried[back - 1][some])
            key[mine] = _MATCH * carried[back][some]
        taken = copied[(torch.arange(size) + head * size) % (hidden - 1)]
        second.v_proj.weight[rows] = taken
        second.o_proj.weight[:, rows] = _COPIED * taken.T


def _look_back(query: Tensor, key: Tensor, distance: int, frequencies: Tensor) -> None:
    """Make a head attend `distance` tokens back, independently of the tokens: its score is Σ cos(frequency × (Δ −
    distance)).

    Args:
        query, key: the head's maps, [head_dim, hidden], written in place; coordinate 0 of their input is constant.
        frequencies: of the rotary pairs, [head_dim / 2]; pair i is the coordinates i and i + head_dim / 2.
    """
    half = len(frequencies)
    fast = frequencies > 0.03
    amplitude = _SHARPNESS / math.sqrt(query.shape[1] / 2)  # the root is coordinate 0 after the norm
    query[:], key[:] = 0.0, 0.0
    query[:half, 0] = amplitude * fast
    key[:half, 0] = amplitude * fast * torch.cos(distance * frequencies)
    key[half:, 0] = amplitude * fast * torch.sin(distance * frequencies)


def _orthonormal(hidden: int, generator: torch.Generator) -> Tensor:
    """Orthonormal directions in which coordinate 0 is zero, [hidden - 1, hidden]."""
    square = torch.linalg.qr(torch.randn(hidden - 1, hidden - 1, generator=generator)).Q
    return torch.cat([torch.zeros(hidden - 1, 1), square], dim=1)


def logits(model: LlamaForCausalLM, ids: Tensor, positions: Tensor) -> Tensor:
    """Logits of a causal pass over ids and rising positions, [rows, length] int64 each; [rows, length, vocab].

    The layers are called one by one, because the model's `forward` would take jumping positions for borders of packed
    texts.
    """
    hidden = model.model.embed_tokens(ids)
    rotary = model.model.rotary_emb(hidden, positions)
    for layer in model.model.layers:
        hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
    scores: Tensor = model.lm_head(model.model.norm(hidden))
    return scores


def losses(
    model: LlamaForCausalLM, teacher: LlamaForCausalLM | None, ids: Tensor, positions: Tensor, labels: Tensor
) -> Tensor:
    """Cross entropy of each label or, with a teacher, KL(teacher ‖ model), nats, [rows, length] float32."""
    scores = logits(model, ids, positions).float()
    if teacher is None:
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    with torch.no_grad():
        log_p = F.log_softmax(logits(teacher, ids, positions).float(), dim=-1)
    return (log_p.exp() * (log_p - F.log_softmax(scores, dim=-1))).sum(-1)


def written_by_target(target: LlamaForCausalLM, corpus: Tokens, path: Path, *, num_tokens: int, seed: int) -> Tokens:
    """At least `num_tokens` tokens of prompts from the corpus and the target's continuations, kept in the file `path`.

    The drafter is trained on such text last, because it drafts such text in decoding. Every other batch is greedy; the
    others are sampled at temperature 1.
    """
    if not path.is_file():
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            for number in range(-(-num_tokens // (ROWS * (PROMPT + NEW)))):
                file.write(_written(target, corpus, (seed, number), greedy=number % 2 == 1).tobytes())
        partial.replace(path)
    return np.memmap(path, dtype=np.uint16, mode="r")


def _written(target: LlamaForCausalLM, corpus: Tokens, seed: tuple[int, int], *, greedy: bool) -> Tokens:
    """A batch of prompts and continuations, [ROWS, PROMPT + NEW]; it depends on the seed only."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(len(corpus) - PROMPT, size=ROWS)
    prompts = torch.from_numpy(np.stack([corpus[start : start + PROMPT] for start in starts]).astype(np.int64))
    torch.manual_seed(int(rng.integers(2**63)))
    model: Any = target  # transformers' models do not match its annotation of `generate`
    with torch.inference_mode(), torch.autocast(target.device.type, torch.bfloat16):
        texts: Tensor = model.generate(
            prompts.to(target.device), min_new_tokens=NEW, max_new_tokens=NEW, do_sample=not greedy, top_k=0
        )
    return texts.cpu().numpy().astype(np.uint16)
