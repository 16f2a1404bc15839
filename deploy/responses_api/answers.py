"""The answer to a chat as OpenAI's Responses API gives it: a list of items, whole or as events."""

import time
import uuid
from collections.abc import Iterator
from typing import Any

from deploy.chat.reading import Block, Reading, Step
from deploy.openai_api.answers import extras
from deploy.openai_api.chat import ID_CHARACTERS
from deploy.openai_api.chat_requests import Chat
from deploy.openai_api.errors import answer_to
from deploy.openai_api.streaming import COMMENT, named_event
from deploy.parts import Part
from deploy.responses_api.requests import ResponsesRequest, offered


class ResponseAnswer:
    """One response as its parts come: a `streaming.Answer`."""

    count = 1
    alive = COMMENT

    def __init__(self, chat: Chat, body: ResponsesRequest, model: str) -> None:
        self.reading, self.body, self.model = Reading(chat), body, model
        self.tools = {each.name: each for each in offered(body.tools or ())}
        self.id, self.created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self.items: list[dict[str, Any]] = []
        self.output_tokens = 0
        self.latest: Part | None = None
        self.sent = 0  # events

    def events(self, part: Part) -> Iterator[str]:
        return map(self.event, self.made(part))

    def last_events(self) -> Iterator[str]:
        answer = self.whole()
        yield self.event({"type": f"response.{answer['status']}", "response": answer})

    def failed(self, error: Exception) -> str:
        """After the events that begin a response, if none were sent; with the last item as far as it came."""
        answer, body = answer_to(error)
        code = answer.code if answer.code in CODES else CODES_BY_STATUS.get(answer.status, "server_error")
        failure = {"error": {"code": code, "message": body["error"]["message"]}}
        begin = [] if self.sent else [*map(self.event, self.begun())]
        if self.reading.block is not None:
            self.items[-1] |= self.filled(self.reading.block) | {"status": "incomplete"}
        end = self.event({"type": "response.failed", "response": self.response("failed") | failure})
        return "".join([*begin, end])

    def event(self, content: dict[str, Any]) -> str:
        self.sent += 1
        return named_event(content | {"sequence_number": self.sent - 1})

    def add(self, part: Part) -> None:
        for _ in self.made(part):
            pass  # what is made of a part adds to the items

    def made(self, part: Part) -> Iterator[dict[str, Any]]:
        """What a part adds, as events."""
        if self.latest is None:
            yield from self.begun()
        self.latest = part
        self.output_tokens += len(part.piece.tokens)
        for step in self.reading.steps(part):
            yield from self.told(step)
        if part.done:
            self.output_tokens = part.done.completion_tokens

    def begun(self) -> Iterator[dict[str, Any]]:
        for kind in ("created", "in_progress"):
            yield {"type": f"response.{kind}", "response": self.response("in_progress")}

    def told(self, step: Step) -> Iterator[dict[str, Any]]:
        """The events of a step."""
        call = step.block.kind == "call"
        if step.does == "begin":
            self.items.append(self.empty(step.block))
            yield {"type": "response.output_item.added", "item": self.items[-1]} | self.at
            if not call:
                yield {"type": "response.content_part.added", "part": part_of(step.block)} | self.within
        elif step.does == "extend":
            told = {"type": f"response.{DELTAS[step.block.kind]}.delta", "delta": step.text}
            yield told | (self.of_item if call else self.within | scores(step.block))
        else:
            text = {"arguments" if call else "text": step.block.text}
            told = {"type": f"response.{DELTAS[step.block.kind]}.done"} | text
            yield told | (self.of_item if call else self.within | scores(step.block))
            self.items[-1] |= self.filled(step.block) | {"status": "incomplete" if step.cut else "completed"}
            if not call:
                yield {"type": "response.content_part.done", "part": part_of(step.block)} | self.within
            yield {"type": "response.output_item.done", "item": self.items[-1]} | self.at

    def filled(self, block: Block) -> dict[str, Any]:
        """What the end of an item adds to it."""
        return {"arguments": block.text} if block.kind == "call" else {"content": [part_of(block)]}

    def empty(self, block: Block) -> dict[str, Any]:
        """An item as it begins."""
        name, found = uuid.uuid4().hex, dict[str, Any]()
        if block.kind == "text":
            found = {"id": f"msg_{name}", "type": "message", "role": "assistant", "content": []}
        elif block.kind == "reasoning":
            found = {"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": [], "encrypted_content": None}
        else:
            called = self.tools.get(block.name)
            function = block.name if called is None else called.tool.name
            found = {"id": f"fc_{name}", "type": "function_call", "call_id": name[:ID_CHARACTERS], "name": function}
            found |= {"arguments": ""} | ({"namespace": called.space} if called and called.space else {})
        return found | {"status": "in_progress"}

    @property
    def at(self) -> dict[str, Any]:
        return {"output_index": len(self.items) - 1}

    @property
    def of_item(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"]} | self.at

    @property
    def within(self) -> dict[str, Any]:
        return {"content_index": 0} | self.of_item

    def response(self, status: str) -> dict[str, Any]:
        """The object of a response, with what the request said."""
        body = self.body
        given = body.model_dump(include={"instructions", "max_output_tokens", "temperature", "top_p"})
        return given | {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": [*self.items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": False,
            "text": {"format": {"type": "text"}}
            | (body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}),
            "tool_choice": body.model_dump(include={"tool_choice"})["tool_choice"] or "auto",
            "tools": [*(body.tools or ())],
            "truncation": "disabled",
            "usage": None,
        }

    def whole(self) -> dict[str, Any]:
        end = self.latest
        assert end is not None, "after the last part"
        assert end.done is not None
        usage = {
            "input_tokens": end.prompt_tokens,
            "input_tokens_details": {"cached_tokens": end.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reading.reasoning_tokens},
            "total_tokens": end.prompt_tokens + self.output_tokens,
        }
        status = "incomplete" if end.done.finish_reason == "length" else "completed"
        return self.response(status) | {"usage": usage, "triforce": extras(end)}


# What the events of a block's deltas are called.
DELTAS = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
# The codes of OpenAI's responses, and of Codex.
CODES = ("context_length_exceeded",)
CODES_BY_STATUS = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


def part_of(block: Block) -> dict[str, Any]:
    """The one part of an item that is text or reasoning."""
    found: dict[str, Any] = {"type": DELTAS[block.kind], "text": block.text}
    return found | ({"annotations": [], "logprobs": []} if block.kind == "text" else {})


def scores(block: Block) -> dict[str, Any]:
    return {"logprobs": []} if block.kind == "text" else {}
