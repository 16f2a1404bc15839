"""Random combinations of all sampling parameters: speculative decoding gives plain decoding's tokens for the same seed.

The text is that of small random models with the demo pair's vocabulary, so that grammars have real tokens to mask.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.exactness.cases import AnyPlan
from tests.random_models import random_model, random_tokens, with_noise
from triforce_core.building.assembly import local_engine
from triforce_core.config import Settings
from triforce_core.detokenizer import OutputText, TokenText, joined
from triforce_core.engine.engine import Engine, run_to_end
from triforce_core.engine.sequence import Output, Request
from triforce_core.messages import Claim, Drafting, SamplingParams, Verdict
from triforce_core.models.files import load_tokenizer, stop_token_ids
from triforce_core.models.load import ATTENTION
from triforce_core.sampling.guides import Guide
from triforce_core.speculation.decoder import SpeculativeDecoder
from triforce_core.speculation.verification import ModelVerifier

VOCAB, PROMPTS, MAX_TOKENS = 4096, 4, 28
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "sizes": {"type": "array", "items": {"enum": [1, 22]}}},
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
GUIDES = [
    Guide("json_schema", json.dumps(SCHEMA)),
    Guide("json_object", True),
    Guide("regex", "(ab|cd){2,9}[0-9]{3,20}"),
    Guide("choice", ["return self.value", "return None", "raise NotImplementedError"]),
    Guide("grammar", 'start: "f(" list ")"\nlist: NUM | NUM ", " list\nNUM: /[0-9]{1,3}/'),
]


MUST_HAPPEN = (
    "a penalty that changed a token",
    "a mask that changed a token",
    "a stop inside an accepted run",
    "a stop string that cut a run",
)


class StopCounter:
    """Counts the accepted runs of at least two tokens whose last is a stop token."""

    def __init__(self, verifier: ModelVerifier, events: Counter[str]) -> None:
        self.verify, self.held, self.events = type(verifier).verify.__get__(verifier), verifier.runner.kv.held, events

    def __call__(self, claims: list[Claim]) -> list[Verdict]:
        verdicts = self.verify(claims)
        for claim, verdict in zip(claims, verdicts, strict=True):
            spec = self.held[claim.span.sequence_id].spec
            stopped = verdict.num_accepted == len(verdict.tokens) >= 2 and verdict.tokens[-1] in spec.stop_token_ids
            self.events["a stop inside an accepted run"] += stopped
        return verdicts


@cache
def engine(drafter: str) -> Engine:
    """Three tiers, or prompt lookup in place of the drafting model."""
    settings = Settings.model_validate(
        {
            "dtype": "float32",
            "max_sequences": 8,
            "target": {"kv_pool_tokens": 4096},
            "retrieval": {"budget": 64, "chunk": 8},
            "draft": {"window": 60, "model": drafter},
        }
    )
    target = random_model(vocab_size=VOCAB, num_hidden_layers=1, initializer_range=0.3)
    target.set_attn_implementation(ATTENTION)
    small = None if drafter == "ngram" else with_noise(target, 0.05, seed=2)
    made = local_engine(target, small, settings, with_noise(target, 0.02, seed=1))
    made.controller = AnyPlan((6, 4), tuple(Drafting))  # of the requests that set no lookaheads
    return made


def text_of(case: random.Random) -> tuple[int, ...]:
    """A prompt that repeats itself, so that prompt lookup finds something, and penalties too."""
    few = random_tokens(20, seed=case.randrange(PROMPTS), vocab=VOCAB)
    return tuple(case.choices(few, k=case.randrange(2, 150)))


def drawn_request(case: random.Random) -> Request:
    """Draw a request. Each parameter is off half of the time."""

    def maybe(off: Any, *values: Any) -> Any:
        return case.choice(values) if case.random() < 0.5 else off

    prompt = text_of(case)
    guide = maybe(None, *GUIDES)
    sampling = SamplingParams(
        temperature=case.choice([0.0, 0.6, 1.0, 1.3]),
        top_k=maybe(0, 5, 50),
        top_p=maybe(1.0, 0.9, 0.5),
        min_p=maybe(0.0, 0.05),
        repetition_penalty=maybe(1.0, 0.8, 1.3),
        presence_penalty=maybe(0.0, 1.0, -0.5),
        frequency_penalty=maybe(0.0, 0.5, -0.2),
    )
    request = Request(
        prompt,
        MAX_TOKENS,
        sampling,
        case.randrange(2**40),
        case.choice([(8, 3), (4, 1), (3, 0), (0, 2), (6, 4), *[None] * 5]),
        stop_token_ids("demo"),
        grammar=guide.grammar() if guide else "",
        logprobs=maybe(None, 0, 3),
        prompt_logprobs=maybe(None, 1),
    )
    # Parameters about single tokens name tokens that come without these parameters. Others would hardly ever matter.
    coming = tokens_of(outputs_of(engine("demo"), [plain(request)])[0])[3:] or (5,)
    at = case.randrange(len(coming))
    sampling = replace(
        sampling,
        min_tokens=maybe(0, 3, 10),
        logit_bias=maybe((), tuple((token, case.uniform(-6, 6)) for token in dict.fromkeys(coming[-4:]))),
        bad_word_ids=maybe((), (coming[at : at + 1], coming[at : at + 2])),
    )
    stops = (*request.stop_token_ids, *maybe((), case.choices(coming, k=1)))
    return replace(request, sampling=sampling, stop_token_ids=stops)


def outputs_of(engine: Engine, requests: list[Request]) -> list[list[Output]]:
    found: dict[int, list[Output]] = {}
    for output in run_to_end(engine, requests):
        found.setdefault(output.sequence_id, []).append(output)
    return [found[i] for i in sorted(found)]


def tokens_of(outputs: list[Output]) -> tuple[int, ...]:
    return tuple(token for output in outputs for token in output.tokens)


def plain(request: Request) -> Request:
    return replace(request, lookaheads=(0, 0))


def check(count: int, seed: int, least: int = 20) -> None:
    """`least` is how often each event must happen. It is 0 if there are too few combinations to tell."""
    events: Counter[str] = Counter()
    for drafter in ("demo", "ngram"):
        decoder = engine(drafter).decoder
        assert isinstance(decoder, SpeculativeDecoder)
        assert isinstance(decoder.verifier, ModelVerifier)
        decoder.verifier.verify = StopCounter(decoder.verifier, events)  # type: ignore[method-assign]
    for index in range(count):
        case = random.Random(f"{seed}/{index}")
        request = drawn_request(case)
        alone = outputs_of(engine("demo"), [plain(request)])[0]
        tokens = tokens_of(alone)
        # As a batch: the request through three tiers, its continuation from a token within, and a stranger.
        known = case.randrange(len(tokens)) if tokens else 0
        resumed = replace(request, resume=tokens[:known])
        whole, rest, _ = outputs_of(engine("demo"), [request, resumed, drawn_request(random.Random(f"other {index}"))])
        lookup = outputs_of(engine("ngram"), [request])[0]
        where = f"case {seed}/{index}: {request}"
        assert tokens_of(whole) == tokens, where
        assert tokens_of(lookup) == tokens, where
        assert tokens[:known] + tokens_of(rest) == tokens, where
        for outputs in (whole, lookup):
            assert outputs[-1].finish_reason == alone[-1].finish_reason, where
            for ours, theirs in zip(scores_of(outputs), scores_of(alone), strict=True):
                assert ours == pytest.approx(theirs, abs=1e-4), where
        stop = stop_string(case, tokens)
        ends = [ended(request, outputs, stop) for outputs in (alone, whole, lookup)]
        assert ends[0][:3] == ends[1][:3] == ends[2][:3], where
        events["a stop string that cut a run"] += ends[1][3]
        events.update(effects(request, tokens))
        events["accepted tokens"] += whole[-1].stats.tallies[0].accepted
    print(f"\n{count} combinations: {dict(sorted(events.items()))}")
    for event in MUST_HAPPEN if least else ():
        assert events[event] >= least, event
    assert events["accepted tokens"] > count


def scores_of(outputs: list[Output]) -> list[float]:
    found = [each for output in outputs for each in (*output.prompt_logprobs, *output.logprobs)]
    return [each.logprob or 0.0 for each in found]


def stop_string(case: random.Random, tokens: tuple[int, ...]) -> str:
    """Some characters of the output, mostly; it may begin and end inside tokens."""
    text = load_tokenizer("demo").decode(tokens, skip_special_tokens=True)
    at = case.randrange(len(text)) if text else 0
    return text[at : at + case.randrange(1, 6)] or "none"


@cache
def meaning() -> TokenText:
    return TokenText(load_tokenizer("demo"))


def ended(request: Request, outputs: list[Output], stop: str) -> tuple[str, tuple[int, ...], int, bool]:
    """Text, token ids and their number as the service gives them, and whether the stop string cut a run of tokens."""
    ends, least = request.stop_token_ids, request.sampling.min_tokens
    text = OutputText(meaning(), stop=[stop], end_tokens=ends, min_tokens=least)
    pieces, cut = [], False
    for output in outputs:
        if not text.stopped:
            pieces.append(text.feed(output.tokens, output.origins, output.logprobs))
            cut = text.stopped and len(output.tokens) > 1
    whole = joined([*pieces, text.finish()])
    assert len(whole.logprobs) == (0 if request.logprobs is None else len(whole.tokens))
    return whole.text, whole.tokens, text.num_tokens, cut


def effects(request: Request, tokens: tuple[int, ...]) -> list[str]:
    """Which parameters made a difference to this output."""
    sampling = request.sampling
    without = {
        "a penalty that changed a token": replace(
            sampling, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0
        ),
        "a bias that changed a token": replace(sampling, logit_bias=()),
        "a bad word that changed a token": replace(sampling, bad_word_ids=()),
        "min_tokens that changed a token": replace(sampling, min_tokens=0),
    }
    changed = [replace(plain(request), sampling=other) for other in without.values()]
    changed.append(replace(plain(request), grammar=""))
    names = [*without, "a mask that changed a token"]
    different = [(name, other) for name, other in zip(names, changed, strict=True) if other != plain(request)]
    found = outputs_of(engine("demo"), [other for _, other in different])
    return [name for (name, _), outputs in zip(different, found, strict=True) if tokens_of(outputs) != tokens]


def test_a_few_combinations_of_parameters_give_the_tokens_of_plain_decoding() -> None:
    check(8, seed=2, least=0)


@pytest.mark.ci
def test_all_parameters_give_the_tokens_of_plain_decoding() -> None:
    check(24, seed=0, least=4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_more_combinations_do() -> None:
    check(300, seed=1)
