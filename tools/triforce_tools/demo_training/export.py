"""Export of the pair as plain `transformers` folders: safetensors in bfloat16, configuration, tokenizer."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast

from triforce_core.errors import UnavailableError
from triforce_tools.demo_training.checkpoint import latest_checkpoint
from triforce_tools.demo_training.corpus import EOS, load_corpus
from triforce_tools.demo_training.modeling import build_model
from triforce_tools.demo_training.settings import MODELS, DemoSettings, ModelName


def export_pair(settings: DemoSettings, folder: Path) -> None:
    """Write the newest checkpoints to `target` and `drafter` in `folder`, and their training history to
    `training.json`.

    Raises:
        UnavailableError: a model has no whole checkpoint yet.
    """
    states = {name: _newest(settings, name) for name in MODELS}
    positions = states["target"]["progress"]["trained_context"]  # the drafter must address all positions of its target
    for name, state in states.items():
        _export_model(settings, name, state, folder / name, positions)
    corpus = load_corpus(settings.corpus_dir)
    training: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "seed": settings.seed,
        **{name: _history(state) for name, state in states.items()},
        "corpus": {"tokens": len(corpus.train), "digest": corpus.digest, "packages": list(corpus.packages)},
    }
    (folder / "training.json").write_text(json.dumps(training, indent=1) + "\n", encoding="utf-8")


def _newest(settings: DemoSettings, name: ModelName) -> dict[str, Any]:
    state = latest_checkpoint(settings.run_dir, name)
    if state is None:
        raise UnavailableError(f"{settings.run_dir}: no whole checkpoint of the {name}")
    return state


def _export_model(
    settings: DemoSettings, name: ModelName, state: dict[str, Any], folder: Path, max_positions: int
) -> None:
    model = build_model(settings.geometry(name), max_positions=max_positions, seed=settings.seed)
    model.load_state_dict(state["model"])
    model.generation_config = GenerationConfig(bos_token_id=EOS, eos_token_id=EOS)
    model.to(torch.bfloat16)  # type: ignore[arg-type]
    model.save_pretrained(folder)
    word = "<eos>"
    file = str(settings.tokenizer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, bos_token=word, eos_token=word)
    tokenizer.save_pretrained(folder)


def _history(state: dict[str, Any]) -> dict[str, Any]:
    progress = state["progress"]
    return {
        "parameters": sum(tensor.numel() for key, tensor in state["model"].items() if key != "lm_head.weight"),
        "tokens_seen": progress["tokens_seen"],
        "trained_context": progress["trained_context"],
        "steps": progress["step"],
        "active_hours": round(progress["seconds"] / 3600, 2),
        "last_stage": progress["stage"],
    }
