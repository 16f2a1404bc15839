"""The answer to a chat as Anthropic's API gives it: a message of blocks, whole or as events."""

import json
import sys
import uuid
from collections.abc import Iterator
from typing import Any

from deploy.anthropic_api.requests import MessagesRequest
from deploy.chat.reading import Block, Reading, Step
from deploy.openai_api.answers import extras
from deploy.openai_api.chat import ID_CHARACTERS
from deploy.openai_api.chat_requests import Chat
from deploy.openai_api.errors import answer_to
from deploy.openai_api.streaming import named_event
from deploy.parts import Part

PATH = "/v1/messages"


class MessageAnswer:
    """One message as its parts come: a `streaming.Answer`."""

    count = 1
    alive = named_event({"type": "ping"})

    def __init__(self, chat: Chat, body: MessagesRequest, model: str) -> None:
        self.reading, self.body, self.model = Reading(chat), body, model
        self.id = f"msg_{uuid.uuid4().hex}"
        self.blocks: list[dict[str, Any]] = []
        self.output_tokens = 0
        self.latest: Part | None = None
        thinking = body.thinking
        self.hides = thinking is not None and thinking.type == "disabled"
        self.omits = thinking is not None and thinking.display == "omitted"

    def events(self, part: Part) -> Iterator[str]:
        return map(named_event, self.made(part))

    def last_events(self) -> Iterator[str]:
        yield named_event({"type": "message_stop"})

    def failed(self, error: Exception) -> str:
        return named_event(answer_to(error, PATH)[1])

    def add(self, part: Part) -> None:
        for _ in self.made(part):
            pass  # what is made of a part adds to the blocks

    def made(self, part: Part) -> Iterator[dict[str, Any]]:
        """What a part adds, as events."""
        if self.latest is None:
            yield {"type": "message_start", "message": self.message(part)}
        self.latest = part
        self.output_tokens += len(part.piece.tokens)
        for step in self.reading.steps(part):
            if not (self.hides and step.block.kind == "reasoning"):
                yield from self.told(step)
        if part.done:
            self.output_tokens = part.done.completion_tokens
            yield {"type": "message_delta", "delta": self.ended(part), "usage": self.usage(part)} | made_by(part)

    def told(self, step: Step) -> Iterator[dict[str, Any]]:
        """The events of a step."""
        if step.does == "begin":
            self.blocks.append(empty(step.block))
            yield {"type": "content_block_start", "content_block": self.blocks[-1]} | self.place
        elif step.does == "extend":
            if delta := self.delta(step):
                yield {"type": "content_block_delta", "delta": delta} | self.place
        else:
            if step.block.kind == "reasoning":  # clients send back no thinking without a signature; it is not read
                signed = {"type": "signature_delta", "signature": self.id}
                yield {"type": "content_block_delta", "delta": signed} | self.place
            self.blocks[-1] |= self.filled(step.block)
            yield {"type": "content_block_stop"} | self.place

    @property
    def place(self) -> dict[str, int]:
        return {"index": len(self.blocks) - 1}

    def delta(self, step: Step) -> dict[str, Any] | None:
        if step.block.kind == "text":
            return {"type": "text_delta", "text": step.text}
        if step.block.kind == "call":
            return {"type": "input_json_delta", "partial_json": step.text}
        return None if self.omits else {"type": "thinking_delta", "thinking": step.text}

    def filled(self, block: Block) -> dict[str, Any]:
        """What the end of a block adds to it."""
        if block.kind == "text":
            return {"text": block.text}
        if block.kind == "call":
            return {"input": object_of(block.text)}
        return {"thinking": "" if self.omits else block.text, "signature": self.id}

    def ended(self, end: Part) -> dict[str, Any]:
        """Why the answer ended."""
        assert end.done is not None
        reason = "end_turn"
        if self.reading.called(end):
            reason = "tool_use"
        elif end.done.stop is not None:
            reason = "stop_sequence"
        elif end.done.finish_reason == "length":
            whole = self.output_tokens >= self.body.max_tokens
            reason = "max_tokens" if whole else "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": end.done.stop}

    def usage(self, part: Part) -> dict[str, Any]:
        """Tokens found in the cache are not among `input_tokens`. The others are kept for later requests, but not for
        a time that a client could rely on, so none count as written to it.
        """
        return {
            "input_tokens": part.prompt_tokens - part.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": part.cached_tokens,
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"thinking_tokens": self.reading.reasoning_tokens},
        }

    def message(self, part: Part) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [*self.blocks],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self.usage(part),
        }

    def whole(self) -> dict[str, Any]:
        assert self.latest is not None, "after the last part"
        return self.message(self.latest) | self.ended(self.latest) | made_by(self.latest)


def empty(block: Block) -> dict[str, Any]:
    """A block as it begins."""
    if block.kind == "text":
        return {"type": "text", "text": ""}
    if block.kind == "call":
        return {"type": "tool_use", "id": uuid.uuid4().hex[:ID_CHARACTERS], "name": block.name, "input": {}}
    return {"type": "thinking", "thinking": "", "signature": ""}


def object_of(text: str) -> dict[str, Any]:
    """The input of a call; empty if the output was cut off before its end."""
    try:
        found = json.loads(text, parse_float=in_range, parse_int=whole_number)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def whole_number(digits: str) -> int | float:
    """The number; as a float if it has more digits than Python reads."""
    most = sys.get_int_max_str_digits()
    return int(digits) if most == 0 or len(digits) <= most else in_range(digits)


def in_range(digits: str) -> float:
    """The number; where floats do not reach, such as for 1e999, the nearest of them: JSON cannot hold infinity."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(digits)))


def made_by(end: Part) -> dict[str, Any]:
    return {"triforce": extras(end)}
