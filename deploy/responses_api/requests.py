"""The body of OpenAI's Responses API, and its translation to a chat."""

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from deploy.bounded_json import bounded_dumps
from deploy.chat.template import ChatTemplate, thinking_variables
from deploy.chat.turns import as_templates_take, written
from deploy.client_request import MAX_MESSAGES, MAX_TOOLS
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
from deploy.openai_api.items import item, renamed
from deploy.openai_api.requests import AnyRequest, Body, Int, ListOf, NamedSchema, ResponseFormat, at_most, checked_as
from triforce_core.errors import InvalidValueError

# Where the fields of chats are found in this body, for errors: patterns, and what stands in their place.
NAMES = {
    r"^(prompt|messages)$": "input",
    r"^max_completion_tokens$": "max_output_tokens",
    r"^response_format(\.json_schema)?": "text.format",
    r"^tool_choice\.function": "tool_choice",
}
Content = Annotated[str | ListOf[dict[str, Any]], checked_as("must be a text or a list of parts")]


class Text(Body):
    """A part of a message."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    logprobs: Any = Field(None, description="an earlier answer's, which are not read")


class InputMessage(Body):
    """One message; its parts are texts: `input_text`, or `output_text` of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: Literal["commentary", "final_answer"] | None = Field(None, description="accepted and not read")


class ReasoningItem(Body):
    """Reasoning of an earlier answer; what another server has encrypted is left out."""

    type: Literal["reasoning"]
    summary: ListOf[dict[str, Any]] | None = None
    content: ListOf[dict[str, Any]] | None = None
    encrypted_content: str | None = None


class FunctionCall(Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class FunctionCallOutput(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: Content
    name: str | None = None
    namespace: str | None = None


ITEMS: dict[str, type[Body]] = {
    "message": InputMessage,
    "reasoning": ReasoningItem,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
}
TEXTS = dict.fromkeys(("input_text", "output_text", "text"), Text)
THOUGHTS = dict.fromkeys(("reasoning_text", "summary_text", "text"), Text)


class FunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: str = Field(description="1 to 128 letters, digits, underscores, dashes or dots")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="the JSON schema of the arguments")
    strict: bool | None = Field(
        None, description="no effect: arguments obey the schema if tool_choice forces a call, and else need not"
    )


class Namespace(Body):
    """Functions with a name in common, which the model sees as `name.function`."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Annotated[ListOf[FunctionTool], at_most(MAX_TOOLS)]


class WebSearch(Body):
    """OpenAI's own tool. Codex offers it by default; the model is not told of it, and so never asks for it."""

    type: Literal["web_search"]
    external_web_access: bool | None = None
    filters: Any = None
    search_context_size: Any = None
    user_location: Any = None


TOOLS: dict[str, type[Body]] = {"function": FunctionTool, "namespace": Namespace, "web_search": WebSearch}


class NamedFunction(Body):
    type: Literal["function"]
    name: str
    namespace: str | None = None


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = Field(None, description="accepted and ignored")
    description: str | None = Field(None, description="accepted and ignored")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="with `type: json_schema`, and only then")
    strict: bool | None = Field(None, description="accepted and ignored: the output always obeys the schema")


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="advice, which is ignored")


class StreamOptions(Body):
    include_obfuscation: bool | None = Field(None, description="accepted and ignored: nothing is added to events")


class ReasoningConfig(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="for templates that know `reasoning_effort` or `enable_thinking`; advice, ignored by others"
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="accepted and ignored: the reasoning itself is given"
    )


class ResponsesRequest(AnyRequest):
    """The body of a request for a response: OpenAI's fields, then those of this server. Nothing is stored: `input` is
    the whole chat.
    """

    input: Annotated[
        str | ListOf[dict[str, Any]],
        checked_as("must be a text or a list of items"),
        at_most(MAX_MESSAGES, texts_in),
    ] = Field(description="a text, or items of type message, reasoning, function_call and function_call_output")
    instructions: str | None = Field(None, description="a message of the system before all others")
    max_output_tokens: Int | None = Field(None, description="by default as many as the context has room for")
    tools: Annotated[ListOf[dict[str, Any]] | None, at_most(MAX_TOOLS)] = Field(
        None, description="functions that the model may call, alone or in namespaces; `web_search` is left out"
    )
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedFunction | None,
        checked_as("must be none, auto, required, or {type: function, name: …}"),
    ] = None
    parallel_tool_calls: bool | None = True
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, Any] | None = Field(None, description="given back as it is")
    include: ListOf[Literal["reasoning.encrypted_content"]] | None = Field(
        None, description="accepted: reasoning is given as it is, not encrypted"
    )


def chat_request(body: ResponsesRequest, template: ChatTemplate) -> ChatRequest:
    """The same as a chat. Raises `InvalidValueError` and `RequestValidationError`, naming the place."""
    for name in ("metadata", "text", "tools"):  # which the response repeats
        given = getattr(body, name)
        bounded_dumps(given.model_dump() if isinstance(given, Body) else given, name)
    instructions = [] if body.instructions is None else [written("system", [body.instructions])]
    tools = [*map(as_chats_have, offered(body.tools or ()))]
    choice: Any = body.tool_choice
    if isinstance(choice, NamedFunction):
        function = FunctionName.model_construct(name=qualified(choice.name, choice.namespace))
        choice = NamedTool.model_construct(type="function", function=function)
    elif choice == "auto" and not tools:
        choice = None  # clients send it by default
    form = body.text.format if body.text else None
    return ChatRequest.model_construct(
        **{name: getattr(body, name) for name in AnyRequest.model_fields},
        messages=as_templates_take([*instructions, *turns_of(body.input)], template),
        max_completion_tokens=body.max_output_tokens,
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=None if form is None else format_of(form),
        chat_template_kwargs=thinking_variables(template.text, body.reasoning.effort if body.reasoning else None),
    )


def format_of(form: TextFormat) -> ResponseFormat:
    given = form.schema_
    schema = None if given is None else NamedSchema.model_construct(name=form.name, schema_=given)
    return ResponseFormat.model_construct(type=form.type, json_schema=schema)


class Offered(NamedTuple):
    """A function that the model may call, alone or in a namespace."""

    place: str  # in the body
    space: str | None
    tool: FunctionTool

    @property
    def name(self) -> str:
        """As the model sees it."""
        return qualified(self.tool.name, self.space)


def offered(given: Iterable[dict[str, Any]]) -> Iterator[Offered]:
    for index, each in enumerate(given):
        place, tool = f"tools.{index}", item(TOOLS, each, "tools", index)
        if isinstance(tool, FunctionTool):
            yield Offered(place, None, tool)
        elif isinstance(tool, Namespace):
            for number, one in enumerate(tool.tools):
                yield Offered(f"{place}.tools.{number}", tool.name, one)


def as_chats_have(tool: Offered) -> Tool:
    own = tool.tool
    function = Function.model_construct(name=tool.name, description=own.description, parameters=own.parameters)
    return Tool.model_construct(type="function", function=function)


def renamed_to_client(error: InvalidValueError, body: ResponsesRequest) -> InvalidValueError:
    """The same error about the field as the client calls it."""

    def place(found: re.Match[str]) -> str:
        return [*offered(body.tools or ())][int(found[1])].place

    own = re.sub(r"^tools\.(\d+)\.function", place, error.field)
    return renamed(type(error)(own, error.value, error.rule), NAMES)


def qualified(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace}.{name}"


def turns_of(given: str | list[dict[str, Any]]) -> Iterator[Message]:
    """Each item as a message of a chat. What is one answer's is put together later."""
    if isinstance(given, str):
        yield written("user", [given])
        return
    for index, each in enumerate(given):
        found, place = item(ITEMS, each, "input", index, default="message"), ("input", index)
        if isinstance(found, InputMessage):
            yield written(found.role, texts(found.content, TEXTS, *place, "content"))
        elif isinstance(found, ReasoningItem):
            name = "content" if found.content else "summary"
            thoughts = texts(found.content or found.summary or [], THOUGHTS, *place, name)
            yield written("assistant", [], reasoning_content="\n".join(thoughts))
        elif isinstance(found, FunctionCall):
            name = qualified(found.name, found.namespace)
            function = CalledFunction.model_construct(name=name, arguments=found.arguments)
            call = ToolCall.model_construct(id=found.call_id, type="function", function=function)
            yield written("assistant", [], tool_calls=[call])
        else:
            assert isinstance(found, FunctionCallOutput)
            yield written("tool", texts(found.output, TEXTS, *place, "output") or [""], tool_call_id=found.call_id)


def texts(content: str | list[dict[str, Any]], kinds: dict[str, type[Text]], *place: str | int) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [item(kinds, each, *place, number).text for number, each in enumerate(content)]
