"""The fields of a completion request over HTTP, with a scripted pipeline."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Annotated, Any, get_args, get_origin
from unittest.mock import Mock

import pytest
from pydantic import ConfigDict, TypeAdapter, ValidationError

from deploy.bounded_json import MOST
from deploy.client_request import MAX_PROMPT_LOGPROBS
from deploy.encoding import Encoder
from deploy.no_effect import NO_EFFECT
from deploy.openai_api import large
from deploy.openai_api.chat_requests import ChatRequest, Message
from deploy.openai_api.large import LARGE_BYTES
from deploy.openai_api.requests import Body, CompletionRequest, Prompt, Stop, client_requests_from
from deploy.openai_api.tokens import DetokenizeRequest
from deploy.service import MANY_CHARACTERS
from tests.scripted import ENDED, Scripted, ask, event, events_of, generated, ids, model, scored, served
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import load_settings
from triforce_core.errors import InvalidValueError

LENGTH = gen.FINISH_REASON_LENGTH


def answered(script: Any = (ENDED,), **fields: Any) -> tuple[Any, Scripted]:
    """The answer to a request that must succeed."""
    client, service, pipelines = served(*script)
    answer = ask(client, **fields)
    assert answer.status_code == 200, answer.text
    assert (service.in_flight, pipelines.open) == (0, 0)
    return answer.json(), pipelines


def streamed(script: Any, **fields: Any) -> list[Any]:
    """The chunks of a stream that must succeed."""
    client, service, pipelines = served(*script)
    *chunks, done = events_of(ask(client, stream=True, **fields))
    assert done == "[DONE]"
    assert (service.in_flight, pipelines.open) == (0, 0)
    return chunks


def choices_in(chunks: list[Any], index: int) -> list[Any]:
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


def refused(**fields: Any) -> dict[str, Any]:
    client, service, pipelines = served(ENDED)
    answer = ask(client, **fields)
    assert answer.status_code == 400, answer.text
    assert not pipelines.requests
    assert service.in_flight == 0
    error: dict[str, Any] = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


def prompt_scores(text: str) -> pb.DecodeEvent:
    """An event with the prompt's logprobs. Each logprob tells its token, and the best alternative is the number after
    it.
    """
    made = event([])
    for place, token in enumerate(ids(text)):
        given = {"logprob": -token, "top_ids": [token + 1, token], "top_logprobs": [-0.5, -token]} if place else {}
        made.prompt_logprobs.append(gen.TokenLogprobs(**given))
    return made


# -- several completions -----------------------------------------------------------------------------------------------

SCRIPT = (event(ids("a b")), 0.01, event(ids(" c"), LENGTH))


def test_choices_are_counted_prompt_by_prompt() -> None:
    answer, pipelines = answered(SCRIPT, prompt=["def", "import os"], n=2, seed=5)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert {choice["text"] for choice in answer["choices"]} == {"a b c"}
    sent = [(list(request.prompt_token_ids), request.seed) for request in pipelines.requests]
    assert sent == [(ids(prompt), seed) for prompt in ("def", "import os") for seed in (sent[0][1], sent[1][1])]
    assert sent[0][1] == 5 != sent[1][1]
    assert [choice["triforce"]["seed"] for choice in answer["choices"]] == [seed for _, seed in sent]
    assert "triforce" not in answer
    prompt, output = len(ids("def")) + len(ids("import os")), 4 * len(ids("a b c"))
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_cached_tokens_are_those_that_the_first_completion_of_each_prompt_found() -> None:
    """The other completions may have found what the first one left. A prompt counts once, as in `prompt_tokens`."""
    script = (pb.DecodeEvent(entered=True, cached_tokens=3), event(ids("a")), event(ids(" c"), LENGTH))
    fields: dict[str, Any] = {"prompt": [ids("def f"), ids("import os")], "n": 2}
    usage = answered(script, **fields)[0]["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 6}
    assert streamed(script, **fields, stream_options={"include_usage": True})[-1]["usage"] == usage
    assert answered(script)[0]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


def test_chunks_of_several_choices_tell_whose_they_are() -> None:
    fields: dict[str, Any] = {"prompt": [ids("def"), ids("import os")], "n": 2, "seed": 5}
    chunks = streamed(SCRIPT, **fields, stream_options={"include_usage": True})
    assert chunks[-1]["usage"] == answered(SCRIPT, **fields)[0]["usage"]
    for index in range(4):
        own = choices_in(chunks, index)
        assert "".join(choice["text"] for choice in own) == "a b c"
        assert [choice["finish_reason"] for choice in own] == [None, "length"]
    told = [(chunk["choices"][0]["index"], chunk["triforce"]) for chunk in chunks if "triforce" in chunk]
    assert sorted(index for index, extras in told if set(extras) == {"seed"}) == [0, 1, 2, 3]
    assert sorted(index for index, extras in told if "controller" in extras) == [0, 1, 2, 3]


def test_prompts_take_a_place_for_each_of_their_choices() -> None:
    client, service, _ = served(ENDED)
    room = service.room
    service.in_flight = room - 1
    assert ask(client, prompt=["a", "b"]).status_code == 429
    assert ask(client, prompt=["a"]).status_code == 200
    assert service.in_flight == room - 1


def test_too_many_prompts_are_refused_before_a_request_is_made_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Mock(wraps=replace)
    monkeypatch.setattr("deploy.openai_api.requests.replace", copies)
    body = CompletionRequest(prompt=["a"] * 2_000)
    with pytest.raises(InvalidValueError, match="'2000 prompts' must need at most 8 places"):
        client_requests_from(body, load_settings().speculation, room=8)
    assert copies.call_count <= 2


# -- echo and logprobs -------------------------------------------------------------------------------------------------


def test_the_logprobs_of_an_echo_are_of_prompt_and_output() -> None:
    script = (prompt_scores("def f"), scored(ids(" a")), scored(ids(" b"), LENGTH))
    fields: dict[str, Any] = {"prompt": "def f", "echo": True, "logprobs": 1}
    answer, pipelines = answered(script, **fields)
    assert (pipelines.requests[0].logprobs, pipelines.requests[0].prompt_logprobs) == (1, 1)
    [choice] = answer["choices"]
    tokens, logprobs = [*ids("def f"), *ids(" a"), *ids(" b")], choice["logprobs"]
    assert choice["text"] == "def f a b" == "".join(logprobs["tokens"])
    assert logprobs["token_logprobs"] == [None, *(-token for token in tokens[1:])]
    offsets = [len("".join(logprobs["tokens"][:place])) for place in range(len(tokens))]
    assert logprobs["text_offset"] == offsets
    second = tokens[1]
    after = model().tokenizer.decode([second + 1])
    assert logprobs["top_logprobs"][:2] == [None, {after: -0.5, logprobs["tokens"][1]: -second}]
    assert "prompt_logprobs" not in choice
    pieces = [choice["logprobs"] for choice in choices_in(streamed(script, **fields), 0)]
    assert len(pieces) > 2
    for name, values in logprobs.items():
        assert [value for piece in pieces for value in piece[name]] == values


def test_offsets_count_special_tokens_that_stand_in_the_echoed_text() -> None:
    script = (prompt_scores("a<eos>b"), scored(ids("c"), LENGTH))
    answer, _ = answered(script, prompt="a<eos>b", echo=True, logprobs=0)
    [choice] = answer["choices"]
    assert choice["text"] == "a<eos>bc"
    assert choice["logprobs"]["tokens"] == ["a", "<eos>", "b", "c"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 6, 7]


def test_each_of_several_choices_has_the_prompt_s_logprobs() -> None:
    script = (prompt_scores("def f"), scored(ids(" a"), LENGTH))
    answer, pipelines = answered(script, prompt="def f", n=2, echo=True, logprobs=0)
    first, second = (choice["logprobs"] for choice in answer["choices"])
    assert first == second
    assert len(first["tokens"]) == len(ids("def f")) + len(ids(" a"))
    assert all(set(top) == {token} for top, token in zip(first["top_logprobs"][1:], first["tokens"][1:], strict=True))
    assert [request.HasField("prompt_logprobs") for request in pipelines.requests] == [True, True]


def test_the_logprobs_of_prompts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is for the product of prompt tokens, alternatives and the choices that get them, over all prompts
    together.
    """
    asked: dict[str, Any] = {"prompt": [ids("def f")] * 2, "prompt_logprobs": 2, "n": 2}
    tokens = 2 * len(ids("def f"))
    script = (prompt_scores("def f"), scored(ids(" a"), LENGTH))
    monkeypatch.setattr("deploy.client_request.MAX_PROMPT_LOGPROBS", tokens * 3 * 2)
    assert all(choice["prompt_logprobs"] for choice in answered(script, **asked)[0]["choices"])
    monkeypatch.setattr("deploy.client_request.MAX_PROMPT_LOGPROBS", tokens * 3 * 2 - 1)
    error = refused(**asked)
    assert error["param"] == "prompt_logprobs"
    said = f"'{tokens} prompt tokens x 3 logprobs each x 2 choices' must be at most {tokens * 6 - 1}"
    assert said in error["message"]
    assert refused(prompt=asked["prompt"], n=2, echo=True, logprobs=2)["param"] == "prompt_logprobs"
    twice = refused(prompt=asked["prompt"], n=2, echo=True, logprobs=1, prompt_logprobs=2)
    assert f"{tokens} prompt tokens x 5 logprobs each x 2 choices" in twice["message"], "the echo has them too"
    assert answered(script, prompt=asked["prompt"], n=2)[0]["choices"]
    # Over gRPC they come once, whatever `n`.
    monkeypatch.setattr("deploy.client_request.MAX_PROMPT_LOGPROBS", len(ids("def f")) * 3)
    assert generated(served(*script)[1], text="def f", n=3, prompt_logprobs=2).prompt_logprobs
    with pytest.raises(InvalidValueError, match="'2 prompt tokens x 4 logprobs each x 1 choices' must be at most 6"):
        generated(served(*script)[1], text="def f", n=3, prompt_logprobs=3)


def test_a_prompt_that_fills_a_context_of_128k_may_be_scored_with_all_alternatives() -> None:
    assert MAX_PROMPT_LOGPROBS >= 131_072 * 21


def test_a_prompt_is_scored_without_an_output() -> None:
    """This is how lm_eval asks. The engine draws one token, which nobody sees."""
    script = (prompt_scores("def f"), scored(ids(" a"), LENGTH))
    fields: dict[str, Any] = {"prompt": "def f", "echo": True, "logprobs": 1, "max_tokens": 0}
    answer, pipelines = answered(script, **fields)
    assert pipelines.requests[0].max_tokens == 1
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("def f", "length")
    assert len(choice["logprobs"]["tokens"]) == len(ids("def f"))
    assert answer["usage"]["completion_tokens"] == 0
    own = choices_in(streamed(script, **fields), 0)
    assert "".join(each["text"] for each in own) == "def f"


def test_a_part_of_a_character_is_named_by_its_bytes() -> None:
    tokens = ids("日")
    assert len(tokens) == 3
    answer, _ = answered((scored(ids("a")), scored([*tokens, *ids(" b")], LENGTH)), logprobs=0)
    [choice] = answer["choices"]
    assert choice["text"] == "a日 b"
    assert choice["logprobs"]["tokens"] == ["a", r"bytes:\xe6", r"bytes:\x97", r"bytes:\xa5", " b"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 2]


def test_logprobs_end_with_the_text() -> None:
    script = (scored(ids("a b")), scored(ids(" c d"), LENGTH))
    answer, _ = answered(script, logprobs=0, stop=" c")
    [choice] = answer["choices"]
    assert choice["text"] == "a b" == "".join(choice["logprobs"]["tokens"])


def test_prompt_logprobs_have_vllm_s_form() -> None:
    script = (prompt_scores("def f"), ENDED)
    answer, _ = answered(script, prompt="def f", prompt_logprobs=1)
    [choice] = answer["choices"]
    second = ids("def f")[1]
    name, after = (model().tokenizer.decode([each]) for each in (second, second + 1))
    assert choice["prompt_logprobs"][:2] == [
        None,
        {
            str(second): {"logprob": -second, "rank": 2, "decoded_token": name},
            str(second + 1): {"logprob": -0.5, "rank": 1, "decoded_token": after},
        },
    ]
    assert choice["logprobs"] is None
    chunks = choices_in(streamed(script, prompt="def f", prompt_logprobs=1), 0)
    assert [each for chunk in chunks for each in chunk.get("prompt_logprobs", [])] == choice["prompt_logprobs"]


# -- what vLLM's users send --------------------------------------------------------------------------------------------


def test_what_a_request_adds_reaches_the_pipeline() -> None:
    _, pipelines = answered(ignore_eos=True, stop_token_ids=[7], bad_words=["bad"], min_tokens=2, cache_salt="mine")
    [sent] = pipelines.requests
    assert list(sent.stop_token_ids) == [7]
    assert [list(word.values) for word in sent.sampling.bad_word_ids] == [ids("bad"), ids(" bad")]
    assert sent.sampling.min_tokens == 2
    assert sent.cache_salt == "mine"


def test_a_prompt_is_truncated_to_its_last_tokens() -> None:
    text = "import os\nimport sys"
    answer, pipelines = answered(prompt=text, truncate_prompt_tokens=3, echo=True)
    assert list(pipelines.requests[0].prompt_token_ids) == ids(text)[-3:]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["choices"][0]["text"] == model().tokenizer.decode(ids(text)[-3:]) + "a"


def test_a_text_that_is_far_too_long_is_refused_by_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []

    async def encode(self: Encoder, text: str, *, special: bool = True) -> tuple[int, ...]:
        encoded.append(len(text))
        return await plain(self, text, special=special)

    plain = Encoder.encode
    monkeypatch.setattr(Encoder, "encode", encode)
    context = model().limits.context_length
    beginning = MANY_CHARACTERS * context
    far, near = "a " * beginning, "a " * (context // 4) + " " * beginning
    client, _, pipelines = served(ENDED)
    answer = ask(client, prompt=far)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "must fit the context of" in answer.json()["error"]["message"]
    assert encoded == [beginning]
    assert pipelines.requests == []
    encoded.clear()
    answer, pipelines = answered(prompt=near)  # long in characters, but not in tokens
    assert encoded == [beginning, len(near)]
    assert list(pipelines.requests[0].prompt_token_ids) == ids(near)
    assert answer["usage"]["prompt_tokens"] == len(ids(near)) < context
    encoded.clear()
    answered(prompt=far, truncate_prompt_tokens=3)
    assert encoded == [len(far)]


def test_the_output_may_end_after_its_stop_string() -> None:
    script = (event(ids("a b")), event(ids(" c d"), LENGTH))
    for include, text in ((True, "a b c"), (False, "a b ")):
        answer, _ = answered(script, stop="c", include_stop_str_in_output=include, return_token_ids=True)
        [choice] = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")
        assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"]


def test_a_completion_is_resumed_after_the_tokens_that_the_client_has() -> None:
    answer, pipelines = answered(resume_token_ids=ids("x y"), seed=1)
    assert list(pipelines.requests[0].resume_token_ids) == ids("x y")
    assert answer["usage"]["completion_tokens"] == len(ids("x y")) + 1


SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
GUIDES: list[tuple[str, list[dict[str, Any]]]] = [  # the SDK's name of the form, and ways to ask for it over HTTP
    (
        "json_schema",
        [
            {"guided_json": SCHEMA},
            {"guided_json": json.dumps(SCHEMA)},
            {"structured_outputs": {"json": SCHEMA}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}},
        ],
    ),
    ("json_object", [{"structured_outputs": {"json_object": True}}, {"response_format": {"type": "json_object"}}]),
    ("regex", [{"guided_regex": "[a-z]{3}"}, {"structured_outputs": {"regex": "[a-z]{3}"}}]),
    ("choice", [{"guided_choice": ["red", "green"]}, {"structured_outputs": {"choice": ["red", "green"]}}]),
    ("grammar", [{"guided_grammar": 'start: "a"'}, {"structured_outputs": {"grammar": 'start: "a"'}}]),
]
VALUES = {
    "json_schema": json.dumps(SCHEMA),
    "json_object": True,
    "regex": "[a-z]{3}",
    "choice": gen.Choices(values=["red", "green"]),
    "grammar": 'start: "a"',
}


@pytest.mark.parametrize(("form", "ways"), GUIDES, ids=lambda value: value if isinstance(value, str) else "")
def test_all_ways_to_ask_for_a_form_send_the_sdk_s_grammar(form: str, ways: list[dict[str, Any]]) -> None:
    _, service, pipelines = served(ENDED)
    generated(service, **{form: VALUES[form]})
    expected = pipelines.requests[0].grammar
    assert expected
    for fields in ways:
        assert answered(**fields)[1].requests[0].grammar == expected, fields
    assert not answered(response_format={"type": "text"})[1].requests[0].grammar


MANY = 20_000  # errors, of some hundred bytes each, and then a thousand where they are listed
WRONG = [""] * MANY
UNKNOWN: dict[str, Any] = dict.fromkeys(map(str, range(MANY)), "")


@pytest.mark.parametrize(
    ("made", "fields", "place"),
    [
        (CompletionRequest, {"stop_token_ids": [1, ""]}, "stop_token_ids.1"),
        (CompletionRequest, {"resume_token_ids": WRONG}, "resume_token_ids.0"),
        (CompletionRequest, UNKNOWN, "0"),
        (CompletionRequest, {**UNKNOWN, "stream": "yes"}, "stream"),
        (CompletionRequest, {"structured_outputs": {"regex": "a", **UNKNOWN}}, "structured_outputs.0"),
        (ChatRequest, {"messages": WRONG[:1000]}, "messages.0"),
        (ChatRequest, {"messages": [{}] * 1000}, "messages.0.role"),
        (ChatRequest, {"messages": [{"role": "user", "tool_calls": WRONG[:1000]}]}, "messages.0.tool_calls.0"),
        (ChatRequest, {"tools": [1] * 128}, "tools.0"),
        (DetokenizeRequest, {"tokens": WRONG}, "tokens.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_body_with_many_errors_is_refused_at_one_of_the_first(
    made: type[Body], fields: dict[str, Any], place: str
) -> None:
    """The answer tells the first error only. The errors of a body take much more memory than the body."""
    needed: dict[str, Any] = {CompletionRequest: {"prompt": "a"}, ChatRequest: {"messages": []}}.get(made, {})
    with pytest.raises(ValidationError) as caught:
        made.model_validate(needed | fields)
    assert caught.value.error_count() <= 100
    assert ".".join(map(str, caught.value.errors()[0]["loc"])) == place


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (Prompt, [1.5] * MANY),
        (Prompt, [*WRONG, 1]),
        (Prompt, [WRONG]),
        (Prompt, [[""]] * MANY),
        (Stop, [1] * MANY),
        (Message.model_fields["content"].annotation, WRONG),
    ],
    ids=["floats", "mixed", "list", "lists", "stop", "content"],
)
def test_the_errors_of_a_union_s_members_are_as_few(field: Any, value: Any) -> None:
    """Pydantic makes errors for all members of a union, also for those that the value was not meant for. No answer
    tells them.
    """
    union = get_args(field)[0] if get_origin(field) is Annotated else field
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(union, config=ConfigDict(strict=True)).validate_python(value)
    assert caught.value.error_count() <= 10


def test_an_answer_to_many_errors_tells_the_first() -> None:
    """The answer is that to the first error alone."""
    for field, value in (("nonsense", 1), ("temperature", "hot")):
        assert refused(**{field: value}, **dict.fromkeys(map(str, range(1000)))) == refused(**{field: value})


def test_a_body_that_opens_many_lists_is_refused_before_they_are_made() -> None:
    def error_of(text: str) -> str:
        answer = served(ENDED)[0].post("/v1/completions", content=text, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        return str(answer.json()["error"]["message"])

    for many in ("[]," * MOST, "[" * MOST, "{" * MOST, '"":1,' * MOST):
        found = f"body: '{MOST + 3} objects, lists and fields' must be at most {MOST}"
        assert error_of('{"x": [' + many) == found
    for text in ("[" * 2 * MOST, '\\"[{' * MOST):  # marks in texts are none
        assert error_of(json.dumps({"prompt": text})).startswith("prompt: ")


LIMITED: list[tuple[type[Body], str, Any, int]] = [
    (CompletionRequest, "stop", [1], 16),
    (CompletionRequest, "stop_token_ids", ["a"], 256),
    (CompletionRequest, "bad_words", [1], 128),
    (CompletionRequest, "guided_choice", [1], 1024),
    (CompletionRequest, "structured_outputs.choice", [1], 1024),
    (CompletionRequest, "speculation.lookaheads", ["a"], 2),
    (CompletionRequest, "prompt", [[1.5]], 2048),
    (CompletionRequest, "prompt", [""], 2048),
    (CompletionRequest, "logit_bias", {}, 1024),
    (ChatRequest, "tools", [1], 128),
    (ChatRequest, "messages", [1], 16_384),
    (ChatRequest, "messages", [{"content": [1] * 16_384}], 16_384),
    (ChatRequest, "messages", [{"tool_calls": [1] * 8_192}, {"tool_calls": [1] * 8_191}], 16_384),
]


@pytest.mark.parametrize(("made", "field", "wrong", "most"), LIMITED, ids=lambda value: str(value)[:30])
def test_a_list_is_counted_before_its_entries_are_read(made: type[Body], field: str, wrong: Any, most: int) -> None:
    """Each entry is wrong, so the error would be another if one was read."""
    value = dict.fromkeys(map(str, range(most + 1)), "") if wrong == {} else (wrong * (most + 1))[: most + 1]
    outer, _, inner = field.partition(".")
    needed: dict[str, Any] = {"messages": []} if made is ChatRequest else {"prompt": "a"}
    with pytest.raises(ValidationError) as caught:
        made.model_validate(needed | {outer: {inner: value} if inner else value})
    [error] = caught.value.errors()
    assert ".".join(map(str, error["loc"])) == field
    assert re.search(rf"has \d+ entries, of which at most {most} are allowed", error["msg"])


def test_a_large_body_is_read_outside_the_event_loop_with_the_same_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    on_loop: list[bool] = []

    def seen(name: str, plain: Any) -> Any:
        def traced(*args: Any) -> Any:
            try:
                asyncio.get_running_loop()
                on_loop.append(True)
            except RuntimeError:
                on_loop.append(False)
            return plain(*args)

        return traced

    monkeypatch.setattr(large, "bounded_loads", seen("read", large.bounded_loads))
    monkeypatch.setattr(CompletionRequest, "names", seen("names", CompletionRequest.names))
    monkeypatch.setattr(large, "written", seen("written", large.written))
    long = "a " * LARGE_BYTES
    assert refused(prompt=long, temperature="hot") == refused(prompt="a", temperature="hot")
    assert refused(prompt=long, nonsense=1) == refused(prompt="a", nonsense=1)
    on_loop.clear()
    answer, pipelines = answered(prompt=long, truncate_prompt_tokens=3)
    assert on_loop
    assert not any(on_loop)
    assert answer["usage"]["prompt_tokens"] == 3 == len(pipelines.requests[0].prompt_token_ids)
    client, *_ = served(ENDED)
    for content, words in ((b"{" + b" " * LARGE_BYTES, "is not valid JSON"), (b"\xff" * LARGE_BYTES * 2, "UTF-8")):
        broken = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert (broken.status_code, broken.json()["error"]["param"]) == (400, "body")
        assert words in broken.json()["error"]["message"]


def test_an_answer_written_in_pieces_is_the_same_json() -> None:
    deep: Any = {"x": [1.5, None, True, "ü\n", {}, []]}
    for _ in range(8):
        deep = {"a": deep, "b": [deep], "c": (1, 2)}
    assert large.written(deep) == json.dumps(deep, ensure_ascii=False, separators=(",", ":"))


def sent(**fields: Any) -> pb.DecodeRequest:
    """What the pipeline is asked for, without the time that is left for it."""
    request = answered(**fields)[1].requests[0]
    request.ClearField("timeout_s")
    return request


@pytest.mark.parametrize("name", NO_EFFECT)
def test_a_field_without_effect_is_accepted_where_it_asks_for_nothing(name: str) -> None:
    values, instead = NO_EFFECT[name]
    plain = sent(seed=1)
    for value in (None, *values):
        if name in CompletionRequest.names() and value is None:
            continue
        assert sent(seed=1, **{name: value}) == plain
    if name not in CompletionRequest.names():
        error = refused(**{name: "other"})
        assert error["message"].startswith(f"{name}: 'other' is not supported: leave it out or set it to ")
        assert error["message"].endswith(instead)
        assert (error["param"], error["code"]) == (name, "unsupported_value")
        assert refused(**{name: 1.5 if True in values else True})["code"] == "unsupported_value"


def test_values_that_only_look_odd_are_read() -> None:
    odd = sent(max_tokens=2.0, top_k=5.0, seed=7.0, min_tokens=1.0, priority=1.0, n=1.0)
    assert (odd.max_tokens, odd.sampling.top_k, odd.seed) == (2, 5, 7)
    assert sent(vllm_xargs=None, seed=1) == sent(seed=1)
    assert sent(top_k=-1, seed=1) == sent(top_k=0, seed=1)
    assert sent(top_p=0, seed=1) == sent(temperature=0, seed=1)
    for field in ("max_tokens", "top_k", "seed", "n"):
        assert "valid integer" in refused(**{field: 2.5})["message"]
        assert "valid integer" in refused(**{field: "2"})["message"]


def test_each_chunk_tells_the_usage_so_far() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = streamed(SCRIPT, prompt=ids("def f"), stream_options=options)
    prompt, first, whole = len(ids("def f")), len(ids("a b")), len(ids("a b c"))
    found = [(each["usage"]["prompt_tokens"], each["usage"]["completion_tokens"]) for each in (*chunks, last)]
    assert found == [(prompt, first), (prompt, whole), (prompt, whole)]
    assert last["choices"] == []
    *chunks, _ = streamed(SCRIPT, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in chunks] == [None, None]
    assert all("usage" not in chunk for chunk in streamed(SCRIPT, stream_options={"continuous_usage_stats": True}))


def test_unsupported_fields_are_accepted_where_they_ask_for_nothing() -> None:
    assert streamed(SCRIPT, stream_options={"include_obfuscation": False})
    assert streamed(SCRIPT, stream_options={"include_usage": None})[-1]["choices"], "no usage at the end"
    assert refused(nonsense=1)["code"] == "unknown_parameter"


# -- other routes ------------------------------------------------------------------------------------------------------


def test_text_becomes_tokens_and_text_again() -> None:
    client, *_ = served(ENDED)
    text = "def naïve():\n    return '日本'"
    answer = client.post("/tokenize", json={"prompt": text, "return_token_strs": True, "model": "demo"}).json()
    context = model().limits.context_length
    names = model().tokenizer.convert_ids_to_tokens(ids(text))
    assert answer == {"count": len(ids(text)), "max_model_len": context, "tokens": ids(text), "token_strs": names}
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    assert client.get("/v1/models").json()["data"][0]["max_model_len"] == context


def test_routes_that_are_not_there_are_named() -> None:
    client, path = served(ENDED)[0], "/v1/embeddings"
    answer = client.post(path, json={"input": "text"})
    assert answer.status_code == 404
    assert answer.json()["error"] == {
        "message": f"{path} is not supported by this server; /v1/completions is",
        "type": "invalid_request_error",
        "param": None,
        "code": "unsupported_route",
    }
    assert path not in client.get("/openapi.json").json()["paths"]
