"""Parsers of outputs: what they find does not depend on how the text was cut, and no text is lost."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.chat import parsing
from deploy.chat.families import (
    ANALYSIS,
    BRACKETED_THINK,
    CHANNELS,
    DEEPSEEK_R1,
    GLM,
    HERMES,
    KIMI,
    LLAMA3,
    MISTRAL,
    NAMED_MISTRAL,
    QWEN_CODER,
    THINK,
    Family,
)
from deploy.chat.json_text import is_object
from deploy.chat.parsing import Arguments, Call, Content, Event, Parser, Reasoning, merged
from deploy.chat.values import JsonValue, Text, parameters_of
from triforce_core.errors import InvalidValueError

TOOLS: dict[str, Any] = {"get_weather": None, "f": None}
FAMILIES = {
    "qwen": Family(HERMES, THINK),
    "hermes": Family(HERMES, None),
    "mistral": Family(MISTRAL, None),
    "magistral": Family(MISTRAL, BRACKETED_THINK),
    "llama": Family(LLAMA3, None),
    "thinking llama": Family(LLAMA3, THINK),
    "r1": Family(None, THINK),
    "none": Family(None, None),
    "named mistral": Family(NAMED_MISTRAL, None),
    "deepseek": Family(DEEPSEEK_R1, THINK),
    "kimi": Family(KIMI, None),
    "coder": Family(QWEN_CODER, None),
    "thinking coder": Family(QWEN_CODER, THINK),
    "glm": Family(GLM, None),
    "channels": Family(CHANNELS, ANALYSIS),
}
MARKERS = ["<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[", "]", ";"]
MARKERS += [*NAMED_MISTRAL.markers, *DEEPSEEK_R1.markers, *KIMI.markers, *QWEN_CODER.markers, *GLM.markers]
MARKERS += [*CHANNELS.markers, "analysis", "commentary", "final", "assistant", "to=functions.f"]
CALLS = [
    '{"name": "f", "arguments": {"a": "</tool_call> ] ; \\" {", "b": [1, {"c": "<tool_call>"}]}}',
    '{"arguments": {"x": 1}, "name": "get_weather"}',
    '{"name": "f", "parameters": {"a": "\\\\"}}',
    '{"name": "f"}',
    '{"name": "f", "arguments": "{\\"a\\": 1}"}',
    '{"name": "other", "parameters": null}',
    '{"name": 3, "arguments": {}}',
    '{"answer": {"name": "f", "arguments": {}}}',
    '{"name": "f", "arguments": {"a": 1} nonsense}',
    "{}",
    'f[ARGS]{"a": 1}',
    'function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>',
    'functions.f:0<|tool_call_argument_begin|>{"a": 1}',
    "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>",
    "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>',
    "<|channel|>analysis<|message|>hm<|end|>",
]
# Markers and calls, whole or cut off anywhere, among ordinary text.
fragment = st.one_of(
    st.sampled_from(MARKERS),
    st.sampled_from(CALLS),
    st.sampled_from([*MARKERS, *CALLS]).flatmap(lambda text: st.integers(0, len(text)).map(lambda end: text[:end])),
    st.sampled_from(["\n", " ", "<", "{", '"', "\\", ",", "ok", "é😀"]),
    st.text(max_size=5),
)
texts = st.lists(fragment, max_size=12).map("".join)
any_text = st.text(st.characters(exclude_categories=()), max_size=5)  # with lone surrogates


def parsed(parser: Parser, *chunks: str) -> list[Event]:
    events: list[Event] = []
    for chunk in chunks:
        events += parser.feed(chunk)
    return merged([*events, *parser.finish()])


def read(family: str, text: str, *, begun: bool = False) -> list[Event]:
    return parsed(FAMILIES[family].parser(TOOLS, reasoning_begun=begun), text)


@pytest.mark.parametrize("family", FAMILIES)
@given(text=texts, cuts=st.lists(st.integers(0, 200), max_size=8), begun=st.booleans())
def test_chunks_do_not_matter(family: str, text: str, cuts: list[int], begun: bool) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    chunks = [text[start:end] for start, end in itertools.pairwise(places)]
    whole = read(family, text, begun=begun)
    for cut in (chunks, [*text]):
        assert parsed(FAMILIES[family].parser(TOOLS, reasoning_begun=begun), *cut) == whole


@pytest.mark.parametrize("family", FAMILIES)
@given(text=texts)
def test_a_text_without_forms_is_content(family: str, text: str) -> None:
    for marker in ("think", "THINK", "tool_call", "TOOL_CALLS", "{", "function", "｜", "|"):
        text = text.replace(marker, "")
    assert read(family, text) == ([Content(text)] if text else [])


@pytest.mark.parametrize("family", ["hermes", "mistral", "llama", "named mistral", "kimi", "coder", "glm"])
@given(text=texts)
def test_nothing_but_markers_and_white_space_is_lost(family: str, text: str) -> None:
    """Where no call is found, the whole text is content, whatever looked like one; white space may end at a marker."""
    events = read(family, text)
    if not any(isinstance(event, Call) for event in events):
        assert events == ([Content(text)] if text else [])


def hermes(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


CALL = '{"name": "f", "arguments": {"a": "</tool_call>", "b": "<think>"}}'
# Half of a character, a lone surrogate: within the arguments' string, and escaped within their JSON.
HALF_IN_STRING = '{"name": "f", "arguments": "{\\"a\\": \\"\\ud83d\\"}"}'
HALF_IN_OBJECT = '{"name": "f", "arguments": {"a": "\\ud83d"}}'
FOUND: list[Event] = [Call("f"), Arguments('{"a": "</tool_call>", "b": "<think>"}')]


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        ("qwen", hermes(CALL), FOUND),
        ("qwen", f"<think>\nhm\n</think>\n\n{hermes(CALL)}", [Reasoning("hm\n"), *FOUND]),
        ("qwen", f"I look.\n{hermes(CALL)}\n{hermes(CALL)}\n", [Content("I look."), *FOUND, *FOUND]),
        ("qwen", f"{hermes(CALL)}\nDone.", [*FOUND, Content("Done.")]),
        ("qwen", f"<tool_call>{CALL}{hermes(CALL)}", FOUND * 2),  # the first end is missing
        ("qwen", '<tool_call>{"name": "f"}</tool_call>', [Call("f"), Arguments("{}")]),
        ("qwen", '<tool_call>{"name": "f", "arguments": {"a": ', [Call("f"), Arguments('{"a": ')]),
        ("qwen", f"<tool_call>\n{hermes(CALL)}", [Content("<tool_call>"), *FOUND]),  # the first begins nothing
        ("mistral", f"[TOOL_CALLS] [[TOOL_CALLS] [{CALL}]", [Content("[TOOL_CALLS] ["), *FOUND]),
        ("qwen", hermes('{"name": "f", "arguments": [1]}'), [Content(hermes('{"name": "f", "arguments": [1]}'))]),
        ("qwen", hermes('{"name": "f", "arguments": "no"}'), [Content(hermes('{"name": "f", "arguments": "no"}'))]),
        ("qwen", hermes('{"name": "\\ud83d"}'), [Content(hermes('{"name": "\\ud83d"}'))]),
        ("qwen", hermes(HALF_IN_STRING), [Content(hermes(HALF_IN_STRING))]),
        ("qwen", hermes(HALF_IN_OBJECT), [Call("f"), Arguments('{"a": "\\ud83d"}')]),  # JSON as it was written
        ("llama", '{"parameters": 3, "name": "f"}', [Content('{"parameters": 3, "name": "f"}')]),
        ("qwen", "hm</think>yes", [Content("hm</think>yes")]),
        ("qwen", "<tool_call>f()</tool_call>", [Content("<tool_call>f()</tool_call>")]),
        ("qwen", "a <think> later </think>", [Content("a <think> later </think>")]),
        ("qwen", "<think>never done", [Reasoning("never done")]),
        ("qwen", "<think></think>yes", [Content("yes")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', [Call("f"), Arguments('{"a": 1}')]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}', [Call("f"), Arguments('{"a": 1}')]),
        ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", FOUND * 2),
        ("mistral", f"[TOOL_CALLS][{CALL}] so", [*FOUND, Content("so")]),
        ("mistral", "[TOOL_CALLS] none", [Content("[TOOL_CALLS] none")]),
        ("llama", '{"name": "f", "parameters": {"a": 1}}', [Call("f"), Arguments('{"a": 1}')]),
        ("llama", '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}', [Call("f"), Arguments("{}")] * 2),
        ("llama", '{"name": "g", "parameters": {}}', [Content('{"name": "g", "parameters": {}}')]),
        ("llama", '{"name": "f", "age": 3}', [Content('{"name": "f", "age": 3}')]),
        ("llama", 'Say {"name": "f", "parameters": {}}', [Content('Say {"name": "f", "parameters": {}}')]),
        (
            "thinking llama",
            '<think>a</think>{"name": "f", "parameters": {}}',
            [Reasoning("a"), Call("f"), Arguments("{}")],
        ),
        ("magistral", f"[THINK]a[/THINK][TOOL_CALLS][{CALL}]", [Reasoning("a"), *FOUND]),
        ("none", hermes(CALL), [Content(hermes(CALL))]),
        (
            "hermes",
            hermes('{"name": "f", "arguments": {"a": 01}}'),
            [Content(hermes('{"name": "f", "arguments": {"a": 01}}'))],
        ),
        (
            "hermes",
            f'<tool_call>{{"name": "f", "arguments": {{"a": tru<tool_call>{CALL}',
            [Content('<tool_call>{"name": "f", "arguments": {"a": tru'), *FOUND],
        ),
        (
            "mistral",
            f'[TOOL_CALLS][{CALL}, {{"name": "f", "arguments": {{"b": NaN}}}}]',
            [*FOUND, Content(', {"name": "f", "arguments": {"b": NaN}}]')],
        ),
        (
            "named mistral",
            'So.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[CALL_ID]123[ARGS]{} ',
            [Content("So."), Call("f"), Arguments('{"a": 1}'), Call("f"), Arguments("{}")],
        ),
        ("named mistral", "[TOOL_CALLS]f[ARGS]1", [Content("[TOOL_CALLS]f[ARGS]1")]),
        ("named mistral", '[TOOL_CALLS]f[ARGS]{"a"', [Call("f"), Arguments('{"a"')]),
        (
            "kimi",
            "functions.f:0<|tool_call_begin|>f:1<|tool_call_argument_begin|>{}<|tool_call_end|>",
            [Content("functions.f:0<|tool_call_begin|>f:1<|tool_call_argument_begin|>{}<|tool_call_end|>")],
        ),
        (
            "coder",
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\nso",
            [Call("f"), Arguments('{"a": 1}'), Content("so")],
        ),
        (
            "coder",
            "<function=f><parameter=a>True</parameter></function>",
            [Call("f"), Arguments('{"a": true}')],
        ),  # no opening marker
        ("coder", "<function=f>\n</function>\n</tool_", [Call("f"), Arguments("{}")]),
        ("coder", "<tool_call>\n<function=f>\nNo, I ask.", [Content("<tool_call>\n<function=f>\nNo, I ask.")]),
        (
            "coder",
            "<tool_call>\n<function=f>\n<parameter=a>\n[1]\n</parameter>\n<parameter=b>\nx",
            [Call("f"), Arguments('{"a": [1]')],
        ),
        (
            "coder",
            "<tool_call>\n<function=f>\n</function>\n</tool_call>\n<tool_call> is a tag.",
            [Call("f"), Arguments("{}"), Content("<tool_call> is a tag.")],
        ),
        ("coder", "<function=f>\n</function>\n</tool_call>\n<tool_call>\n", [Call("f"), Arguments("{}")]),
        ("coder", "Write <function=f>", [Content("Write <function=f>")]),
        ("coder", "Write <function=f>\n<parame", [Content("Write <function=f>\n<parame")]),
        ("coder", "<function=g>\n<parameter=a>\n1", [Content("<function=g>\n<parameter=a>\n1")]),
        ("coder", "use <tool_call> or <function", [Content("use <tool_call> or <function")]),
        ("glm", "<tool_call>f</tool_call>", [Call("f"), Arguments("{}")]),
        ("glm", "<tool_call>f is called</tool_call>", [Content("<tool_call>f is called</tool_call>")]),
        (
            "channels",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes",
            [Reasoning("hm"), Content("yes")],
        ),
        (
            "channels",
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary"
            ' to=functions.f <|constrain|>json<|message|>{"a": 1}',
            [Content("I look."), Call("f"), Arguments('{"a": 1}')],
        ),
        ("channels", ' to=functions.f<|channel|>commentary json<|message|>{"a": ', [Call("f"), Arguments('{"a": ')]),
        (
            "channels",
            "<|channel|>commentary to=functions.f<|message|>a=1",
            [Content("<|channel|>commentary to=functions.f<|message|>a=1")],
        ),
        (
            "channels",
            "<|channel|>commentary to=python<|message|>1",
            [Content("<|channel|>commentary to=python<|message|>1")],
        ),
        (
            "channels",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|chan",
            [Reasoning("hm"), Content("<|start|>assistant<|chan")],
        ),
        ("channels", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant", [Reasoning("hm")]),
        ("channels", "<|channel|>hello", [Content("<|channel|>hello")]),
        ("channels", "<|channel|>fin", []),
        ("channels", "Yes.", [Content("Yes.")]),
        ("channels", f"{' ' * 40}Yes.", [Content(f"{' ' * 40}Yes.")]),
    ],
)
def test_what_is_found(family: str, text: str, expected: list[Event]) -> None:
    assert read(family, text) == expected


def test_white_space_does_not_hold_back_a_text() -> None:
    assert FAMILIES["channels"].parser(TOOLS, reasoning_begun=False).feed(" " * 40 + "Yes.")


def test_reasoning_that_the_prompt_began() -> None:
    assert read("r1", "\nhm</think>\n\nyes", begun=True) == [Reasoning("hm"), Content("yes")]
    assert read("r1", "hm", begun=True) == [Reasoning("hm")]


def test_a_call_is_told_as_soon_as_it_is_known_to_be_one() -> None:
    parser = FAMILIES["hermes"].parser(TOOLS, reasoning_begun=False)
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"text": "once"}') == []
    assert parser.feed("}") == [Call("f"), Arguments('{"text": "once"}')]
    broken = '<tool_call>{"name": "f", "arguments": {"text": "on\n'
    assert parser.feed(broken) == [Content(broken.removesuffix("\n"))]  # a string in JSON has no newline


@given(arguments=st.dictionaries(st.text(), st.recursive(st.text() | st.integers(), st.lists)))
def test_any_arguments_come_through(arguments: dict[str, object]) -> None:
    for ascii_only in (True, False):
        call = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=ascii_only)
        for family, text in (("hermes", hermes(call)), ("mistral", f"[TOOL_CALLS][{call}]"), ("llama", call)):
            events = read(family, text)
            assert events[0] == Call("f")
            [told] = [event for event in events if isinstance(event, Arguments)]
            assert json.loads(told.text) == arguments
            assert len(events) == 2


@given(name=any_text, arguments=st.dictionaries(any_text, any_text))
def test_whatever_is_found_can_be_sent(name: str, arguments: dict[str, str]) -> None:
    """JSON can write a lone surrogate, which UTF-8 cannot."""
    for told in (arguments, json.dumps(arguments), json.dumps(arguments, ensure_ascii=False)):
        call = json.dumps({"name": name, "arguments": told})
        for family, text in (("hermes", hermes(call)), ("mistral", f"[TOOL_CALLS][{call}]"), ("llama", call)):
            for event in read(family, text):
                (event.name if isinstance(event, Call) else event.text).encode()


LONG = {
    "calls begin": "<tool_call>",
    "objects begin": "<tool_call>{",
    "other calls begin": "[TOOL_CALLS] [",
    "parameters begin": "<function=f><parameter>",
    "messages begin": "<|start|>assistant<|message|>",
    "named calls begin": "<|tool_call_begin|>f<|tool_call_argument_begin|>",
    "white space": "\n",
    "letters": "x",
}


@pytest.mark.parametrize("family", ["qwen", "mistral", "llama", "coder", "kimi", "channels"])
@pytest.mark.parametrize("unit", LONG.values(), ids=LONG)
@pytest.mark.parametrize("begin", ["", '{"type": "', "<tool_call>", "<think>"])
def test_a_long_output_takes_work_in_proportion_to_its_length(
    family: str, unit: str, begin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each character is copied a few times, also in outputs that begin a call again and again."""
    copied = 0

    def counted(kind: Any) -> Any:
        class Counted(kind):  # type: ignore[misc]
            def __init__(self, text: str) -> None:
                nonlocal copied
                copied += len(text)
                super().__init__(text)

        return Counted

    for kind in (Content, Reasoning, Arguments):
        monkeypatch.setattr(parsing, kind.__name__, counted(kind))
    text = begin + unit * (3_000 // len(unit))
    events = read(family, text)
    told = "".join(event.text for event in events if not isinstance(event, Call))
    assert told in (text, text.removeprefix("<think>"), "")  # white space at the beginning of reasoning is dropped
    assert copied <= 4 * len(text)


@pytest.mark.parametrize("family", ["qwen", "mistral", "llama"])
def test_it_is_known_whether_a_call_has_its_end(family: str) -> None:
    key = "parameters" if family == "llama" else "arguments"
    call = f'{{"name": "f", "{key}": {{"a": {{"b": "c"}}}}}}'
    begin = {"qwen": "<tool_call>\n", "mistral": "[TOOL_CALLS][", "llama": ""}[family]
    inside = range(call.index("{", 1) + 1, len(call))  # from the beginning of the arguments
    for end in range(len(call) + 1):
        parser = FAMILIES[family].parser(TOOLS, reasoning_begun=False)
        parsed(parser, begin + call[:end])
        assert parser.in_call == (end in inside), call[:end]


@pytest.mark.parametrize(
    ("family", "pieces"),
    [
        ("qwen", ["-\n ", "+<think>", "+\nhm", "+</think>", "-\n\n", "-so"]),
        ("thinking coder", ["+<think>", "+hm</thi", "+nk>", "-<tool_call>"]),
        (
            "channels",
            ["-<|channel|>analysis", "+<|message|>", "+hm", "+<|end|>", "-<|start|>assistant", "-<|channel|>final"],
        ),
        ("hermes", ["-<think>hm"]),
        ("none", ["-hm"]),
    ],
)
def test_it_is_known_whether_it_reasons(family: str, pieces: list[str]) -> None:
    parser = FAMILIES[family].parser(TOOLS, reasoning_begun=False)
    for piece in pieces:
        parser.feed(piece[1:])
        assert parser.in_reasoning == (piece[0] == "+"), piece


SCHEMA: dict[str, Any] = {
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "either": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/none"}]},
        "mode": {"enum": ["1", "2"]},
        "list": {"type": "array"},
    },
    "$defs": {"none": {"type": "null"}},
}


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("text", "True", "True"),
        ("text", '"quoted"', '"quoted"'),
        ("count", " 3 ", 3),
        ("count", "three", "three"),
        ("count", "NaN", "NaN"),
        ("either", "None", None),
        ("either", "3", "3"),
        ("mode", "1", "1"),
        ("list", "[1, null]", [1, None]),
        ("list", "[1,", "[1,"),
        ("count", '5" pipe', '5" pipe'),
        ("list", "['6\" pipe']", "['6\" pipe']"),
        ("list", '["a\\"]', '["a\\"]'),
        ("list", '5, "b', '5, "b'),
        ("list", '["</parameter>", "\\"</parameter>"]', ["</parameter>", '"</parameter>']),
        ("other", "False", False),
        ("other", "a b", "a b"),
        ("other", '"a"', '"a"'),
    ],
)
def test_a_parameter_s_text_means_what_its_schema_says(key: str, text: str, expected: Any) -> None:
    parser = FAMILIES["coder"].parser({"f": SCHEMA}, reasoning_begun=False)
    events = parser.feed(f"<function=f>\n<parameter={key}>\n{text}\n</parameter>\n</function>")
    [_, arguments] = events
    assert isinstance(arguments, Arguments)
    assert json.loads(arguments.text) == {key: expected}
    assert parser.feed("\nAnd so on.") == [Content("And so on.")]


def test_a_text_that_was_cut_is_told_as_far_as_it_came() -> None:
    parser = FAMILIES["coder"].parser({"f": SCHEMA}, reasoning_begun=False)
    events = parsed(parser, '<function=f>\n<parameter=count>\n3\n</parameter>\n<parameter=text>\na "b')
    assert events == [Call("f"), Arguments('{"count": 3, "text": "a \\"b')]
    assert parser.in_call


def test_a_text_that_is_given_again_and_cut_replaces_the_first() -> None:
    parser = FAMILIES["coder"].parser({"f": SCHEMA}, reasoning_begun=False)
    first = "<parameter=text>\nold\n</parameter>\n<parameter=count>\n1\n</parameter>\n"
    events = parsed(parser, f"<function=f>\n{first}<parameter=text>\nnew te")
    assert events == [Call("f"), Arguments('{"count": 1, "text": "new te')]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"anyOf": [{"type": "integer"} for _ in range(300)]}, "has more than 256 parts"),
    ({"$ref": "#/$defs/s", "maxLength": 2}, "has maxLength"),
    ({"$ref": "#/$defs/s", "enum": ["a"]}, "has enum"),
    ({"anyOf": [{"$ref": "#/$defs/gone"}, {"type": "integer"}]}, "refers to no schema"),
    ({"oneOf": [{"type": "string"}, {"type": "integer"}, {"type": "number"}]}, "values can be of two kinds"),
    ({"type": "string", "enum": "abc"}, "must have a list"),
    (False, "can have no value"),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("schema", "rule"), REFUSED)
def test_values_that_read_back_could_break_their_schema_are_refused(schema: Any, rule: str) -> None:
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": {"s": {"type": "string"}}}
    with pytest.raises(InvalidValueError, match=rule):
        parameters_of({"name": "f", "parameters": parameters}, ">", "</parameter>")


def test_what_parameters_are_written_as() -> None:
    parameters = {
        "$ref": "#/$defs/whole",
        "$defs": {
            "n": {"type": "integer"},
            "whole": {
                "properties": {
                    "ref": {"$ref": "#/$defs/n", "maximum": 5},
                    "some": {"anyOf": [False, {"type": "integer"}]},
                    "one": {"oneOf": [{"type": "string"}, {"type": "null"}]},
                },
                "required": ["other"],
                "additionalProperties": {"type": "integer"},
            },
        },
    }
    found = {key: value for key, _, value in parameters_of({"name": "f", "parameters": parameters}, ">", "</p>")}
    assert found == {
        "other": JsonValue({"type": "integer"}),
        "ref": JsonValue({"$defs": parameters["$defs"], "$ref": "#/$defs/n", "maximum": 5}),
        "some": JsonValue({"anyOf": [False, {"type": "integer"}]}),
        "one": Text(),
    }
    more = {"name": "f", "parameters": {**parameters, "required": ["b"]}}
    with pytest.raises(InvalidValueError, match="has required"):
        parameters_of(more, ">", "</p>")


@given(
    text=st.text(st.sampled_from('{}[]",:\\ \n019-+.eEtrufalsn/'), max_size=30),
    edits=st.lists(st.integers(0, 60), max_size=2),
)
def test_an_object_is_what_json_says(text: str, edits: list[int]) -> None:
    written = '{"a": [1, -2.5e+3, "x\\u00e9\\"", {}, [], null, true, {"b": {}}]}'
    for place in edits:
        written = written[:place] + text[:1] + written[place + len(text) % 2 :]

    def refused(constant: str) -> None:
        raise ValueError(constant)

    for each in (text, written):
        try:
            expected = isinstance(json.loads(each, parse_constant=refused), dict)
        except ValueError:
            expected = False
        assert is_object(each) == expected
