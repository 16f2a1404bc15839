"""What a folder or file serves, beside what transformers' own greedy `generate` gives."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from tests.random_models import random_tokens
from triforce_core.building.loading import load_local_engine
from triforce_core.config import load_settings
from triforce_core.engine.engine import run_to_end
from triforce_core.engine.sequence import Request
from triforce_core.messages import GREEDY

PROMPT, OUTPUT = 90, 24  # tokens; the prompt is more than the retrieval tier's budget


def served(model: str, *, vocab: int = 256, length: int = PROMPT, **target: Any) -> list[int]:
    """The tokens that all three tiers together give for a random prompt, in float32."""
    settings = load_settings(
        None,
        dtype="float32",
        target={"model": model, "kv_pool_tokens": 4096, **target},
        retrieval={"budget": 64, "chunk": 8},
        draft={"model": model},
    )
    request = Request(random_tokens(length, seed=1, vocab=vocab), OUTPUT, GREEDY, 0, (4, 2))
    return [token for output in run_to_end(load_local_engine(settings), [request]) for token in output.tokens]


@torch.inference_mode()
def generated(theirs: PreTrainedModel, *, vocab: int = 256, length: int = PROMPT) -> list[int]:
    """The tokens that transformers gives for the same prompt."""
    prompt = torch.tensor([random_tokens(length, seed=1, vocab=vocab)])
    end = {"eos_token_id": None, "pad_token_id": 0}
    return theirs.generate(prompt, max_new_tokens=OUTPUT, do_sample=False, **end)[0, length:].tolist()  # type: ignore[no-any-return,operator]
