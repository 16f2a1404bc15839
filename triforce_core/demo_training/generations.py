"""Text that the target writes itself: the drafter learns on it last, for that is what it will meet in decoding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from triforce_core.demo_training.corpus import Tokens

ROWS = 32  # texts in one batch
PROMPT = 64  # tokens of the corpus that a text goes on from
NEW = 192  # tokens of its own


def written_by_target(
    target: LlamaForCausalLM,
    corpus: Tokens,
    path: Path,
    *,
    num_tokens: int,
    seed: int,
    halt: Callable[[], bool] = lambda: False,
) -> Tokens | None:
    """At least `num_tokens` tokens of prompts and what the target makes of them, kept in `path`.

    Every other batch is greedy, the rest is drawn at temperature 1. Batches that are in the file already are not made
    again, so this too can be stopped at any moment; None when `halt` said so before the end.
    """
    batch_tokens = ROWS * (PROMPT + NEW)
    done = path.stat().st_size // (2 * batch_tokens) if path.is_file() else 0
    path.touch()
    with path.open("r+b") as file:
        file.truncate(2 * done * batch_tokens)
        file.seek(0, 2)
        for number in range(done, -(-num_tokens // batch_tokens)):
            if halt():
                return None
            file.write(_batch(target, corpus, (seed, number), greedy=number % 2 == 1).tobytes())
            file.flush()
    return np.memmap(path, dtype=np.uint16, mode="r")


def _batch(target: LlamaForCausalLM, corpus: Tokens, seed: tuple[int, int], *, greedy: bool) -> Tokens:
    """[ROWS, PROMPT + NEW]; a function of the seed."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(len(corpus) - PROMPT, size=ROWS)
    prompts = np.stack([corpus[start : start + PROMPT] for start in starts]).astype(np.int64)
    torch.manual_seed(int(rng.integers(2**63)))
    model: Any = target  # transformers annotates `generate` for a protocol that its models do not meet
    with torch.inference_mode(), torch.autocast(target.device.type, torch.bfloat16):
        texts: Tensor = model.generate(
            torch.from_numpy(prompts).to(target.device),
            min_new_tokens=NEW,
            max_new_tokens=NEW,
            do_sample=not greedy,
            top_k=0,
        )
    written: Tokens = texts.cpu().numpy().astype(np.uint16)
    return written
