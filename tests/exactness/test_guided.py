"""Guided output: what comes out has the form asked for, with all tiers at work; masks in the drafting tiers help."""

from __future__ import annotations

import json
from functools import cache

import jsonschema
import pytest

from deploy.chat.families import THINK, Family, grammar
from tests.exactness.cases import finish
from tests.random_models import random_model, random_tokens, with_noise
from triforce_core.building.assembly import local_engine
from triforce_core.config import Settings
from triforce_core.engine.engine import Engine, run_to_end
from triforce_core.engine.sequence import FinishReason, Request
from triforce_core.messages import SamplingParams
from triforce_core.models.files import load_tokenizer, stop_token_ids
from triforce_core.models.load import ATTENTION
from triforce_core.sampling.guides import Guide
from triforce_core.speculation.decoder import SpeculativeDecoder
from triforce_core.speculation.drafting import ModelProposer
from triforce_core.speculation.leaf import Leaf
from triforce_core.speculation.verification import ModelVerifier

VOCAB, SEEDS = 4096, 100
PROMPT = random_tokens(70, seed=0, vocab=VOCAB)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "on": {"type": "boolean"},
        "at": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"}]},
    },
    "required": ["name", "size", "tags", "on", "at"],
    "additionalProperties": False,
}


def engine() -> Engine:
    settings = Settings.model_validate(
        {"dtype": "float32", "max_sequences": 20, "retrieval": {"budget": 64, "chunk": 8}, "draft": {"window": 60}}
    )
    target = random_model(vocab_size=VOCAB, num_hidden_layers=1, initializer_range=0.3)
    target.set_attn_implementation(ATTENTION)
    return local_engine(target, with_noise(target, 0.03, seed=2), settings, with_noise(target, 0.01, seed=1))


@cache
def requests(max_tokens: int = 120) -> list[Request]:
    grammar = Guide("json_schema", json.dumps(SCHEMA)).grammar()
    return [
        Request(PROMPT, max_tokens, SamplingParams(), seed, (6, 2), stop_token_ids("demo"), grammar=grammar)
        for seed in range(SEEDS)
    ]


def test_json_validates_with_all_tiers_on() -> None:
    texts: dict[int, list[int]] = {}
    reasons: dict[int, FinishReason | None] = {}
    for output in run_to_end(engine(), requests()):
        texts.setdefault(output.sequence_id, []).extend(output.tokens)
        reasons[output.sequence_id] = output.finish_reason
    ended = [i for i, reason in reasons.items() if reason is FinishReason.STOP]
    print(f"\n{len(ended)} of {SEEDS} outputs are complete; the others end by length")
    assert set(reasons.values()) <= {FinishReason.STOP, FinishReason.LENGTH}
    assert len(ended) > 0.95 * SEEDS
    values = [json.loads(load_tokenizer("demo").decode(texts[i], skip_special_tokens=True)) for i in ended]
    for value in values:
        jsonschema.validate(value, SCHEMA)
    assert len({json.dumps(value) for value in values}) > 0.9 * len(ended), "they are not all one text"


def test_a_form_holds_where_its_beginning_lies_within_an_accepted_block() -> None:
    """The form begins after the reasoning, whose end is a token that the tiers draft as any other."""
    end = 300
    text = grammar(
        Family(None, THINK),
        [],
        {THINK.end: end},
        reasoning_begun=True,
        several=False,
        answer=Guide("json_schema", json.dumps(SCHEMA)).grammar(),
    )
    likely_end = SamplingParams(logit_bias=((end, 6.0),))
    asked = [Request(PROMPT, 150, likely_end, seed, (6, 2), stop_token_ids("demo"), grammar=text) for seed in range(40)]
    blocks: dict[int, list[tuple[int, ...]]] = {}
    stopped = set()
    for output in run_to_end(engine(), asked):
        blocks.setdefault(output.sequence_id, []).append(output.tokens)
        if output.finish_reason is FinishReason.STOP:
            stopped.add(output.sequence_id)
    inside = [i for i in stopped if any(end in block[:-1] for block in blocks[i])]
    print(f"\n{len(stopped)} of {len(asked)} outputs are complete; {len(inside)} reasonings end within a block")
    assert len(inside) > 0.1 * len(asked)
    for i in stopped:
        tokens = [token for block in blocks[i] for token in block]
        rest = tokens[tokens.index(end) + 1 :]
        answer = load_tokenizer("demo").decode(rest, skip_special_tokens=True)
        jsonschema.validate(json.loads(answer.strip()), SCHEMA)


def test_masks_in_all_tiers_raise_acceptance_and_change_no_token() -> None:
    masked, only_target = engine(), engine()
    inner = only_target.decoder.proposer  # type: ignore[attr-defined]
    assert isinstance(inner, SpeculativeDecoder)
    assert isinstance(inner.verifier, ModelVerifier)
    assert isinstance(inner.proposer, Leaf)
    assert isinstance(inner.proposer.model, ModelProposer)
    inner.verifier.drawer.grammars = inner.proposer.model.drawer.grammars = None
    both = [finish(each, requests()[:20]) for each in (masked, only_target)]
    assert both[0].tokens == both[1].tokens
    acceptance = [
        sum(t[0].accepted for t in o.tallies) / sum(t[0].accepted + t[0].rejected for t in o.tallies) for o in both
    ]
    print(f"\nacceptance at the target: {acceptance[0]:.2f} with masks in all tiers, {acceptance[1]:.2f} in it alone")
    assert acceptance[0] >= acceptance[1] > 0


def test_a_form_that_admits_no_token_ends_the_request() -> None:
    """The form's stop token comes too early for `min_tokens`, and no other token may follow. Other requests go on."""
    grammar = Guide("choice", ["return None"]).grammar()
    stuck = Request(PROMPT, 50, SamplingParams(min_tokens=30), 1, (6, 2), stop_token_ids("demo"), grammar=grammar)
    free = Request(PROMPT, 50, SamplingParams(), 1, (6, 2))
    reasons = {o.sequence_id: o for o in run_to_end(engine(), [stuck, free, stuck])}
    assert [o.finish_reason for o in reasons.values()] == [
        FinishReason.NO_TOKEN,
        FinishReason.LENGTH,
        FinishReason.NO_TOKEN,
    ]


def test_a_mask_beyond_its_budget_ends_the_request_alone() -> None:
    """The masks after the first token are too large for the library's limits, in each tier."""
    grammar = Guide("regex", "[xy]?(((a{1000}){1000}){1000}){1000}").grammar()
    large = Request(PROMPT, 50, SamplingParams(), 1, (6, 2), stop_token_ids("demo"), grammar=grammar)
    free = Request(PROMPT, 50, SamplingParams(), 1, (6, 2))
    [alone] = [finish(engine(), [free])]
    reasons, tokens = {}, dict[int, list[int]]()
    for output in run_to_end(engine(), [large, free, large]):
        reasons[output.sequence_id] = output.finish_reason
        tokens.setdefault(output.sequence_id, []).extend(output.tokens)
    assert [*reasons.values()].count(FinishReason.NO_TOKEN) == 2
    others = [text for i, text in tokens.items() if reasons[i] is FinishReason.LENGTH]
    assert others == [[*text] for text in alone.tokens]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_biases_that_exclude_all_but_bad_words_do_as_well(temperature: float) -> None:
    bad = SamplingParams(temperature, bad_word_ids=tuple((token,) for token in range(200)))
    small = random_model(vocab_size=200, num_hidden_layers=1)
    small.set_attn_implementation(ATTENTION)
    settings = Settings.model_validate({"dtype": "float32", "target": {"kv_pool_tokens": 500}})
    [output] = run_to_end(local_engine(small, small, settings), [Request((1, 2, 3), 5, bad, 0, (4, 1))])
    assert (output.tokens, output.finish_reason) == ((), FinishReason.NO_TOKEN)
