"""The body of a chat completion request: its schema, and its conversion to the service's request."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from deploy.bounded_json import bounded_dumps
from deploy.chat.families import Family, grammar
from deploy.chat.parsing import Parser
from deploy.chat.template import thinking_variables
from deploy.client_request import MAX_MESSAGES, MAX_TOOLS, ClientRequest
from deploy.openai_api.requests import Body, CommonRequest, Int, ListOf, at_most, checked_as, common_request_from
from deploy.service import Service
from triforce_core.errors import InvalidValueError, require
from triforce_core.sampling.guides import Guide

MAX_TOP_LOGPROBS = 20
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
LISTS = ("content", "tool_calls", "output", "summary")  # of messages, in any of the APIs
JSON_FORMS = ("json_schema", "json_object")  # of guides that allow for calls, too
# What reading a schema raises where a keyword's value is of another type than it must be.
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
TAIL = 16  # tokens of a prompt in which the beginning of reasoning is looked for


class CalledFunction(Body):
    """The function that was called."""

    name: str
    arguments: str = Field(description="a JSON object, as a text; the template gets another text as it stands")


class ToolCall(Body):
    """A tool call of an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | ListOf[dict[str, Any]] | None, checked_as("must be a text or a list of text parts")] = (
        Field(None, description="a text, or a list of parts {type: text, text: …}, which are put on lines of their own")
    )
    name: str | None = None
    tool_calls: ListOf[ToolCall] | None = None
    tool_call_id: str | None = Field(None, description="which call a message of role `tool` answers; only there")
    reasoning_content: str | None = Field(None, description="an earlier answer's, for templates that repeat it")
    reasoning: str | None = Field(None, description="the same")


def texts_in(messages: list[Any], depth: int = 2) -> int:
    """The messages, the parts of their contents and the parts of these, and their tool calls."""
    lists = [each.get(name) for each in messages if isinstance(each, dict) for name in LISTS]
    within = [each for each in lists if isinstance(each, list)] if depth else []
    return len(messages) + sum(texts_in(each, depth - 1) for each in within)


class Function(Body):
    """A function that the model may call."""

    name: str = Field(description="1 to 128 letters, digits, underscores, dashes or dots")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="the JSON schema of the arguments")
    strict: bool | None = Field(
        None, description="no effect: arguments obey the schema if tool_choice forces a call, and else need not"
    )


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | None,
    checked_as("must be none, auto, required, or {type: function, function: {name: …}}"),
]


Effort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None,
    checked_as("must be none, minimal, low, medium, high or xhigh"),
]


class ChatRequest(CommonRequest):
    """The body of a chat completion request: OpenAI's fields, then those of this server."""

    messages: Annotated[ListOf[Message], at_most(MAX_MESSAGES, texts_in)]
    max_completion_tokens: Int | None = Field(None, description="by default as many as the context has room for")
    max_tokens: Int | None = Field(None, description="the same, by its older name")
    logprobs: bool | None = Field(False, description="give each token's logprob")
    top_logprobs: Int | None = Field(None, description=f"with this many alternatives, at most {MAX_TOP_LOGPROBS}")
    tools: Annotated[ListOf[Tool] | None, at_most(MAX_TOOLS)] = Field(
        None, description="functions that the model may call"
    )
    tool_choice: ToolChoice = Field(None, description="none, auto (the default), required, or a named function")
    parallel_tool_calls: bool | None = Field(True, description="false: at most one tool call")
    add_generation_prompt: bool = Field(True, description="the prompt ends where the assistant's answer begins")
    continue_final_message: bool = Field(
        False, description="the last message is continued; with `add_generation_prompt: false` only"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables for the model's chat template")
    reasoning_effort: Effort = Field(None, description="how much to reason, for models whose chat template knows of it")


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat request in the service's form, and how its outputs are to be read."""

    asked: ClientRequest
    family: Family
    tools: dict[str, Any]  # the schemas of the arguments of the functions that may be called, by name
    single_call: bool
    named: bool  # one function was forced by its name, which OpenAI's finish reasons do not call `tool_calls`
    tokenizer: Any

    def reasoning_begun(self, prompt: Sequence[int]) -> bool:
        end = self.tokenizer.decode([*prompt[-TAIL:]], skip_special_tokens=False).rstrip()
        return self.family.reasoning is not None and end.endswith(self.family.reasoning.begin)

    def parser(self, prompt: Sequence[int]) -> Parser:
        return self.family.parser(self.tools, reasoning_begun=self.reasoning_begun(prompt))


def chat_from(body: ChatRequest, service: Service, *, fits: bool = False) -> Chat:
    """The request, converted and checked as far as that is quick. The prompt is rendered, and the guide compiled, once
    the service has admitted the request. `fits`: where the context has less room, the answer may be shorter than asked.

    Raises `InvalidValueError` or a subclass, naming the field, as does the request's `prepare`.
    """
    for index, each in enumerate(body.messages):
        rule = "must be given in messages of role tool, and only in these"
        sound = (each.role == "tool") == (each.tool_call_id is not None)
        require(sound, f"messages.{index}.tool_call_id", each.tool_call_id, rule)
    service.check_model(body.model or service.model.name)
    asked = common_request_from(body, "", service.settings.speculation, service.model.sampling)
    family = Family.of(service.chat.text)
    effort = thinking_variables(service.chat.text, body.reasoning_effort)
    rule = "is not supported: the model's chat template knows neither reasoning_effort nor enable_thinking"
    require(bool(effort) or body.reasoning_effort is None, "reasoning_effort", body.reasoning_effort, rule)
    require(1 <= asked.n <= service.room, "n", asked.n, f"must be at least 1 and at most {service.room}")
    tools = offered(body, family)
    asked = replace(
        asked,
        max_tokens=max_tokens_of(body),
        fits=fits,
        logprobs=logprobs_of(body),
        shown=family.markers if tools else family.reasoning_markers,
    )
    schemas = {tool.function.name: tool.function.parameters for tool in tools}
    named = isinstance(body.tool_choice, NamedTool)
    chat = Chat(asked, family, schemas, body.parallel_tool_calls is False, named, service.model.tokenizer)

    async def prepare() -> ClientRequest:
        messages, described = await asyncio.to_thread(plain, body.messages, tools)
        prompt = await service.chat.render(
            messages,
            described,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            variables={**effort, **(body.chat_template_kwargs or {})},
        )
        return replace(asked, prompt=prompt, guide=await guide_of(body, chat, described, prompt, service))

    return replace(chat, asked=replace(asked, prepare=prepare))


def plain(messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages and tools in the form that templates read."""
    return (
        [message.model_dump(exclude_none=True) | reasoning_of(message) for message in messages],
        [tool.model_dump(exclude_none=True) for tool in tools],
    )


def reasoning_of(message: Message) -> dict[str, str]:
    found = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    return {} if found is None else {"reasoning_content": found}


def offered(body: ChatRequest, family: Family) -> list[Tool]:
    """The tools that the prompt tells of: none with `tool_choice: none`. Raises `InvalidValueError`."""
    tools = body.tools or []
    names = [tool.function.name for tool in tools]
    for index, name in enumerate(names):
        rule = "must be 1 to 128 letters, digits, underscores, dashes or dots"
        require(FUNCTION_NAME.fullmatch(name) is not None, f"tools.{index}.function.name", name, rule)
    require(len({*names}) == len(names), "tools", names, "must have different names")
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        require(name in names, "tool_choice.function.name", name, "must be the name of one of the tools")
    elif body.tool_choice in ("required", "auto"):
        require(bool(tools), "tool_choice", body.tool_choice, "needs tools")
    if body.tool_choice == "none":
        return []
    rule = "are not supported: the model's chat template has no form of tool calls that this server can read"
    require(not tools or family.tools is not None, "tools", names, rule)
    return tools


async def guide_of(
    body: ChatRequest, chat: Chat, tools: list[dict[str, Any]], prompt: Sequence[int], service: Service
) -> Guide | None:
    """The form of the output: that which the client asks for, calls if it forces them, and reasoning before them.

    Raises `InvalidValueError` for one that cannot be compiled, naming the part of the request that is to blame.
    """
    guide, choice, field = chat.asked.guide, body.tool_choice, "tool_choice"
    given: Any = choice if isinstance(choice, str) else "a function"
    forced = bool(tools) and choice not in (None, "auto")
    if forced:
        require(guide is None, field, given, f"contradicts {guide and guide.name}")
        require(not chat.asked.stop, "stop", body.stop, "contradicts tool_choice: a forced call must not be cut")
    answer: str | None = None
    parts: list[Guide] = []  # of the form, each by the client's name
    if guide is not None:
        if chat.family.reasoning is None and not tools:
            return guide
        require(not tools or guide.form in JSON_FORMS, "tools", [*chat.tools], f"contradict {guide.name}")
        answer = await asyncio.to_thread(guide.grammar)  # refuses what is no schema, or cannot be kept
        field, given, parts = guide.name, guide.value, [guide]
    elif not forced:
        return None
    functions = [tool["function"] for tool in tools]
    for index, function in enumerate(functions):
        schema = function.get("parameters")
        if schema:
            name, kinds = f"tools.{index}.function.parameters", schema.get("type", "object")
            has_objects = kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
            require(has_objects, name, schema, "must be of type object")
            parts.append(Guide("json_schema", bounded_dumps(schema, name), name, schema))
            await asyncio.to_thread(parts[-1].grammar)
    if isinstance(choice, NamedTool):
        functions = [function for function in functions if function["name"] == choice.function.name]
    try:
        text = await asyncio.to_thread(
            grammar,
            chat.family,
            functions,
            service.added_ids,
            reasoning_begun=chat.reasoning_begun(prompt),
            several=not chat.single_call and not isinstance(choice, NamedTool),
            answer=answer,
        )
        whole = Guide("composed", text, field, given)
        await service.grammar(chat.asked, whole)  # the service keeps what it has compiled
    except (InvalidValueError, *MALFORMED) as error:
        if not isinstance(error, InvalidValueError) or error.field == field:
            for part in parts:
                await service.grammar(chat.asked, part)
        if isinstance(error, InvalidValueError):
            raise
        raise InvalidValueError("tools", [*chat.tools], f"must have JSON schemas as parameters: {error}") from None
    return whole


def max_tokens_of(body: ChatRequest) -> int | None:
    new, old = body.max_completion_tokens, body.max_tokens
    differ = new is not None and old is not None and new != old
    require(not differ, "max_tokens", old, f"contradicts max_completion_tokens {new}")
    field, asked = ("max_tokens", old) if new is None else ("max_completion_tokens", new)
    require(asked is None or asked >= 1, field, asked, "must be at least 1")
    return asked


def logprobs_of(body: ChatRequest) -> int | None:
    number = body.top_logprobs
    if number is None:
        return 0 if body.logprobs else None
    require(bool(body.logprobs) or number == 0, "top_logprobs", number, "needs logprobs: true")
    rule = f"must be between 0 and {MAX_TOP_LOGPROBS}"
    require(0 <= number <= MAX_TOP_LOGPROBS, "top_logprobs", number, rule)
    return number if body.logprobs else None
