"""Conversations in gRPC's messages, as the chat template reads them: in OpenAI's form. Not for an event loop: to
convert a long one takes time.
"""

from __future__ import annotations

from typing import Any

from deploy.bounded_json import bounded_loads
from deploy.client_request import MAX_MESSAGES, MAX_TOOLS
from triforce_core._gen.triforce.v1 import generation_pb2 as pb
from triforce_core.errors import InvalidValueError, require


def messages_of(chat: pb.ChatMessages) -> list[dict[str, Any]]:
    """The messages. Raises `InvalidValueError` naming the field."""
    count = len(chat.messages)
    require(count <= MAX_MESSAGES, "messages", f"{count} messages", f"must be at most {MAX_MESSAGES}")
    return [message_of(each, f"messages.{index}") for index, each in enumerate(chat.messages)]


def message_of(message: pb.ChatMessage, place: str) -> dict[str, Any]:
    calls = objects_of(message.tool_calls_json, f"{place}.tool_calls_json", MAX_MESSAGES)
    for index, call in enumerate(calls):
        function = call.get("function")
        texts = isinstance(function, dict) and all(isinstance(function.get(key), str) for key in ("name", "arguments"))
        rule = "must have a function with name and arguments, both texts"
        require(texts, f"{place}.tool_calls_json.{index}", call, rule)
    given = {"content": message.content, "name": message.name, "tool_call_id": message.tool_call_id}
    found: dict[str, Any] = {"role": message.role, **{name: value for name, value in given.items() if value}}
    if calls:
        return found | {"tool_calls": calls}
    return {"content": "", **found}


def tools_of(chat: pb.ChatMessages) -> list[dict[str, Any]]:
    """The tools. Raises `InvalidValueError` naming the field."""
    return objects_of(chat.tools_json, "tools_json", MAX_TOOLS)


def objects_of(text: str, field: str, most: int) -> list[dict[str, Any]]:
    """A JSON list of at most so many objects; an empty text is an empty list."""
    if not text:
        return []
    try:
        found = bounded_loads(text.encode(), field)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(field, text[:80], f"must be JSON: {error}") from None
    objects = isinstance(found, list) and all(isinstance(each, dict) for each in found)
    require(objects, field, text[:80], "must be a JSON list of objects")
    require(len(found) <= most, field, f"{len(found)} objects", f"must be at most {most}")
    return list(found)
