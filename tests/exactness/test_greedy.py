"""Greedy output in float32 is that of transformers' own `generate`, token for token, with and without speculation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import HeldOut
from tests.exactness.cases import finish
from tests.random_models import FAMILIES, WINDOWED, random_model, random_tokens, with_noise
from triforce_core.building.assembly import local_engine
from triforce_core.config import Settings
from triforce_core.engine.sequence import Request
from triforce_core.messages import GREEDY
from triforce_core.models.files import resolve
from triforce_core.models.load import load_model

Tokens = tuple[int, ...]
NUM_TOKENS = 48
DEMO_FILES = {1: "inspect.py", 7: "turtle.py", 500: "tarfile.py", 5000: "inspect.py"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Where a model is: the demo target, or a random one of a family, saved as transformers saves it."""

    @functools.cache
    def directory_of(name: str) -> str:
        if name == "demo":
            return resolve("demo", "target")
        path = tmp_path_factory.mktemp(name)
        random_model(name, initializer_range=0.3, seed=2).save_pretrained(path)
        return str(path)

    return directory_of


def generate(path: str, prompt: Tokens) -> Tokens:
    """What transformers makes of the prompt, with attention, cache and loop of its own."""
    model = AutoModelForCausalLM.from_pretrained(Path(path), dtype=torch.float32)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS)
    return tuple(output[0, len(prompt) :].tolist())


@pytest.mark.parametrize(
    ("name", "context"),
    [
        pytest.param(
            name, context, marks=[] if context <= 500 else pytest.mark.ci if name == "demo" else pytest.mark.slow
        )
        for name in ("demo", *FAMILIES, *WINDOWED)
        for context in DEMO_FILES
    ],
)
def test_greedy_output_is_that_of_transformers(
    name: str, context: int, directory: Callable[[str], str], held_out: HeldOut
) -> None:
    prompt = held_out(DEMO_FILES[context], context) if name == "demo" else random_tokens(context, seed=context)
    expected = generate(directory(name), prompt)
    assert len(expected) == NUM_TOKENS
    assert name == "demo" or len(set(expected)) > NUM_TOKENS // 4, "a text that repeats itself proves little"

    target = load_model(directory(name), "target", "float32", "cpu")
    drafter = load_model("demo", "drafter", "float32", "cpu") if name == "demo" else with_noise(target, 0.1)
    settings = Settings.model_validate({"dtype": "float32", "retrieval": {"budget": 256, "refresh_every": 16}})
    engine = local_engine(target, drafter, settings)
    for lookaheads in [(0, 0), (8, 3)]:
        outcome = finish(engine, [Request(prompt, NUM_TOKENS, GREEDY, 0, lookaheads)])
        assert outcome.tokens == [expected]
        assert (outcome.tallies[0][0].proposed > 0) == any(lookaheads)
