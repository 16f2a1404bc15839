"""The bodies of Anthropic's Messages API, and their translation to chats."""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from deploy.chat.template import ChatTemplate, thinking_variables
from deploy.chat.turns import as_templates_take, written
from deploy.client_request import MAX_MESSAGES, MAX_STOP_STRINGS, MAX_TOOLS
from deploy.openai_api.chat_requests import (
    CalledFunction,
    ChatRequest,
    Function,
    FunctionName,
    Message,
    NamedTool,
    Tool,
    ToolCall,
    texts_in,
)
from deploy.openai_api.items import item
from deploy.openai_api.requests import AnyRequest, Body, Int, ListOf, NamedSchema, ResponseFormat, at_most, checked_as
from triforce_core.errors import require

# Claude Code's first line of the system prompt. It differs from request to request, so that no prefix would be found.
BILLING = "x-anthropic-billing-header:"
# Where the fields of chats are found in these bodies, for errors: patterns, and what stands in their place.
NAMES = {
    r"^prompt$": "messages",
    r"^max_completion_tokens$": "max_tokens",
    r"^stop$": "stop_sequences",
    r"^response_format\.json_schema": "output_config.format",
    r"^(tools\.\d+)\.function\.parameters": r"\1.input_schema",
    r"^(tools\.\d+|tool_choice)\.function": r"\1",
}
Content = Annotated[str | ListOf[dict[str, Any]], checked_as("must be a text or a list of blocks")]


class Text(Body):
    type: Literal["text"]
    text: str


class Thinking(Body):
    """Reasoning of an earlier answer. The signature is not read: this server's answers have one for form's sake."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinking(Body):
    """Reasoning that another server has encrypted, which is left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUse(Body):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(Body):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Content | None = None
    is_error: bool | None = Field(False, description="accepted and not read: the content says it")


TEXTS = {"text": Text}
USERS: dict[str, type[Body]] = {"text": Text, "tool_result": ToolResult}
ASSISTANTS: dict[str, type[Body]] = {
    "text": Text,
    "thinking": Thinking,
    "redacted_thinking": RedactedThinking,
    "tool_use": ToolUse,
}


class InputMessage(Body):
    """One message, its content a text or a list of blocks: `text`; of the user also `tool_result`; of the assistant
    also `thinking`, `redacted_thinking` and `tool_use`.
    """

    role: Literal["user", "assistant", "system"]
    content: Content


class CustomTool(Body):
    """A tool that the model may call."""

    type: Literal["custom"] | None = None
    name: str = Field(description="1 to 128 letters, digits, underscores, dashes or dots")
    input_schema: dict[str, Any] = Field(description="the JSON schema of the input")
    description: str | None = None
    strict: bool | None = Field(None, description="no effect: the input obeys the schema if tool_choice forces a call")


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="with `type: tool`, and only then")
    disable_parallel_tool_use: bool | None = False


class ThinkingConfig(Body):
    """Whether the model thinks, for templates that can tell it. `disabled` also hides what it thinks all the same."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Int | None = Field(None, description="accepted and not kept: thinking counts towards max_tokens")
    display: Literal["summarized", "omitted"] | None = Field(None, description="`omitted` leaves the text out")


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema", description="the JSON schema of the answer")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="for templates that know `reasoning_effort`; advice, ignored by others"
    )
    format: OutputFormat | None = None


class Edit(Body):
    """Thinking of earlier answers is cleared or kept by the model's own template."""

    type: Literal["clear_thinking_20251015"]
    keep: Any = None


class ContextManagement(Body):
    edits: ListOf[Edit] | None = None


class CountRequest(AnyRequest):
    """What has a number of tokens: a chat with its tools."""

    messages: Annotated[ListOf[InputMessage], at_most(MAX_MESSAGES, texts_in)]
    system: Content | None = None
    tools: Annotated[ListOf[CustomTool] | None, at_most(MAX_TOOLS)] = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None


class MessagesRequest(CountRequest):
    """The body of a request for a message: Anthropic's fields, then those of this server."""

    max_tokens: Int = Field(description="at most; less where the context has less room")
    stop_sequences: Annotated[ListOf[str] | None, at_most(MAX_STOP_STRINGS)] = None


def chat_request(body: CountRequest, template: ChatTemplate) -> ChatRequest:
    """The same as a chat. Raises `InvalidValueError` and `RequestValidationError`, naming the place."""
    turns = as_templates_take([*system_turns(body), *turns_of(body.messages)], template)
    last = body.messages[-1].role if body.messages else None
    if last == "assistant":
        place, rule = f"messages.{len(body.messages) - 1}", "must not end in tool_use: the results must follow"
        require(not turns[-1].tool_calls, place, "a message of the assistant", rule)
    choice = body.tool_choice or ToolChoice(type="auto")
    rule = "must be given with type: tool, and only then"
    require((choice.type == "tool") == (choice.name is not None), "tool_choice.name", choice.name, rule)
    chosen: Any = {"none": "none", "any": "required"}.get(choice.type)
    if choice.name is not None:
        chosen = NamedTool.model_construct(type="function", function=FunctionName.model_construct(name=choice.name))
    answer = body.output_config and body.output_config.format
    fields: dict[str, Any] = {name: getattr(body, name) for name in AnyRequest.model_fields}
    if isinstance(body, MessagesRequest):
        fields |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences}
    if answer:
        schema = NamedSchema.model_construct(schema_=answer.schema_)
        fields["response_format"] = ResponseFormat.model_construct(type="json_schema", json_schema=schema)
    return ChatRequest.model_construct(
        **fields,
        messages=turns,
        tools=[tool_of(tool) for tool in body.tools] if body.tools else None,
        tool_choice=chosen,
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        # An answer goes on from the assistant's words, if the client gives its beginning.
        add_generation_prompt=last != "assistant",
        continue_final_message=last == "assistant",
        chat_template_kwargs=thinking_of(body, template),
    )


def tool_of(tool: CustomTool) -> Tool:
    function = Function.model_construct(name=tool.name, description=tool.description, parameters=tool.input_schema)
    return Tool.model_construct(type="function", function=function)


def thinking_of(body: CountRequest, template: ChatTemplate) -> dict[str, Any]:
    """The variables by which the template is told whether, and how much, to think."""
    if body.thinking and body.thinking.type == "disabled":
        return thinking_variables(template.text, "none")
    switch = {"enable_thinking": True} if body.thinking and "enable_thinking" in template.text else {}
    return switch | thinking_variables(template.text, body.output_config.effort if body.output_config else None)


def system_turns(body: CountRequest) -> Iterator[Message]:
    if body.system is None:
        return
    given = texts(body.system, "system")
    lasting = [text.partition("\n")[2] if text.startswith(BILLING) else text for text in given]
    if kept := [text for text, whole in zip(lasting, given, strict=True) if text or not whole]:
        yield written("system", kept)


def turns_of(messages: Sequence[InputMessage]) -> Iterator[Message]:
    """The messages as those of chats, in which each result of a tool is a message of its own."""
    for index, message in enumerate(messages):
        place = ("messages", index, "content")
        if message.role == "assistant":
            yield answered(message.content, *place)
        elif message.role == "system" or isinstance(message.content, str):
            yield written(message.role, texts(message.content, *place))
        else:
            yield from asked(message.content, *place)


def asked(blocks: Sequence[dict[str, Any]], *place: str | int) -> Iterator[Message]:
    said: list[str] = []
    for number, given in enumerate(blocks):
        block = item(USERS, given, *place, number)
        if isinstance(block, Text):
            said.append(block.text)
            continue
        assert isinstance(block, ToolResult)
        if said:
            yield written("user", said)
            said = []
        found = [] if block.content is None else texts(block.content, *place, number, "content")
        yield written("tool", found or [""], tool_call_id=block.tool_use_id)
    if said or not blocks:
        yield written("user", said or [""])


def answered(content: str | list[dict[str, Any]], *place: str | int) -> Message:
    """An earlier answer, or the beginning of one."""
    said, thought, calls = [], [], []
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for number, given in enumerate(blocks):
        block = item(ASSISTANTS, given, *place, number)
        if isinstance(block, Text):
            said.append(block.text)
        elif isinstance(block, Thinking):
            thought.append(block.thinking)
        elif isinstance(block, ToolUse):
            arguments = json.dumps(block.input, ensure_ascii=False)
            called = CalledFunction.model_construct(name=block.name, arguments=arguments)
            calls.append(ToolCall.model_construct(id=block.id, type="function", function=called))
    reasoning = "\n".join(text for text in thought if text) or None
    return written("assistant", said, tool_calls=calls or None, reasoning_content=reasoning)


def texts(content: str | Sequence[dict[str, Any]], *place: str | int) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [item(TEXTS, each, *place, number).text for number, each in enumerate(content)]
