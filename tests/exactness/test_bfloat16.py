"""bfloat16: many-token passes round differently from one-token passes, so equality gives way to a bound.

The emitted tokens are forced through one float32 pass. Each must lie within epsilon of the best perturbed logit, where
epsilon is the error of plain decoding measured in the same run; its own rate of violations stands beside ours.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.conftest import HeldOut
from tests.exactness.cases import finish
from tests.random_models import plain_logits, random_model, random_tokens, with_noise
from triforce_core.building.assembly import local_engine
from triforce_core.config import Settings
from triforce_core.engine.engine import Engine
from triforce_core.engine.sequence import Request
from triforce_core.kv.base import Batch, Forward
from triforce_core.messages import SamplingParams
from triforce_core.models.files import resolve
from triforce_core.models.load import ATTENTION, load_model
from triforce_core.models.quantize import quantized_copy
from triforce_core.models.runner import ModelRunner
from triforce_core.sampling.draw import Draw, perturbed_logits
from triforce_core.speculation.decoder import SpeculativeDecoder
from triforce_core.speculation.verification import ModelVerifier

Tokens = tuple[int, ...]
NUM_TOKENS, SEED = 150, 7
FILES = ["inspect.py", "turtle.py", "tarfile.py", "doctest.py"]


@dataclass
class Models:
    """The same bfloat16 weights several times, and a drafter."""

    served: PreTrainedModel
    exact: PreTrainedModel  # in float32, with transformers' own attention
    int8: PreTrainedModel  # quantised
    drafter: PreTrainedModel
    prompts: list[Tokens]


@pytest.fixture(scope="module", params=["random", pytest.param("demo", marks=pytest.mark.slow)])
def models(request: pytest.FixtureRequest, held_out: HeldOut) -> Models:
    if request.param == "demo":
        exact = AutoModelForCausalLM.from_pretrained(resolve("demo", "target"), dtype=torch.float32).eval()
        served, drafter = (load_model("demo", role, "bfloat16", "cpu") for role in ("target", "drafter"))
        return Models(served, exact, quantized_copy(served), drafter, [held_out(file, 300) for file in FILES])
    served = random_model(num_hidden_layers=4, hidden_size=128, vocab_size=1000).bfloat16()
    exact = copy.deepcopy(served).float()
    served.set_attn_implementation(ATTENTION)
    drafter = with_noise(served, 0.05)
    prompts = [random_tokens(300, seed=i, vocab=1000) for i in range(4)]
    return Models(served, exact, quantized_copy(served), drafter, prompts)


class RecordingRunner(ModelRunner):
    """Keeps the logits from which each token was drawn, by sequence and position."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner.model, runner.kv)
        self.logits: dict[tuple[int, int], Tensor] = {}

    def forward(self, forwards: list[Forward]) -> tuple[Tensor, Batch]:
        logits, batch = super().forward(forwards)
        rest = logits
        for row in batch.rows:
            end = len(self.kv.held[row.sequence_id].tokens)
            for i in range(row.num_sampled):
                self.logits[row.sequence_id, end - row.num_sampled + 1 + i] = rest[i]
            rest = rest[row.num_sampled :]
        return logits, batch


def recorded(engine: Engine) -> RecordingRunner:
    assert isinstance(engine.decoder, SpeculativeDecoder)
    verifier = engine.decoder.verifier
    assert isinstance(verifier, ModelVerifier)
    verifier.runner = runner = RecordingRunner(verifier.runner)
    return runner


def gaps(models: Models, outputs: list[Tokens], params: SamplingParams) -> Tensor:
    """How far each emitted token's perturbed float32 logit is below the best one, [tokens]."""
    found = []
    for seed, (prompt, output) in enumerate(zip(models.prompts, outputs, strict=True), SEED):
        logits = plain_logits(models.exact, prompt + output)[len(prompt) - 1 : -1]
        draws = [Draw(params, seed, len(prompt) + i) for i in range(len(output))]
        perturbed = perturbed_logits(logits, draws)
        found.append(perturbed.amax(-1) - perturbed[torch.arange(len(output)), torch.tensor(output)])
    return torch.cat(found)


def errors(models: Models, outputs: list[Tokens], runner: RecordingRunner, temperature: float) -> Tensor:
    """The largest error of each row of logits that plain decoding drew from, [tokens]. A constant that is added to a
    whole row is no error, because softmax ignores it.
    """
    found = []
    for sequence_id, (prompt, output) in enumerate(zip(models.prompts, outputs, strict=True), 1):
        exact = plain_logits(models.exact, prompt + output)[len(prompt) - 1 : -1]
        rounded = torch.stack([runner.logits[sequence_id, len(prompt) + i] for i in range(len(output))])
        error = (rounded - exact) / (temperature or 1.0)
        found.append((error - error.median(-1, keepdim=True).values).abs().amax(-1))
    return torch.cat(found)


SLOW = [pytest.param(temperature, marks=pytest.mark.slow) for temperature in (0.0, 0.6, 1.3)]


@pytest.mark.parametrize("temperature", [1.0, *SLOW])
def test_tokens_are_within_the_error_of_plain_decoding(models: Models, temperature: float) -> None:
    params = SamplingParams(temperature)
    settings = Settings.model_validate({"dtype": "bfloat16", "retrieval": {"refresh_every": 16}})

    def run(engine: Engine, lookaheads: tuple[int, int]) -> Any:
        requests = [Request(p, NUM_TOKENS, params, seed, lookaheads) for seed, p in enumerate(models.prompts, SEED)]
        return finish(engine, requests)

    engine = local_engine(models.served, models.drafter, settings)
    runner = recorded(engine)
    plain = run(engine, (0, 0)).tokens
    error = float(errors(models, plain, runner, temperature).quantile(0.99))
    epsilon = 2 * error  # the best logit and the emitted one may be wrong in opposite directions
    speculative = run(local_engine(models.served, models.drafter, settings), (8, 3))
    quantized = run(local_engine(models.served, models.drafter, settings, models.int8), (8, 3))
    unverified = run(local_engine(models.drafter, models.drafter, settings), (0, 0)).tokens

    rates, mismatches = {}, {}
    for name, tokens in [
        ("plain", plain),
        ("TriForce", speculative.tokens),
        ("with an int8 self-drafter", quantized.tokens),
        ("the drafter alone", unverified),
    ]:
        gap = gaps(models, tokens, params)
        rates[name], mismatches[name] = float((gap > epsilon).double().mean()), float((gap > 0).double().mean())
    equal = sum(a == b for x, y in zip(plain, speculative.tokens, strict=True) for a, b in zip(x, y, strict=True))
    count = sum(map(len, plain))
    rounds = sum(levels[0].rounds for levels in speculative.tallies)
    print(f"\nT={temperature}: epsilon {epsilon:.4f}, {count} tokens; TriForce equals plain in {equal / count:.1%}")
    print(f"  {count / rounds:.2f} tokens a round")
    for name, rate in rates.items():
        print(f"  {name}: {rate:.2%} violations, {mismatches[name]:.2%} not float32's own choice")

    assert count / rounds > 2, "the test is about passes over many tokens"
    assert rates["plain"] < 0.05, "or plain decoding is itself wrong, and the bound that it sets says nothing"

    def allowed(rate: float, deviations: float = 3 * 2**0.5) -> float:
        """The rate plus three standard deviations. Both rates are measured on `count` tokens, so the variance of their
        difference is twice the variance of one.
        """
        return rate + deviations * (max(rate, 0.005) / count) ** 0.5

    for name in "TriForce", "with an int8 self-drafter":
        assert rates[name] <= allowed(rates["plain"])
        assert mismatches[name] <= allowed(mismatches["plain"])
    # A distilled drafter often says what its target does; still the same rule must refuse it by a wide margin.
    assert rates["the drafter alone"] > 5 * allowed(rates["plain"], deviations=3), (
        "an epsilon that lets anything pass would prove nothing"
    )
