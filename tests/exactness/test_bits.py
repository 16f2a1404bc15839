"""In 16 bits, too, a request's tokens do not depend on drafts, on other requests, on chunks, nor on preemption: they
are equal to those of a run alone, without speculation.
"""

from __future__ import annotations

import random
from functools import cache

import pytest
from transformers import PreTrainedModel

from tests.conftest import HeldOut
from tests.exactness.cases import AnyPlan
from tests.random_models import WINDOWED, random_model, random_tokens, with_noise
from triforce_core.building.assembly import local_engine
from triforce_core.config import Settings
from triforce_core.engine.engine import Engine
from triforce_core.engine.sequence import Output, Request
from triforce_core.messages import Drafting, SamplingParams
from triforce_core.models.load import ATTENTION, load_model

Tokens = tuple[int, ...]
LONGEST = 700  # tokens of a prompt's own part, more than a block of keys
POOL = 1400


@cache
def models(name: str, dtype: str) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel]:
    """Target, self-drafter and drafter."""
    if name == "demo":
        target, drafter = (load_model("demo", role, dtype, "cpu") for role in ("target", "drafter"))
        return target, target, drafter
    random_target = random_model(name, vocab_size=1001)
    random_target = random_target.bfloat16() if dtype == "bfloat16" else random_target
    random_target.set_attn_implementation(ATTENTION)
    return random_target, with_noise(random_target, 0.05), with_noise(random_target, 0.1)


def engine(name: str, dtype: str, pool: int, sequences: int, **target: object) -> Engine:
    target = {"kv_pool_tokens": pool, "max_stall_ms": None, **target}
    retrieval = {"budget": 128, "chunk": 8, "refresh_every": 16}
    settings = {"dtype": dtype, "max_sequences": sequences, "target": target, "retrieval": retrieval}
    weights, own, drafter = models(name, dtype)
    made = local_engine(weights, drafter, Settings.model_validate(settings), own)
    made.controller = AnyPlan((8, 3), tuple(Drafting))  # of the requests that set no lookaheads: trees, too
    return made


def run(it: Engine, asked: list[Request], at_once: bool) -> tuple[list[Tokens], int]:
    """The tokens of each request, and how often one was preempted. Not `at_once`: every few turns one is submitted."""
    outputs: dict[int, list[Output]] = {}
    waiting, turn = asked[::-1], 0
    while waiting or not it.idle:
        while waiting and (at_once or turn % 5 == 0 or it.idle):
            outputs[it.submit(waiting.pop())] = []
            if not at_once:
                break
        for output in it.run_once():
            outputs[output.sequence_id].append(output)
        turn += 1
    tokens = [tuple(token for output in each for token in output.tokens) for each in outputs.values()]
    return tokens, sum(each[-1].stats.preempted for each in outputs.values())


def requests(document: Tokens, count: int, vocabulary: int) -> list[Request]:
    """Of many lengths, at three temperatures, with blocks of many lengths; some share the document's beginning."""
    choose = random.Random(count)
    found = []
    for number in range(count):
        # Those with long outputs outgrow the pool together.
        more, length = (500, 90 + number) if number % 2 else (40, choose.choice((1, 7, 511, 512, 513, LONGEST)))
        own = random_tokens(length, seed=number, vocab=vocabulary)
        begins = choose.choice((0, 64) if number % 2 else (0, 520, 600))
        prompt = document[:begins] + own if number % 3 else document[:length]
        sampling = SamplingParams((0.0, 0.7, 1.0)[number % 3], top_p=choose.choice((1.0, 0.9)))
        lookaheads = choose.choice(((0, 0), (1, 1), (4, 2), (16, 1), None, None))
        found.append(Request(prompt, more, sampling, number, lookaheads))
    return found


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("demo", "bfloat16", marks=pytest.mark.ci),
        pytest.param("llama", "bfloat16", marks=pytest.mark.slow),
        pytest.param("llama", "float32", marks=pytest.mark.slow),
        pytest.param("gemma3", "bfloat16", marks=pytest.mark.ci),
        *(pytest.param(name, "bfloat16", marks=pytest.mark.slow) for name in ("gpt_oss", "olmo3", "cohere2")),
        *(pytest.param(name, "float32", marks=pytest.mark.slow) for name in WINDOWED),
    ],
)
def test_tokens_are_those_of_a_run_alone(name: str, dtype: str, held_out: HeldOut) -> None:
    vocabulary = models(name, dtype)[0].config.vocab_size
    document = held_out("inspect.py", LONGEST) if name == "demo" else random_tokens(LONGEST, seed=1, vocab=vocabulary)
    check(name, dtype, requests(document, 8, vocabulary))


def check(name: str, dtype: str, asked: list[Request]) -> None:
    plain = [Request(each.prompt, each.max_tokens, each.sampling, each.seed, (0, 0)) for each in asked]
    alone = engine(name, dtype, POOL, 1, prefix_cache=False, prefill_chunk=2048)
    # In float32 PyTorch's product for experts depends on the number of rows, which only decides ties of rounding.
    assert not alone.inexact or (name, dtype) == ("gpt_oss", "float32")
    expected = [run(alone, [each], True)[0][0] for each in plain]
    # Room for few of them, so that some wait, and some are preempted; small chunks; beginnings are shared.
    it = engine(name, dtype, POOL, 5, prefill_chunk=100)
    found, preempted = run(it, asked, at_once=False)
    assert found == expected
    again, more = run(it, asked[::-1], at_once=True)  # now the pool has the beginnings of some
    assert again == expected[::-1]
    print(f"\n{len(asked)} requests twice, {preempted + more} preempted")
    assert preempted + more


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "count"), [("demo", 200), ("llama", 200), ("qwen2", 60), ("qwen3", 60)])
def test_two_hundred(name: str, count: int, held_out: HeldOut) -> None:
    vocabulary = models(name, "bfloat16")[0].config.vocab_size
    document = held_out("inspect.py", LONGEST) if name == "demo" else random_tokens(LONGEST, seed=1, vocab=vocabulary)
    check(name, "bfloat16", requests(document, count, vocabulary))
