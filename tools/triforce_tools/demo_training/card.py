"""The model card: description, training data and figures of the weights. All figures come from files beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_TEMPLATE = """\
---
license: apache-2.0
language: [code]
library_name: transformers
tags: [speculative-decoding, long-context, demo]
---

# The TriForce Serve demo pair

Two small Llama models for trying and testing hierarchical speculative decoding without a download: a multi-head target
that reads Python, and a drafter distilled from it, with one byte-level BPE of {vocab_size} tokens. They are a test bed
for a serving system, not assistants: their text is code-like and often wrong.

| | target | drafter |
| --- | --- | --- |
| parameters | {target_parameters} | {drafter_parameters} |
| layers × heads × head size | {target_shape} | {drafter_shape} |
| hidden, MLP | {target_widths} | {drafter_widths} |
| tokens seen in training | {target_tokens} | {drafter_tokens} |
| longest sequence in training | {target_context} | {drafter_context} |

Positions up to {max_positions} can be addressed: as many as the longest sequence that the target was trained on. The
drafter sees no more tokens at a time than its own longest sequence had.

## Figures

On files that neither model saw, and on fresh recall tasks. Losses are in nats a token.

{figures}

`loss_by_position` compares different text at different positions; `loss_by_context` compares the same tokens, seen with
more or less before them. Acceptance is measured on held-out text, teacher-forced: each token is predicted after the
true text. T1 is the mean of Σ min(p, q).

## Training

Made on {date} with `triforce demo train` (seed {seed}; target {target_hours} h, drafter {drafter_hours} h of computing)
and nothing but the settings in `train.yaml`. The text is the source and documentation of the packages below as
installed, {corpus_tokens} tokens (digest `{digest}`), with recall tasks mixed in: keys defined early, asked for later.
Before the first step, induction heads are planted: they find an earlier occurrence of the latest tokens and copy what
came after it (`planting.py`).
Files are held out by a hash of their name; the standard-library files that serve as benchmark prompts are always held
out. No source text of others is part of this repository.

| package | version | licence, in its own words |
| --- | --- | --- |
{packages}
"""


def write_card(weights: Path, figures: dict[str, Any]) -> None:
    """Write `README.md` and `evaluation.json` into a folder that `export_pair` made."""
    training = json.loads((weights / "training.json").read_text(encoding="utf-8"))
    (weights / "evaluation.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    (weights / "README.md").write_text(card_text(weights, training, figures), encoding="utf-8")


def card_text(weights: Path, training: dict[str, Any], figures: dict[str, Any]) -> str:
    """The card of a pair with these figures."""
    configs = {
        name: json.loads((weights / name / "config.json").read_text(encoding="utf-8")) for name in ("target", "drafter")
    }
    rows: dict[str, str] = {}
    for name, config in configs.items():
        history = training[name]
        shape = [config[key] for key in ("num_hidden_layers", "num_attention_heads", "head_dim")]
        rows |= {
            f"{name}_parameters": f"{history['parameters'] / 1e6:.1f}M",
            f"{name}_shape": " × ".join(map(str, shape)),
            f"{name}_widths": f"{config['hidden_size']}, {config['intermediate_size']}",
            f"{name}_tokens": f"{history['tokens_seen'] / 1e6:.1f}M",
            f"{name}_context": f"{history['trained_context']:,}",
            f"{name}_hours": str(history["active_hours"]),
        }
    corpus = training["corpus"]
    return _TEMPLATE.format(
        **rows,
        vocab_size=configs["target"]["vocab_size"],
        max_positions=f"{configs['target']['max_position_embeddings']:,}",
        figures=figures_table(figures),
        date=training["date"],
        seed=training["seed"],
        corpus_tokens=f"{corpus['tokens']:,}",
        digest=corpus["digest"][:12],
        packages="\n".join(f"| {p['name']} | {p['version']} | {p['licence']} |" for p in corpus["packages"]),
    )


def figures_table(figures: dict[str, Any]) -> str:
    """The figures as a Markdown table, one line for each number."""
    lines = [f"| {name} | {value} |" for name, value in _flat(figures)]
    return "\n".join(["| figure | value |", "| --- | --- |", *lines])


def _flat(value: Any, name: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [line for key, inner in value.items() for line in _flat(inner, f"{name}, {key}" if name else key)]
    if isinstance(value, str):
        return [(name, value)]
    return [(name, f"{value:.3f}" if isinstance(value, float) else f"{value:,}")]
