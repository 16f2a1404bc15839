"""A chat through LangChain, by each of the APIs that it knows: invoked, streamed, with a form for the output, and with
a tool that must be called. Prints what came.

python ask_langchain.py URL MODEL
"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

url, model = sys.argv[1:]
openai: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "model": model, "temperature": 0.7}
anthropic: dict[str, Any] = {"base_url": url, "api_key": "none", "model": model, "temperature": 0.7}


def chats(max_tokens: int) -> dict[str, BaseChatModel]:
    extra: dict[str, Any] = {"extra_body": {"seed": 5}}
    return {
        "chat": ChatOpenAI(**openai, max_completion_tokens=max_tokens, seed=5),
        "responses": ChatOpenAI(**openai, max_completion_tokens=max_tokens, use_responses_api=True, **extra),
        "messages": ChatAnthropic(**anthropic, max_tokens=max_tokens, model_kwargs=extra),
    }


messages = [SystemMessage("Write Python."), HumanMessage("import os")]
point = {
    "title": "point",
    "type": "object",
    "properties": {"x": {"type": "integer", "maximum": 99}},
    "required": ["x"],
    "additionalProperties": False,
}


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather in a city."""
    return f"{city}: sunny"


def asked(short: BaseChatModel, long: BaseChatModel) -> dict[str, Any]:
    answer: Any = short.invoke(messages)
    called: Any = long.bind_tools([weather], tool_choice="any").invoke(messages)
    return {
        "invoked": answer.text,
        "usage": answer.usage_metadata,
        "streamed": "".join(chunk.text for chunk in short.stream(messages)),
        "batched": [each.text for each in short.batch([messages, messages])],
        "object": long.with_structured_output(point, method="json_schema").invoke(messages),
        "calls": [[call["name"], call["args"]] for call in called.tool_calls],
    }


long = chats(400)
json.dump({api: asked(chat, long[api]) for api, chat in chats(24).items()}, sys.stdout)
