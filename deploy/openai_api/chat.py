"""Chat completions in OpenAI's format, whole or as a stream of chunks."""

import uuid
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from deploy.chat.parsing import Call, Content, Event, Reasoning
from deploy.chat.reading import Reading
from deploy.openai_api.answers import Answers, Usage, tokens_of
from deploy.openai_api.chat_requests import Chat, ChatRequest, chat_from
from deploy.openai_api.errors import ANSWERS, documented, error_response
from deploy.openai_api.large import LargeBodyRoute
from deploy.openai_api.logprobs import TokenStrings
from deploy.openai_api.streaming import WHOLE_OR_EVENTS, sent
from deploy.parts import Part
from deploy.service import Service
from triforce_core.errors import InvalidValueError

ID_CHARACTERS = 9  # of a tool call's id: the templates of Mistral's models refuse other lengths


class Choice:
    """One answer, as its parts come: deltas for a stream, or their sum, which a stream does not keep."""

    def __init__(self, chat: Chat, body: ChatRequest, strings: TokenStrings, index: int) -> None:
        self.chat, self.body, self.strings, self.index = chat, body, strings, index
        self.reading = Reading(chat)
        self.begun = False  # whether a part came
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []  # without their arguments
        self.arguments: list[list[str]] = []  # of each call, in pieces
        self.logprobs: list[dict[str, Any]] = []
        self.tokens: dict[str, list[Any]] = {"token_ids": [], "origins": [], "texts": []}

    @property
    def reasoning_tokens(self) -> int:
        return self.reading.reasoning_tokens

    def chunks(self, part: Part) -> list[dict[str, Any]]:
        """The first chunk of all has the role; the last of each part its logprobs, token ids and finish reason."""
        begin = [] if self.begun else [self.chunk({"role": "assistant", "content": ""})]
        self.begun = True
        deltas = [self.delta(each) for each in self.reading.events(part)]
        logprobs = self.scored(part)
        tokens = tokens_of(part) if self.body.return_token_ids else {}
        if not self.body.stream:
            self.logprobs += logprobs
            for name, values in tokens.items():
                self.tokens[name] += values
        if part.done or (not deltas and part.piece.tokens and (logprobs or tokens)):
            deltas.append({})
        found = [self.chunk(delta) for delta in deltas]
        if found:
            last = found[-1]
            last["logprobs"] = {"content": logprobs, "refusal": None} if logprobs else None
            last |= {**tokens, "finish_reason": self.finish_reason(part)}
        return begin + found

    def chunk(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, found: Event) -> dict[str, Any]:
        """What the client sees of an event."""
        if isinstance(found, Content):
            self.keep(self.content, found.text)
            return {"content": found.text}
        if isinstance(found, Reasoning):
            self.keep(self.reasoning, found.text)
            return {"reasoning_content": found.text, "reasoning": found.text}
        if isinstance(found, Call):
            function = {"name": found.name, "arguments": ""}
            self.calls.append({"id": uuid.uuid4().hex[:ID_CHARACTERS], "type": "function", "function": function})
            self.arguments.append([])
            return {"tool_calls": [{"index": len(self.calls) - 1, **self.calls[-1]}]}
        self.keep(self.arguments[-1], found.text)
        return {"tool_calls": [{"index": len(self.calls) - 1, "function": {"arguments": found.text}}]}

    def keep(self, texts: list[str], text: str) -> None:
        if not self.body.stream:
            texts.append(text)

    def scored(self, part: Part) -> list[dict[str, Any]]:
        """The logprobs of a part's tokens, be they content, reasoning or tool calls."""
        if self.chat.asked.logprobs is None:
            return []
        pairs = zip(part.piece.tokens, part.piece.logprobs, strict=True)
        number = self.body.top_logprobs or 0
        return [
            self.entry(token, score.logprob) | {"top_logprobs": [self.entry(*each) for each in score.top[:number]]}
            for token, score in pairs
        ]

    def entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self.strings.bytes_of(token)
        return {"token": text.decode(errors="replace"), "logprob": logprob, "bytes": [*text]}

    def finish_reason(self, part: Part) -> str | None:
        if part.done is None:
            return None
        return "tool_calls" if self.reading.called(part) and not self.chat.named else part.done.finish_reason

    def whole(self, end: Part) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.content), "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(self.reasoning)
        if self.calls:
            functions = [
                {**call["function"], "arguments": "".join(pieces)}
                for call, pieces in zip(self.calls, self.arguments, strict=True)
            ]
            calls = [call | {"function": function} for call, function in zip(self.calls, functions, strict=True)]
            message |= {"content": message["content"] or None, "tool_calls": calls}
        asked = self.chat.asked.logprobs is not None
        return {
            "index": self.index,
            "message": message,
            "logprobs": {"content": self.logprobs, "refusal": None} if asked else None,
            "finish_reason": self.finish_reason(end),
            **(self.tokens if self.body.return_token_ids else {}),
        }


def chat_completion(service: Service, body: ChatRequest, chat: Chat, strings: TokenStrings) -> Answers:
    """The answer to a chat, of `n` choices."""
    kind, usage = (
        "chat.completion.chunk" if body.stream else "chat.completion",
        Usage(chat.asked.n, body.stream_options),
    )
    return Answers(service, kind, "chatcmpl", chat.asked.n, usage, lambda index: Choice(chat, body, strings, index))


def chat_routes(service: Service, strings: TokenStrings) -> APIRouter:
    router = APIRouter(route_class=LargeBodyRoute)
    refusals = {answer.status for answer in ANSWERS.values()}

    @router.post("/v1/chat/completions", responses=WHOLE_OR_EVENTS | documented(*refusals, 500))
    async def chat(body: ChatRequest) -> Response:
        """Answers a chat, whole or as server-sent events."""
        try:
            chat = chat_from(body, service)
            if chat.asked.logprobs is not None:
                await strings.load(service.model)
            answers = chat_completion(service, body, chat, strings)
            return await sent(answers, service.complete(chat.asked), stream=body.stream)
        except InvalidValueError as error:
            if error.field == "prompt":  # chats have messages in its place
                error = type(error)("messages", error.value, error.rule)
            return error_response(error)
        except Exception as error:
            return error_response(error)

    return router
