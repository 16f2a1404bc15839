"""Renders chats to prompts with the model's own template, in transformers' sandbox, or with a plain one. Special tokens
are the template's; those in a client's text, and other tokens that the template writes, are encoded as plain text, so
that no message can end itself or imitate another role. The plain template delimits messages with ordinary text.
"""

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from deploy.bounded_json import bounded_loads
from deploy.encoding import Encoder
from deploy.no_effect import refusal, without_effect
from triforce_core.errors import ContextLengthError, InvalidValueError, require

ROLES = ("system", "developer", "user", "assistant", "tool")
PLAIN = """\
{%- for message in messages %}
{%- if loop.index0 %}{{ "\\n" }}{% endif %}
{{- message.role }}: {{ message.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "\\nassistant:" }}{% endif %}"""
PASSED = ("name", "tool_call_id", "reasoning_content")  # fields of a message that the template gets as they are
FIELDS_CHARACTERS = 128  # the names of the fields of a message, or of a tool call, and their punctuation
RESERVED = {
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    *PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES,
    *("conversations", "messages", "raise_exception", "strftime_now"),
}
# Chats as agents send them, whose last or second last message not every template takes, and its text.
LATE = "a late word"
SAID: dict[str, Any] = {"role": "user", "content": "a"}
ANSWERED: dict[str, Any] = {"role": "assistant", "content": "a"}
LATE_SYSTEM: dict[str, Any] = {"role": "system", "content": LATE}
CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "a12345678", "type": "function", "function": {"name": "a", "arguments": {}}}],
}
RESULT: dict[str, Any] = {"role": "tool", "content": "a", "tool_call_id": "a12345678"}
SYSTEM_LATE = ([SAID, LATE_SYSTEM], [SAID, ANSWERED, LATE_SYSTEM, SAID])
USER_AFTER_RESULT = [SAID, CALLED, RESULT, {"role": "user", "content": LATE}]
# What a template raises: by `raise_exception`, or because a message lacks what it expects.
TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """The chat template of one model."""

    def __init__(self, tokenizer: Any, path: str | None, encoder: Encoder, max_characters: int) -> None:
        """`path`: a file that replaces the model's own template. `max_characters`: a longer chat does not fit the
        context.

        Raises `InvalidValueError` for a file that cannot be read.
        """
        self.encoder, self.max_characters = encoder, max_characters
        self.reserved = RESERVED | {*tokenizer.special_tokens_map}
        self.source = None if path is None else read(path)
        self.plain = self.source is None and not tokenizer.chat_template
        if self.plain:
            self.source = PLAIN
        self.text: str = tokenizer.get_chat_template(self.source, [{}])  # the template for chats with tools
        # Whether it writes messages of the system that are not at the beginning, rather than refuse or forget them;
        # and those of the user after a tool's result.
        self.system_anywhere = all(self.writes_late_words(tokenizer, chat) for chat in SYSTEM_LATE)
        self.user_after_result = self.writes_late_words(tokenizer, USER_AFTER_RESULT)

    def writes_late_words(self, tokenizer: Any, chat: list[dict[str, Any]]) -> bool:
        """Whether `LATE`, in one of the messages, gets into the text of this chat."""
        for messages in (chat, with_texts(chat)):
            try:
                return LATE in tokenizer.apply_chat_template(messages, chat_template=self.source, tokenize=False)
            except TEMPLATE_ERRORS:
                continue
        return False

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """The prompt's tokens. `messages` and `tools` have OpenAI's form; `variables` are passed to the template.

        Raises `InvalidValueError` for messages that are malformed or that the template refuses, and
        `ContextLengthError`.
        """
        variables = dict(variables or {})
        for name in variables:
            require(name not in self.reserved, "chat_template_kwargs", name, "is set by the server")
        contradicts = add_generation_prompt and continue_final_message
        rule = "contradicts add_generation_prompt, which must then be false"
        require(not contradicts, "continue_final_message", True, rule)
        require(len(messages) > 0, "messages", [], "must hold at least one message")
        continues_calls = continue_final_message and messages[-1].get("tool_calls")
        rule = "contradicts the last message, whose tool_calls cannot be continued"
        require(not continues_calls, "continue_final_message", True, rule)
        chat, size = await asyncio.to_thread(self.prepared, messages, tools, variables)

        def rendered(tokenizer: Any, chat: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Any:
            try:
                return tokenizer.apply_chat_template(
                    chat,
                    tools=[*tools] or None,
                    chat_template=self.source,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    return_dict=False,
                    sanitize_control_tokens=True,
                    **variables,
                )
            except TEMPLATE_ERRORS as error:
                if isinstance(error, TypeError) and (texts := with_texts(chat)) != chat:
                    return rendered(tokenizer, texts, tools)
                if (described := with_descriptions(tools)) != [*tools]:
                    return rendered(tokenizer, chat, described)
                reason = " ".join(str(error).split())
                raise InvalidValueError(
                    "messages", f"{len(chat)} messages", f"are refused by the chat template: {reason:.500}"
                ) from None

        def encoded(tokenizer: Any) -> tuple[int, ...]:
            ids = rendered(tokenizer, chat, tools)
            # The plain template writes no special tokens.
            first = tokenizer("")["input_ids"] if self.plain else []
            return (*first, *ids)

        return await self.encoder.run(size, encoded)

    def prepared(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], int]:
        """The messages as templates expect them, and the number of characters of a chat, more or less. Not for an event
        loop: it takes time for each message.

        Raises `InvalidValueError` for a chat that is malformed, too large or not valid Unicode.
        """
        keeps_developer = "developer" in self.text
        chat = [message_for_template(each, index, keeps_developer) for index, each in enumerate(messages)]
        try:
            text = json.dumps([chat, [*tools], variables], ensure_ascii=False)
        except RecursionError:
            raise InvalidValueError("messages", "their content", "is nested too deeply") from None
        # At most the length of the texts: JSON writes some characters as an escape of two, or of six (\u00 and two
        # digits).
        texts_only = len(text) - 2 * text.count("\\") - 4 * text.count("\\u00")
        fields = FIELDS_CHARACTERS * (len(chat) + sum(len(each.get("tool_calls", ())) for each in chat))
        if texts_only > self.max_characters + fields:
            raise ContextLengthError("messages", f"{len(text)} characters", "cannot fit the context")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidValueError("messages", "their text", "must be text without lone surrogates") from None
        return chat, len(text)


def thinking_variables(template: str, effort: str | None) -> dict[str, Any]:
    """The variables by which this template is told how much to reason: `none`, `minimal`, `low` and so on. Templates
    that can only turn reasoning on and off turn it off for `none`; there are none for others, nor without an effort.
    """
    if effort is None:
        return {}
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    return {"enable_thinking": effort != "none"} if "enable_thinking" in template else {}


def with_texts(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the arguments of calls as texts, for templates that cannot write objects."""

    def written(call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": text}}

    calls = [{"tool_calls": [*map(written, each["tool_calls"])]} if "tool_calls" in each else {} for each in chat]
    return [{**message, **texts} for message, texts in zip(chat, calls, strict=True)]


def with_descriptions(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools, each with a description, for templates that cannot do without."""
    return [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]


def read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValueError("target.chat_template", path, f"cannot be read: {error}") from None


def message_for_template(message: Mapping[str, Any], index: int, keeps_developer: bool) -> dict[str, Any]:
    """A message as templates expect it: its content as one text, and the arguments of its tool calls as objects."""
    place = f"messages.{index}"
    role = message.get("role")
    require(role in ROLES, f"{place}.role", role, f"must be one of {', '.join(ROLES)}")
    if role == "developer" and not keeps_developer:
        role = "system"
    calls = message.get("tool_calls") or []
    require(not calls or role == "assistant", f"{place}.tool_calls", calls, "can only be in messages of the assistant")
    found: dict[str, Any] = {"role": role}
    content = message.get("content")
    if content is not None:
        found["content"] = text_of(content, f"{place}.content")
    else:
        whole = role == "assistant" and bool(calls or message.get("reasoning_content"))
        require(whole, f"{place}.content", None, "must be a text or a list of text parts")
        found["content"] = ""
    found |= {name: message[name] for name in PASSED if message.get(name) is not None}
    if calls:
        found["tool_calls"] = [
            call_for_template(call, f"{place}.tool_calls.{number}") for number, call in enumerate(calls)
        ]
    return found


def text_of(content: str | Sequence[Mapping[str, Any]], place: str) -> str:
    """The text of a message; of several parts, each on lines of its own."""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type")
        require(kind == "text", f"{place}.{index}.type", kind, "is not supported: only parts of type text are")
        for name in part:
            sound = name in ("type", "text") or without_effect(name, part[name])
            require(sound, f"{place}.{index}.{name}", part[name], refusal(name))
        text = part.get("text")
        require(isinstance(text, str), f"{place}.{index}.text", text, "must be a text")
        texts.append(str(text))
    return "\n".join(texts)


def call_for_template(call: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The call, its arguments as an object; as text if they are none, such as those of an answer that was cut."""
    function = call["function"]
    try:
        given = function["arguments"].encode(errors="surrogatepass") or b"{}"
        arguments = bounded_loads(given, f"{place}.function.arguments")
    except (ValueError, RecursionError):
        arguments = None
    called = {
        "name": function["name"],
        "arguments": arguments if isinstance(arguments, dict) else function["arguments"],
    }
    return {"id": call.get("id"), "type": "function", "function": called}
