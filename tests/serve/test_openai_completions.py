"""Completions through the official client: whole and streamed, equal to the SDK's and to plain decoding."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import requests
from openai import BadRequestError, NotFoundError, OpenAI

from tests.serve.conftest import Server
from triforce_core.client import TriForceClient
from triforce_core.models.files import load_tokenizer

PROMPTS = ["def main():\n    ", "import os\n\nclass Folder:\n    def "]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}},
    "required": ["name"],
    "additionalProperties": False,
}
PLAIN = {"speculation": {"tiers": "target"}}


def texts_of(openai: OpenAI, **asked: Any) -> list[str]:
    """The texts of the choices, which must be the same streamed, whole, and without speculation."""
    extra = asked.pop("extra_body", {})
    whole = openai.completions.create(model="demo", **asked, extra_body=extra)
    plain = openai.completions.create(model="demo", **asked, extra_body=extra | PLAIN)
    texts = [""] * len(whole.choices)
    options = {"include_usage": True}
    last = None
    for chunk in openai.completions.create(
        model="demo", **asked, stream=True, stream_options=options, extra_body=extra
    ):
        last = chunk
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [choice.index for choice in whole.choices] == [*range(len(texts))]
    assert [choice.text for choice in whole.choices] == texts == [choice.text for choice in plain.choices]
    assert last is not None
    # A later answer may find more KV.
    usages = [
        answer.usage.model_dump(exclude={"prompt_tokens_details"}) for answer in (whole, plain, last) if answer.usage
    ]
    assert len(usages) == 3
    assert usages[0] == usages[1] == usages[2]
    return texts


def test_several_prompts_and_completions_are_the_sdk_s(openai: OpenAI, client: TriForceClient) -> None:
    expected = [
        choice.text
        for prompt in PROMPTS
        for choice in client.generate(prompt, n=2, max_tokens=24, temperature=0.8, seed=5).choices
    ]
    assert len({*expected}) == 4
    asked: dict[str, Any] = {"n": 2, "max_tokens": 24, "temperature": 0.8, "seed": 5}
    assert texts_of(openai, prompt=PROMPTS, **asked) == expected
    tokens = [load_tokenizer("demo")(prompt)["input_ids"] for prompt in PROMPTS]
    assert texts_of(openai, prompt=tokens, **asked) == expected


def test_logprobs_and_echo_are_the_sdk_s(openai: OpenAI, client: TriForceClient) -> None:
    prompt = PROMPTS[1]
    asked: dict[str, Any] = {"max_tokens": 16, "temperature": 0.8, "seed": 3, "echo": True, "logprobs": 2}
    expected = client.generate(prompt, **asked, prompt_logprobs=2)
    assert texts_of(openai, prompt=prompt, **asked) == [expected.text]
    assert expected.text.startswith(prompt)
    found = openai.completions.create(model="demo", prompt=prompt, **asked).choices[0].logprobs
    assert found is not None
    assert found.tokens
    assert found.token_logprobs
    assert found.top_logprobs
    scores = [*expected.prompt_logprobs, *expected.logprobs]
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1:] == pytest.approx([score.logprob for score in scores[1:]], abs=1e-3)
    assert "".join(found.tokens) == expected.text
    assert found.text_offset == [len("".join(found.tokens[:place])) for place in range(len(scores))]
    best = [max(top, key=lambda token: top[token]) for top in found.top_logprobs[1:]]
    names = [load_tokenizer("demo").decode([next(iter(score.top))]) for score in scores[1:]]
    assert best == names


def test_a_continuation_is_scored_as_lm_eval_does_it(openai: OpenAI) -> None:
    """Its sum of logprobs, and whether greedy decoding would write it: from the echo alone, and with one token more."""
    context = load_tokenizer("demo")(PROMPTS[0])["input_ids"]
    greedy = openai.completions.create(
        model="demo", prompt=context, max_tokens=4, temperature=0, logprobs=1, extra_body={"return_token_ids": True}
    ).choices[0]
    continued = greedy.model_extra["token_ids"] if greedy.model_extra else []
    assert greedy.logprobs is not None
    assert greedy.logprobs.token_logprobs
    scored = {}
    for max_tokens in (0, 1):
        for name, ending in (("greedy", continued), ("other", [*continued[:-1], (continued[-1] + 1) % 4096])):
            answer = openai.completions.create(
                model="demo", prompt=[[*context, *ending]], max_tokens=max_tokens, echo=True, logprobs=1, temperature=0
            )
            found = answer.choices[0].logprobs
            assert found is not None
            assert found.tokens
            assert found.token_logprobs
            assert found.top_logprobs
            last = len(found.tokens) - max_tokens
            assert last == len(context) + len(ending)
            pairs = zip(found.tokens[len(context) : last], found.top_logprobs[len(context) : last], strict=True)
            is_greedy = all(token == max(top, key=lambda each: top[each]) for token, top in pairs)
            scored[name, max_tokens] = (sum(found.token_logprobs[len(context) : last]), is_greedy)
    assert (
        scored["greedy", 0]
        == scored["greedy", 1]
        == (pytest.approx(sum(greedy.logprobs.token_logprobs), abs=1e-3), True)
    )
    assert scored["other", 0] == scored["other", 1]
    assert not scored["other", 0][1]
    assert scored["other", 0][0] < scored["greedy", 0][0] < 0
    assert math.isfinite(scored["other", 0][0])


def test_forms_of_the_output_are_the_sdk_s(openai: OpenAI, client: TriForceClient) -> None:
    asked: dict[str, Any] = {"prompt": "person = ", "max_tokens": 60, "temperature": 0.8, "seed": 2}
    expected = client.generate(**asked, json_schema=SCHEMA).text
    for extra in (
        {"guided_json": SCHEMA},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}},
    ):
        [text] = texts_of(openai, **asked, extra_body=extra)
        assert text == expected
        assert [*json.loads(text)] == ["name"]
    assert texts_of(openai, **asked, extra_body={"structured_outputs": {"choice": ["red", "green"]}}) == [
        client.generate(**asked, choice=["red", "green"]).text
    ]


def test_vllm_s_fields_are_obeyed(openai: OpenAI, client: TriForceClient) -> None:
    asked: dict[str, Any] = {"prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0.8, "seed": 9}
    extra: dict[str, Any] = {"min_tokens": 20, "ignore_eos": True, "repetition_penalty": 1.2, "bad_words": ["self"]}
    assert texts_of(openai, **asked, extra_body=extra | {"cache_salt": "mine", "priority": -3}) == [
        client.generate(**asked, **extra).text
    ]
    truncated = openai.completions.create(model="demo", **asked, extra_body={"truncate_prompt_tokens": 2})
    assert truncated.usage is not None
    assert truncated.usage.prompt_tokens == 2


def test_refusals_are_the_client_s_own_errors(openai: OpenAI) -> None:
    for fields in ({"best_of": 2}, {"suffix": "x"}, {"extra_body": {"nonsense": 1}}):
        with pytest.raises(BadRequestError) as refused:
            openai.completions.create(model="demo", prompt="a", **fields)  # type: ignore[arg-type]
        assert refused.value.param in {"best_of", "suffix", "nonsense"}
    with pytest.raises(NotFoundError, match="/v1/embeddings is not supported"):
        openai.embeddings.create(model="demo", input="text")


def test_tokens_of_the_running_server(server: Server) -> None:
    answer = requests.post(f"{server.url}/tokenize", json={"prompt": PROMPTS[0]}, timeout=30).json()
    assert answer["tokens"] == load_tokenizer("demo")(PROMPTS[0])["input_ids"]
    back = requests.post(f"{server.url}/detokenize", json={"tokens": answer["tokens"]}, timeout=30).json()
    assert back == {"prompt": PROMPTS[0]}
