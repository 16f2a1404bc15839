"""Export of the pair as plain `transformers` folders: safetensors in bfloat16, configuration, tokenizer, model card."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast

from triforce_tools.demo_training.corpus import EOS, build_corpus, demo_tokenizer
from triforce_tools.demo_training.models import build_model
from triforce_tools.demo_training.settings import DemoSettings
from triforce_tools.demo_training.train import load_checkpoint

_CARD = """\
---
license: apache-2.0
language: [code]
library_name: transformers
tags: [speculative-decoding, long-context, demo]
---

# The TriForce Serve demo pair

Two small Llama models for trying and testing hierarchical speculative decoding without a download: a multi-head target
that reads Python, and a drafter distilled from it. They are a test bed for a serving system, not assistants: their text
is code-like and often wrong.

| | target | drafter |
| --- | --- | --- |
| parameters | {target[parameters]:,} | {drafter[parameters]:,} |
| tokens seen in training | {target[tokens_seen]:,} | {drafter[tokens_seen]:,} |
| longest sequence in training | {target[trained_context]:,} | {drafter[trained_context]:,} |

Made on {date} with `triforce demo train` (seed {seed}; target {target[active_hours]} h, drafter {drafter[active_hours]}
h of computing). The text is the source and documentation of the packages that `training.json` lists with their versions
and licences. Files are held out by a hash of their name, and so are the prompts of benchmarks. `triforce eval` and
`triforce bench sweep` measure the pair.
"""


def export_pair(settings: DemoSettings, folder: Path) -> None:
    """Write the checkpoints to `target` and `drafter` in `folder`, beside them a model card and `training.json`.

    Raises:
        InvalidValueError: a model has no checkpoint yet.
    """
    states = {name: load_checkpoint(settings, name) for name in settings.models}
    training: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat(), "seed": settings.seed}
    for name, state in states.items():
        begun = settings.models[name].begun(state["step"])
        training[name] = {
            "parameters": sum(value.numel() for key, value in state["model"].items() if key != "lm_head.weight"),
            "tokens_seen": sum(steps * stage.rows * stage.length for stage, steps in begun),
            "trained_context": max(stage.length for stage, _ in begun),
            "steps": state["step"],
            "active_hours": round(state["seconds"] / 3600, 2),
        }
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=demo_tokenizer(), bos_token="<eos>", eos_token="<eos>")
    positions = training["target"]["trained_context"]  # the drafter must address all positions of its target
    for name, state in states.items():
        model = build_model(settings.models[name].shape, max_positions=positions, seed=settings.seed)
        model.load_state_dict(state["model"])
        model.generation_config = GenerationConfig(bos_token_id=EOS, eos_token_id=EOS)
        model.to(torch.bfloat16)  # type: ignore[arg-type]
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    corpus = build_corpus(settings.folder)
    training["corpus"] = {"tokens": len(corpus.tokens), "digest": corpus.digest, "packages": corpus.packages}
    (folder / "training.json").write_text(json.dumps(training, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(_CARD.format(**training), encoding="utf-8")
