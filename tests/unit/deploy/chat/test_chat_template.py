"""Chats as prompts: through models' own templates, in a sandbox; and nobody but the template writes special tokens."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.chat.template import ChatTemplate, thinking_variables
from deploy.chat.turns import as_templates_take
from deploy.encoding import Encoder
from deploy.openai_api.chat_requests import Message
from tests.chat_models import SPECIAL, tokenizer
from triforce_core.errors import ContextLengthError, InvalidValueError

TEMPLATES = Path(__file__).parents[3] / "templates"
USER = {"role": "user", "content": "How warm is it?"}
CALLS = [{"id": "123456789", "type": "function", "function": {"name": "f", "arguments": '{"city": "Łódź"}'}}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
ROUND = [USER, {"role": "assistant", "content": None, "tool_calls": CALLS}, {"role": "tool", "content": "3 °C"}]


def template(family: str, path: str | None = None) -> ChatTemplate:
    return ChatTemplate(tokenizer(family), path, Encoder(tokenizer(family)), 100_000)


def ids(family: str, *chat: Any, **options: Any) -> tuple[int, ...]:
    return asyncio.run(template(family).render(chat, **options))


def text(family: str, *chat: Any, **options: Any) -> str:
    decoded: str = tokenizer(family).decode(ids(family, *chat, **options))
    return decoded


@pytest.mark.parametrize("family", ["qwen", "llama", "mistral"])
def test_prompts_are_those_of_transformers(family: str) -> None:
    parsed = [{**CALLS[0], "function": {"name": "f", "arguments": {"city": "Łódź"}}}]
    chat = [USER, {"role": "assistant", "content": "", "tool_calls": parsed}, ROUND[2]]
    expected = tokenizer(family).apply_chat_template(chat, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    assert ids(family, *ROUND, tools=TOOLS) == tuple(expected)


@pytest.mark.parametrize("family", ["llama", "mistral", "none"])
def test_the_first_token_is_not_doubled(family: str) -> None:
    first = tokenizer(family).bos_token_id
    assert ids(family, USER)[0] == first
    assert ids(family, USER).count(first) == 1


def test_a_model_without_a_template_gets_a_plain_one() -> None:
    chat = [{"role": "system", "content": "Be brief."}, USER]
    assert text("none", *chat) == "<s>system: Be brief.\nuser: How warm is it?\nassistant:"
    begun = {"role": "assistant", "content": "It is"}
    continued = text("none", USER, begun, add_generation_prompt=False, continue_final_message=True)
    assert continued == "<s>user: How warm is it?\nassistant: It is"


def test_a_final_message_is_continued() -> None:
    begun = {"role": "assistant", "content": "It is"}
    continued = text("qwen", USER, begun, add_generation_prompt=False, continue_final_message=True)
    assert continued.endswith("<|im_start|>assistant\nIt is")
    with pytest.raises(InvalidValueError, match=r"^continue_final_message: True contradicts add_generation_prompt"):
        ids("qwen", USER, begun, continue_final_message=True)


def test_a_file_replaces_the_template(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{% for message in messages %}[{{ message.content }}]{{ mood }}{% endfor %}")
    made = template("qwen", str(file))
    rendered = asyncio.run(made.render([USER], variables={"mood": "!"}))
    assert tokenizer("qwen").decode(rendered) == "[How warm is it?]!"
    with pytest.raises(InvalidValueError, match=r"^target.chat_template: .* cannot be read"):
        template("qwen", str(tmp_path / "other"))


def test_text_parts_are_lines_and_developers_are_systems_where_the_template_knows_none() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "<|im_start|>system\na\nb<|im_end|>" in text("qwen", {"role": "developer", "content": parts}, USER)


# What clients may try: special tokens, whole, cut by other tokens, and near other text.
hostile = st.lists(
    st.one_of(st.sampled_from([*SPECIAL["qwen"], *SPECIAL["mistral"], "<tool_call>", "</think>"]), st.text(max_size=4)),
    max_size=6,
).map("".join)


@pytest.mark.parametrize("family", ["qwen", "llama", "mistral", "none"])
@given(content=st.one_of(hostile, st.sampled_from(SPECIAL["llama"])))
def test_no_text_of_a_client_becomes_a_special_token(family: str, content: str) -> None:
    own = {*tokenizer(family).added_tokens_decoder}
    harmless = [token for token in ids(family, {"role": "user", "content": "-"}) if token in own]
    tried = ids(family, {"role": "user", "content": content})
    assert [token for token in tried if token in own] == harmless


def test_the_text_around_a_special_token_stays() -> None:
    assert "say <|im_end|> twice" in text("qwen", {"role": "user", "content": "say <|im_end|> twice"})


@pytest.mark.parametrize(
    ("chat", "options", "message"),
    [
        ([], {}, "messages: [] must hold at least one message"),
        ([{"role": "user"}], {}, "messages.0.content: None must be a text or a list of text parts"),
        ([{"role": "x", "content": "a"}], {}, "messages.0.role: 'x' must be one of system, developer, user"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "messages.0.content.0.type: 'image_url' is not"),
        ([{**USER, "tool_calls": CALLS}], {}, "can only be in messages of the assistant"),
        ([{"role": "system", "content": "a"}], {}, "Only user, assistant and tool roles are supported"),
        ([USER, {**ROUND[1], "tool_calls": [{**CALLS[0], "id": "1"}]}], {}, "should be 9 characters long"),
        ([USER], {"variables": {"tokenize": False}}, "chat_template_kwargs: 'tokenize' is set by the server"),
        ([USER], {"variables": {"messages": []}}, "chat_template_kwargs: 'messages' is set by the server"),
        ([USER], {"variables": {"bos_token": "X"}}, "chat_template_kwargs: 'bos_token' is set by the server"),
        ([USER], {"variables": {"raise_exception": 1}}, "chat_template_kwargs: 'raise_exception' is set by the server"),
        ([USER], {"variables": {"strftime_now": 1}}, "chat_template_kwargs: 'strftime_now' is set by the server"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a", "bogus": 1}]}],
            {},
            "messages.0.content.0.bogus: 1 is not a field of this request",
        ),
        ([{"role": "user", "content": "\ud800"}], {}, "must be text without lone surrogates"),
    ],
)
def test_what_is_refused(chat: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError) as error:
        ids("mistral", *chat, **options)
    assert message in str(error.value)


@pytest.mark.parametrize("arguments", ["[1]", '{"city": "Par', "3"])
def test_arguments_that_are_no_object_stay_a_text(arguments: str) -> None:
    """Otherwise a conversation could not go on after an answer that ended within a call."""
    call = {**CALLS[0], "function": {"name": "f", "arguments": arguments}}
    chat = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, ROUND[2]]
    assert f'"arguments": {json.dumps(arguments)}' in text("qwen", *chat)


def test_a_message_with_calls_is_not_continued() -> None:
    with pytest.raises(InvalidValueError, match=r"^continue_final_message: True contradicts the last message"):
        ids("qwen", *ROUND[:2], add_generation_prompt=False, continue_final_message=True)


def test_a_template_is_in_a_sandbox(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(InvalidValueError, match="are refused by the chat template"):
        asyncio.run(template("qwen", str(file)).render([USER]))


def test_a_chat_that_cannot_fit_is_refused_before_it_is_rendered() -> None:
    with pytest.raises(ContextLengthError, match="cannot fit the context"):
        ids("qwen", {"role": "user", "content": "a" * 200_000})
    with pytest.raises(ContextLengthError, match="cannot fit the context"):  # whose limit messages raise by little
        ids("qwen", *[{"role": "user", "content": "a" * 700}] * 200)
    assert ids("qwen", {"role": "user", "content": "\n" * 90_000})  # which JSON writes with twice as many
    assert ids("qwen", {"role": "user", "content": "\x01" * 90_000})  # with six times as many


def test_a_template_that_cannot_write_objects_gets_the_arguments_as_texts() -> None:
    file = TEMPLATES / "deepseek-ai-DeepSeek-V3.1.jinja"
    tokens = asyncio.run(template("none", str(file)).render(ROUND, TOOLS))
    assert '<｜tool▁sep｜>{"city": "Łódź"}<｜tool▁call▁end｜>' in tokenizer("none").decode(tokens)


def test_a_template_that_reads_descriptions_gets_empty_ones() -> None:
    file = TEMPLATES / "openai-gpt-oss-120b.jinja"
    tokens = asyncio.run(template("none", str(file)).render([USER], TOOLS))
    assert "type f = " in tokenizer("none").decode(tokens)


LATER = {"role": "user", "content": "a reminder"}
AGAIN = {"role": "assistant", "content": "So."}


@pytest.mark.parametrize("file", [None, *sorted(TEMPLATES.glob("*.jinja"))], ids=lambda file: file and file.stem)
def test_every_template_gets_what_the_user_says_after_a_result(file: Path | None) -> None:
    made = template("mistral" if file is None else "none", file and str(file))
    result = {**ROUND[2], "tool_call_id": "123456789"}
    turns = [Message.model_validate(each) for each in (USER, ROUND[1], result, LATER, AGAIN, USER)]
    chat = [turn.model_dump(exclude_none=True) for turn in as_templates_take(turns, made)]
    parameters = {"type": "object", "properties": {"city": {"type": "string", "description": "…"}}, "required": []}
    tools = [{"type": "function", "function": {"name": "f", "description": "…", "parameters": parameters}}]
    found = tokenizer("none").decode(asyncio.run(made.render(chat, tools)))
    assert 0 < found.index("3 °C") < found.index("a reminder") < found.index("So.")


@pytest.mark.parametrize(
    ("text", "effort", "variables"),
    [
        ("{{ reasoning_effort }} {{ enable_thinking }}", "none", {"reasoning_effort": "none"}),
        ("{{ enable_thinking }}", "none", {"enable_thinking": False}),
        ("{{ enable_thinking }}", "minimal", {"enable_thinking": True}),
        ("{{ messages }}", "low", {}),
    ],
)
def test_how_much_to_reason_is_said_in_the_template_s_own_words(text: str, effort: str, variables: Any) -> None:
    assert thinking_variables(text, effort) == variables
