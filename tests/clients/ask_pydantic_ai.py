"""Asks through pydantic-ai, by each of the APIs that it knows, for an output of a type, until the model has also called
a tool. Prints what came.

python ask_pydantic_ai.py URL MODEL
"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

url, model = sys.argv[1:]
openai = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
models: dict[str, Model] = {
    "chat": OpenAIChatModel(model, provider=openai),
    "responses": OpenAIResponsesModel(model, provider=openai),
    "messages": AnthropicModel(model, provider=AnthropicProvider(base_url=url, api_key="none")),
}


class Forecast(BaseModel):
    city: Literal["Paris", "Rome"]
    sunny: bool


def asked(api: str) -> dict[str, Any]:
    called: list[str] = []

    def weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather in a city."""
        called.append(city)
        return f"{city}: sunny"

    for seed in range(20):  # with random weights, the tool and the output are as likely
        settings: Any = {"max_tokens": 600, "extra_body": {"seed": seed}}
        more: Any = {"instructions": "You forecast.", "model_settings": settings}
        agent = Agent(models[api], output_type=ToolOutput(Forecast, name="forecast"), tools=[weather], **more)
        found: dict[str, Any] = {"output": agent.run_sync("Rome?").output.model_dump(), "called": called}
        if called:
            break
    found["streamed"] = agent.run_stream_sync("Rome?").get_output().model_dump()
    if api != "messages":  # pydantic-ai has native outputs for Claude's own names only
        native = Agent(models[api], output_type=NativeOutput(Forecast), **more)
        found["native"] = native.run_sync("Rome?").output.model_dump()
    return found


json.dump({api: asked(api) for api in models}, sys.stdout)
