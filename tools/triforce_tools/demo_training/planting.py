"""Gives a fresh model induction heads. It would learn them only from far more tokens than a CPU can train on.

An induction head predicts the token that followed an earlier occurrence of the latest tokens (Olsson et al. 2022). It
takes two layers. Heads of the first layer copy the tokens one, two … places back to each position. Heads of the second
layer look for the position whose copied tokens equal the latest tokens, and write the token at that position. Both are
linear maps between random projections, so they can be constructed directly; training then adapts them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from triforce_tools.demo_training.settings import Geometry

_SHARPNESS = 7.0  # amplitude of a positional head's query and key in each rotary pair
_MATCH = 4.0  # row norm of a matching head's query and key maps
_EMBEDDING = 0.08  # standard deviation of the embeddings: too large for the first training steps to erase the heads
_CARRIED = 3.5 * _EMBEDDING  # gain of a positional head's output
_COPIED = 5.0 * _EMBEDDING  # gain of a matching head's output


@torch.no_grad()
def plant_induction(model: LlamaForCausalLM, geometry: Geometry, generator: torch.Generator) -> None:
    """Set half of the heads in each of the first two layers, in place; all other maps into the residual stream become
    zero.
    """
    hidden, size, heads = geometry.hidden_size, geometry.head_dim, (geometry.heads + 1) // 2
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
