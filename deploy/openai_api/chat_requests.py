"""The body of a chat completion request: its schema, and its conversion to the service's request."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from deploy.chat.families import Family, grammar
from deploy.chat.parsing import Parser
from deploy.openai_api.requests import Body, CommonRequest, checked_as, common_request_from
from deploy.service import ClientRequest, Service
from triforce_core.errors import require
from triforce_core.sampling.guides import Guide

MAX_TOP_LOGPROBS = 20
MAX_TOOLS = 128
TAIL = 16  # tokens of a prompt in which the beginning of reasoning is looked for
UNSUPPORTED_TEXT = "accepted only with a value that has no effect"
IGNORED = "accepted and ignored"


class CalledFunction(Body):
    name: str
    arguments: str = Field(description="a JSON object, as a text")


class ToolCall(Body):
    """A tool call of an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[dict[str, Any]] | None, checked_as("must be a text or a list of text parts")] = Field(
        None, description="a text, or a list of parts {type: text, text: …}, which are put on lines of their own"
    )
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(None, description="an earlier answer's, for templates that repeat it")
    reasoning: str | None = Field(None, description="the same")
    # What OpenAI's client sends when an answer's message becomes part of the next request.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = Field(None, description=IGNORED)


class Function(Body):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="the JSON schema of the arguments")
    strict: bool | None = Field(
        None, description="arguments obey the schema in any case if tool_choice forces a call, and else are the model's"
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


class ChatRequest(CommonRequest):
    """The body of a chat completion request: OpenAI's fields, then those of this server."""

    messages: list[Message]
    max_completion_tokens: int | None = Field(None, description="by default as many as the context has room for")
    max_tokens: int | None = Field(None, description="the same, by its older name")
    logprobs: bool | None = Field(False, description="give each token's logprob")
    top_logprobs: int | None = Field(None, description=f"with so many alternatives, at most {MAX_TOP_LOGPROBS}")
    tools: list[Tool] | None = Field(None, description="functions that the model may call")
    tool_choice: ToolChoice = Field(None, description="none, auto (the default), required, or a named function")
    parallel_tool_calls: bool | None = Field(True, description="false: at most one tool call")
    metadata: dict[str, str] | None = Field(None, description=IGNORED)
    safety_identifier: str | None = Field(None, description=IGNORED)
    prompt_cache_key: str | None = Field(None, description=IGNORED)
    add_generation_prompt: bool = Field(True, description="the prompt ends where the assistant's answer begins")
    continue_final_message: bool = Field(
        False, description="the last message is continued; with `add_generation_prompt: false` only"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables for the model's chat template")
    store: bool | None = Field(False, description=UNSUPPORTED_TEXT)
    service_tier: str | None = Field("auto", description=UNSUPPORTED_TEXT)
    modalities: list[str] | None = Field(None, description=UNSUPPORTED_TEXT)
    audio: Any = Field(None, description=UNSUPPORTED_TEXT)
    prediction: Any = Field(None, description=UNSUPPORTED_TEXT)
    web_search_options: Any = Field(None, description=UNSUPPORTED_TEXT)
    functions: Any = Field(None, description=UNSUPPORTED_TEXT)
    function_call: Any = Field(None, description=UNSUPPORTED_TEXT)
    reasoning_effort: Any = Field(None, description=UNSUPPORTED_TEXT)
    verbosity: Any = Field(None, description=UNSUPPORTED_TEXT)
    chat_template: Any = Field(None, description=UNSUPPORTED_TEXT)


UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # by field, the values that have no effect
    "store": (None, False),
    "service_tier": (None, "default", "auto"),
    "modalities": (None, ["text"]),
    **dict.fromkeys(("audio", "prediction", "web_search_options", "functions", "function_call"), (None,)),
    **dict.fromkeys(("reasoning_effort", "verbosity", "chat_template", "prompt_logprobs"), (None,)),
    "truncate_prompt_tokens": (None,),  # it would cut the template's own text
}


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat request in the service's form, and how its outputs are to be read."""

    asked: ClientRequest
    family: Family
    tools: tuple[str, ...]  # names of the functions that may be called
    reasoning_begun: bool  # by the prompt
    single_call: bool

    def parser(self) -> Parser:
        return self.family.parser(self.tools, reasoning_begun=self.reasoning_begun)


async def chat_from(body: ChatRequest, service: Service) -> Chat:
    """Raises `InvalidValueError` or a subclass, naming the field."""
    for name, accepted in UNSUPPORTED.items():
        value = getattr(body, name)
        rule = f"is not supported: leave it out or set it to {json.dumps(accepted[-1])}"
        require(value in accepted, name, value, rule)
    service.check_model(body.model or service.model.name)
    asked = common_request_from(body, "", service.settings.speculation)
    family = Family.of(service.chat.text)
    require(1 <= asked.n <= service.room, "n", asked.n, f"must be at least 1 and at most {service.room}")
    tools = offered(body, family)
    prompt = await service.chat.render(
        [message.model_dump(exclude_none=True) | reasoning_of(message) for message in body.messages],
        tools,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        variables=body.chat_template_kwargs,
    )
    end = service.model.tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False).rstrip()
    chat = Chat(
        replace(asked, prompt=prompt, max_tokens=max_tokens_of(body), logprobs=logprobs_of(body)),
        family,
        tuple(tool["function"]["name"] for tool in tools),
        reasoning_begun=family.reasoning is not None and end.endswith(family.reasoning.begin),
        single_call=body.parallel_tool_calls is False,
    )
    guide = guide_of(body, chat, tools, service)
    shown = family.markers if tools else family.reasoning_markers
    return replace(chat, asked=replace(chat.asked, guide=guide, shown=shown))


def reasoning_of(message: Message) -> dict[str, str]:
    found = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    return {} if found is None else {"reasoning_content": found}


def offered(body: ChatRequest, family: Family) -> list[dict[str, Any]]:
    """The tools that the prompt tells of: none with `tool_choice: none`. Raises `InvalidValueError`."""
    tools = body.tools or []
    require(len(tools) <= MAX_TOOLS, "tools", f"{len(tools)} tools", f"must be at most {MAX_TOOLS}")
    names = [tool.function.name for tool in tools]
    require(len({*names}) == len(names), "tools", names, "must have different names")
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        require(name in names, "tool_choice.function.name", name, "must be the name of one of the tools")
    elif body.tool_choice == "required":
        require(bool(tools), "tool_choice", body.tool_choice, "needs tools")
    if body.tool_choice == "none":
        return []
    rule = "are not supported: the model's chat template has no form of tool calls that this server can read"
    require(not tools or family.tools is not None, "tools", names, rule)
    return [tool.model_dump(exclude_none=True) for tool in tools]


def guide_of(body: ChatRequest, chat: Chat, tools: list[dict[str, Any]], service: Service) -> Guide | None:
    """The form of the output: that which the client asks for, calls if it forces them, and reasoning before them."""
    guide, choice, field = chat.asked.guide, body.tool_choice, "tool_choice"
    forced = bool(tools) and choice not in (None, "auto")
    if forced and guide is not None:
        require(False, field, choice if isinstance(choice, str) else "a function", f"contradicts {guide.name}")
    answer: Any = None
    if guide is not None:
        if guide.form not in ("json_schema", "json_object") or (chat.family.reasoning is None and not tools):
            require(not tools, "tools", chat.tools, f"contradict {guide.name}")
            return guide
        guide.grammar()  # refuses what is no schema
        answer, field = {"type": "object"} if guide.form == "json_object" else json.loads(guide.value), guide.name
    elif not forced:
        return None
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool["function"]["name"] == choice.function.name]
    text = grammar(
        chat.family,
        tools,
        service.added_ids,
        reasoning_begun=chat.reasoning_begun,
        several=not chat.single_call and not isinstance(choice, NamedTool),
        answer=answer,
    )
    return Guide("grammar", text, field)


def max_tokens_of(body: ChatRequest) -> int | None:
    new, old = body.max_completion_tokens, body.max_tokens
    differ = new is not None and old is not None and new != old
    require(not differ, "max_tokens", old, f"contradicts max_completion_tokens {new}")
    return old if new is None else new


def logprobs_of(body: ChatRequest) -> int | None:
    number = body.top_logprobs
    if number is None:
        return 0 if body.logprobs else None
    require(bool(body.logprobs) or number == 0, "top_logprobs", number, "needs logprobs: true")
    rule = f"must be between 0 and {MAX_TOP_LOGPROBS}"
    require(0 <= number <= MAX_TOP_LOGPROBS, "top_logprobs", number, rule)
    return number if body.logprobs else None
