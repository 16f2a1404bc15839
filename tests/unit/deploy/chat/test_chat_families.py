"""Answers as the templates of many models write them: what was put in is read out of them, and their grammars allow
them.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from deploy.chat import families
from deploy.chat.families import Family, grammar
from deploy.chat.parsing import Arguments, Call, Content, Event, Reasoning, merged
from tests.chat_models import LLAMA, of_bytes
from triforce_core.errors import InvalidValueError
from triforce_core.sampling.guides import Guide

TEMPLATES = Path(__file__).parents[3] / "templates"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "any"},
        "days": {"type": "integer", "description": "how many"},
        "ratio": {"type": "number", "description": "of two"},
        "exact": {"type": "boolean", "description": "or not"},
        "filter": {"type": "object", "description": "of results"},
        "names": {"type": "array", "items": {"type": "string"}, "description": "a list"},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}], "description": "or none"},
    },
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Looks.", "parameters": PARAMETERS}}
    for name in ("look_up", "read-file")
]
SCHEMAS = {tool["function"]["name"]: PARAMETERS for tool in TOOLS}  # type: ignore[index]
USER = {"role": "user", "content": "Look."}
PLAIN: list[dict[str, Any]] = [
    {"text": 'Łódź 😀, "so" \\ it\'s', "days": 3, "ratio": -2.5, "exact": False},
    {},
    {"text": "one\n\n  two\n", "exact": True},
    {"text": "17", "days": 0},
    {"text": ""},
]
NESTED: list[dict[str, Any]] = [
    {"filter": {"a": [1, {"b": None}], "c": {"d": True, "e": "ż\n\"'"}}, "names": ["x", "{", "]"]},
    {"filter": {}, "names": []},
]


@dataclass(frozen=True)
class Model:
    """What a template writes around an answer, and what it cannot write."""

    file: str
    form: Any
    begin: str  # of an answer
    end: str
    reasons: bool = False  # the template writes the reasoning of answers
    content: bool = True  # it writes content before calls
    several: int = 99  # calls in one answer, at most
    nested: bool = True  # arguments within arguments: some write them as Python does
    null: bool = True  # one that is read as null
    texts: bool = False  # it expects arguments as texts

    @property
    def template(self) -> str:
        return LLAMA if self.file == "llama" else (TEMPLATES / f"{self.file}.jinja").read_text(encoding="utf-8")

    @property
    def family(self) -> Family:
        return Family.of(self.template)

    def arguments(self) -> list[dict[str, Any]]:
        """Those that this model's form can carry. Text cannot hold what ends a value of its form."""
        inside = '<|im_start|> [TOOL_CALLS][ARGS] </tool_call> <function=f> <think></think> } {" `'
        if not isinstance(self.form, families.ParameterCalls):
            inside += " ".join(self.form.markers) if not isinstance(self.form, families.ChannelCalls) else ""
        found = [*PLAIN, {"text": inside}]
        return found + (NESTED if self.nested else []) + ([{"limit": None}, {"limit": 4}] if self.null else [])


QWEN = ("<|im_start|>assistant\n", "<|im_end|>")
DEEPSEEK = ("<｜Assistant｜>", "<｜end▁of▁sentence｜>")
GLM = ("<|assistant|>", "<|user|>")
MODELS = [
    Model("Qwen-Qwen2.5-7B-Instruct", families.HERMES, *QWEN),
    Model("Qwen-Qwen3-0.6B", families.HERMES, *QWEN, reasons=True),
    Model("Qwen-QwQ-32B", families.HERMES, *QWEN),
    Model("MiMo-VL", families.HERMES, *QWEN),
    Model("ibm-granite-granite-4.0", families.HERMES, "assistant<|end_of_role|>", "<|end_of_text|>"),
    Model("Qwen3-Coder", families.QWEN_CODER, *QWEN),
    Model("Qwen3.5-4B", families.QWEN_CODER, *QWEN, reasons=True),
    Model("StepFun3.5-Flash", families.QWEN_CODER, *QWEN, reasons=True),
    Model("ByteDance-Seed-OSS", families.SEED, "assistant\n", "<seed:eos>", reasons=True, nested=False),
    Model("of_minimax", families.MINIMAX, "]~b]assistant\n", "[e~[", reasons=True),
    Model("GLM-4.6", families.GLM, *GLM, reasons=True),
    Model("GLM-4.7-Flash", families.FLAT_GLM, *GLM, reasons=True),
    Model(
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
        families.DEEPSEEK_R1,
        *DEEPSEEK,
        content=False,
        several=2,
        texts=True,
    ),
    Model("deepseek-ai-DeepSeek-V3.1", families.DEEPSEEK_V3, "<｜Assistant｜></think>", DEEPSEEK[1], texts=True),
    Model("of_kimi", families.KIMI, "<|im_assistant|>assistant<|im_middle|>", "<|im_end|>", reasons=True),
    Model("mistralai-Mistral-Nemo-Instruct-2407", families.MISTRAL, "[/INST]", "</s>", content=False),
    Model("Mistral-Small-3.2-24B-Instruct-2506", families.NAMED_MISTRAL, "[/INST]", "</s>", content=False),
    Model("mistralai-Ministral-3-14B-Reasoning-2512", families.NAMED_MISTRAL, "[/INST]", "</s>"),
    Model(
        "openai-gpt-oss-120b",
        families.CHANNELS,
        "<|start|>assistant",
        "<|call|>",
        reasons=True,
        content=False,
        several=1,
    ),
    Model("llama", families.LLAMA3, "assistant<|end_header_id|>\n\n", "<|eot_id|>", content=False, several=1),
]
by_name = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.file)


def render(model: Model, messages: list[dict[str, Any]], **variables: Any) -> str:
    fixed = {"tools": TOOLS, "chat_template": model.template, "bos_token": "<s>", "eos_token": "</s>"}
    [text], _ = render_jinja_template([messages], **fixed, **variables)
    return str(text)


def call(model: Model, arguments: dict[str, Any], index: int) -> dict[str, Any]:
    given = json.dumps(arguments, ensure_ascii=False) if model.texts else arguments
    name = ("look_up", "read-file")[index % 2]
    return {"id": f"call{index:05}", "type": "function", "function": {"name": name, "arguments": given}}


def answer(model: Model, calls: list[dict[str, Any]], content: str = "", reasoning: str = "") -> str:
    """What the template adds for an answer, from where the model begins to where it stops."""
    message: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": calls}
    if model.file == "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B":
        message["content"] = None  # it writes either content or calls
    if reasoning:
        message["reasoning_content"] = reasoning
    before, whole = render(model, [USER]), render(model, [USER, message])
    assert whole.startswith(before)
    header = "" if before.endswith(model.begin) else model.begin
    added = whole.removeprefix(before)
    assert added.lstrip("\n").startswith(header) or header in added
    return added.partition(header)[2].partition(model.end)[0] if header else added.partition(model.end)[0]


def parsed(model: Model, chunks: list[str], *, begun: bool = False) -> list[Event]:
    parser = model.family.parser(SCHEMAS, reasoning_begun=begun)
    events = [event for chunk in chunks for event in parser.feed(chunk)]
    return merged([*events, *parser.finish()])


def put_in(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    given = [(each["function"]["name"], each["function"]["arguments"]) for each in calls]
    return [(name, json.loads(each) if isinstance(each, str) else each) for name, each in given]


def told(events: list[Event]) -> list[tuple[str, Any]]:
    names = [event.name for event in events if isinstance(event, Call)]
    return list(zip(names, [json.loads(e.text) for e in events if isinstance(e, Arguments)], strict=True))


def cuts(text: str, seed: int) -> list[str]:
    places = sorted(random.Random(seed).choices(range(len(text) + 1), k=9))
    return [text[start:end] for start, end in itertools.pairwise([0, *places, len(text)])]


@by_name
def test_a_form_is_recognised_from_its_template(model: Model) -> None:
    assert model.family.tools is model.form
    assert (model.family.reasoning is not None) or not model.reasons


@by_name
def test_what_a_template_writes_is_read_as_it_was_put_in(model: Model) -> None:
    calls = [call(model, arguments, index) for index, arguments in enumerate(model.arguments())]
    for first in range(0, len(calls), model.several):
        group = calls[first : first + model.several]
        content, reasoning = "I look." if model.content else "", "First,\nthis." if model.reasons else ""
        text = answer(model, group, content, reasoning)
        whole = parsed(model, [text])
        assert told(whole) == put_in(group)
        assert "".join(each.text for each in whole if isinstance(each, Content)).strip() == content
        assert "".join(each.text for each in whole if isinstance(each, Reasoning)).strip() == reasoning
        assert parsed(model, [*text]) == whole
        assert all(parsed(model, cuts(text, seed)) == whole for seed in range(5))


@by_name
def test_a_cut_in_two_does_not_matter(model: Model) -> None:
    calls = [call(model, {"text": "ż\n", "days": 3}, 0), call(model, {}, 1)][: model.several]
    text = answer(model, calls, reasoning="so" if model.reasons else "")
    whole = parsed(model, [text])
    assert told(whole) == put_in(calls)
    for place in range(len(text)):
        assert parsed(model, [text[:place], text[place:]]) == whole


@by_name
def test_reasoning_that_the_prompt_began_is_reasoning(model: Model) -> None:
    if not model.reasons:
        return
    form = model.family.reasoning
    assert form is not None
    text = answer(model, [call(model, {}, 0)], reasoning="so").lstrip()
    assert text.startswith(form.begin)
    events = parsed(model, [text.removeprefix(form.begin)], begun=True)
    assert events == parsed(model, [text])
    assert isinstance(events[0], Reasoning)


# -- grammars ----------------------------------------------------------------------------------------------------------

TOKEN = re.compile(
    r"<[|｜].*[|｜]>|</?[a-z_:]+>|\[/?[A-Z_]+\]"
)  # the markers that are tokens of their own, in most models
LEAF = {"enum": ["red", "green"]}
BOUNDED = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "maxLength": 5},
        "color": {"enum": ["red", "dark blue"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "exact": {"type": "boolean"},
        "names": {"type": "array", "items": LEAF, "maxItems": 2},
        "nested": {"type": "object", "properties": {"a": LEAF}, "required": ["a"], "additionalProperties": False},
        "limit": {"anyOf": [{"type": "integer", "maximum": 9, "minimum": 0}, {"type": "null"}]},
        "needed": {"type": "string", "minLength": 1, "maxLength": 3},
    },
    "required": ["text", "needed"],
    "additionalProperties": False,
}
FUNCTIONS = [{"name": "f", "parameters": BOUNDED}, {"name": "g-h"}]
both = pytest.mark.parametrize("tokens", [True, False], ids=["marked by tokens", "marked by text"])


@cache
def tokenizer(file: str, tokens: bool) -> Any:
    [model] = [each for each in MODELS if each.file == file]
    marks = [text for text in dict.fromkeys(model.family.markers) if TOKEN.fullmatch(text)] if tokens else []
    return of_bytes(["<eos>"], marks, None, "<eos>")


@cache
def vocabulary(file: str, tokens: bool) -> Any:
    return from_tokenizer(tokenizer(file, tokens))


def matcher(model: Model, tokens: bool, functions: list[dict[str, Any]], **asked: Any) -> LLMatcher:
    added = {text: index for text, index in tokenizer(model.file, tokens).get_added_vocab().items() if text != "<eos>"}
    asked = {"reasoning_begun": False, "several": True, **asked}
    made = LLMatcher(vocabulary(model.file, tokens), grammar(model.family, functions, added, **asked), log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def allows(model: Model, tokens: bool, text: str, functions: list[dict[str, Any]], **asked: Any) -> bool:
    made = matcher(model, tokens, functions, **asked)
    ids = tokenizer(model.file, tokens).encode(text, add_special_tokens=False)
    return bool(made.try_consume_tokens(ids) == len(ids) and made.is_accepting())


@both
@by_name
def test_a_grammar_allows_what_the_template_writes(model: Model, tokens: bool) -> None:
    if model.form is families.CHANNELS and not tokens:
        return  # its markers are tokens in all its models
    given: list[dict[str, Any]] = [{"text": "Łódź 😀\nb", "days": 3}, {}]
    given += [{"filter": {"a": [1, {"b": "c"}]}, "names": ["x"]}] if model.nested and model.several > 2 else []
    calls = [call(model, arguments, index) for index, arguments in enumerate(given)][: model.several]
    if model.file == "StepFun3.5-Flash":
        del calls[1:]  # it has no newline between calls, as the other models of its form have
    text = answer(model, calls, reasoning="so" if model.reasons else "")
    text = re.sub(r', "id": "call\d+"|\[CALL_ID\]call\d+', "", text).lstrip("\n")
    functions = [tool["function"] for tool in TOOLS]
    assert allows(model, tokens, text, functions)  # type: ignore[arg-type]
    assert not allows(model, tokens, text.replace("look_up", "look_at"), functions)  # type: ignore[arg-type]
    assert not allows(model, tokens, text.replace("days", "weeks"), functions)  # type: ignore[arg-type]
    assert not allows(model, tokens, "It is so.", functions)  # type: ignore[arg-type]
    assert allows(model, tokens, text, functions, several=False) == (len(calls) == 1)  # type: ignore[arg-type]


def walk(model: Model, tokens: bool, seed: int, **asked: Any) -> str:
    """A text that the grammar allows, drawn at random, with a preference for markers, and for an early end."""
    made, draws = matcher(model, tokens, FUNCTIONS, **asked), random.Random(seed)
    marks = {index for text, index in tokenizer(model.file, tokens).get_added_vocab().items() if text != "<eos>"}
    end = model.family.reasoning.end if model.family.reasoning else ""
    written: list[int] = tokenizer(model.file, tokens).encode(f"hm{end}", add_special_tokens=False) if end else []
    assert made.consume_tokens(written)
    while not (made.is_accepting() and draws.random() < 0.5) and len(written) < 2000:
        bias = made.compute_logit_bias()
        allowed = [
            index for index, each in enumerate(bias) if each and index != tokenizer(model.file, tokens).eos_token_id
        ]
        if not allowed:
            break
        likely = [index for index in allowed if index in marks]
        common = [index for index in allowed if tokenizer(model.file, tokens).decode([index]) in '<>/"\n}], ']
        among = likely if likely and draws.random() < 0.5 else common if common and draws.random() < 0.5 else allowed
        written.append(draws.choice(among))
        assert made.consume_token(written[-1])
    assert made.is_accepting()
    return str(tokenizer(model.file, tokens).decode(written))


@both
@by_name
def test_what_a_grammar_allows_is_read_as_calls_that_obey_the_schema(model: Model, tokens: bool) -> None:
    if model.form is families.CHANNELS and not tokens:
        return
    begun = model.family.reasoning is not None
    for seed in range(4):
        text = walk(model, tokens, seed, reasoning_begun=begun)
        parser = model.family.parser({"f": BOUNDED, "g-h": None}, reasoning_begun=begun)
        events = merged([*parser.feed(text), *parser.finish()])
        assert not any(isinstance(event, Content) for event in events), text
        assert told(events), text
        assert not parser.in_call
        for name, arguments in told(events):
            jsonschema.validate(arguments, BOUNDED if name == "f" else {"type": "object"})


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "string", "pattern": "^a"}, "f.x.*has pattern"),
        ({"type": ["string", "integer"], "minimum": 3}, "f.x.*has minimum"),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}, "f.x.*has items"),
        ({"enum": ["a</parameter>"]}, "f.x: a</parameter>.*must not have </parameter>"),
    ],
)
def test_a_schema_that_text_cannot_be_kept_to_is_refused_by_name(schema: dict[str, Any], place: str) -> None:
    [model] = [each for each in MODELS if each.file == "Qwen3-Coder"]
    functions = [{"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}}]
    with pytest.raises(InvalidValueError, match=f"tools: .*{place}"):
        matcher(model, True, functions)
    [json_model] = [each for each in MODELS if each.file == "Qwen-Qwen3-0.6B"]
    matcher(json_model, True, functions)


ASKED = {
    "regex": (Guide("regex", "[ab]+c"), ["abc", "ac"], ["ab", "abcd"]),
    "choice": (Guide("choice", ["yes", "no"]), ["yes", "no"], ["maybe", "yesno"]),
    "Lark": (Guide("grammar", 'start: "x" reasoning\nreasoning: /[0-9]+/'), ["x12"], ["12", "x"]),
    "EBNF": (Guide("grammar", 'root ::= "x" thought\nthought ::= [0-9]+'), ["x12"], ["12", "x"]),
    "schema": (Guide("json_schema", '{"type": "integer"}'), ["17"], ['"17"']),
}


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("file", ["Qwen-Qwen3-0.6B", "Qwen3.5-4B", "of_kimi", "openai-gpt-oss-120b"])
@both
def test_whatever_is_asked_for_begins_after_the_reasoning(asked: Any, file: str, tokens: bool) -> None:
    guide, right, wrong = asked
    [model] = [each for each in MODELS if each.file == file]
    reasoning = model.family.reasoning
    assert reasoning is not None
    channels = model.form is families.CHANNELS
    if channels and not tokens:
        return
    answers = "<|channel|>final<|message|>" if channels else ""
    rest = f"{reasoning.end}{'<|start|>assistant' if channels else chr(10) * 2}{answers}"
    for text in (*right, *wrong):
        for begin in (f"{reasoning.begin}hm\n{rest}", answers):
            fits = allows(model, tokens, begin + text, [], answer=guide.grammar())
            assert fits == (text in right), (begin, text)
        begun = allows(model, tokens, f"hm\n{rest}{text}", [], answer=guide.grammar(), reasoning_begun=True)
        assert begun == (text in right)
        assert not allows(model, tokens, answers + text, [], answer=guide.grammar(), reasoning_begun=True)
    text = f"{reasoning.begin}hm\n{rest}{right[0]}"
    parser = model.family.parser({}, reasoning_begun=False)
    events = merged([*parser.feed(text), *parser.finish()])
    assert events == [Reasoning("hm\n"), Content(right[0])]
