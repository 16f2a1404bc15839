"""Completions in OpenAI's format, whole or as a stream of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deploy.client_request import ClientRequest
from deploy.openai_api.answers import Answers, Usage, tokens_of
from deploy.openai_api.logprobs import CompletionLogprobs, TokenStrings, merged_logprobs, prompt_logprobs
from deploy.openai_api.requests import CompletionRequest
from deploy.parts import Part
from deploy.service import Service


def completions(
    service: Service, body: CompletionRequest, strings: TokenStrings, asked: Sequence[ClientRequest]
) -> Answers:
    """The answer to a body. Each of its prompts is a request of its own, with `n` completions."""
    usage, count = Usage(asked[0].n, body.stream_options, len(asked[0].resume)), sum(request.n for request in asked)
    return Answers(service, "text_completion", "cmpl", count, usage, lambda _: Choice(service, body, strings))


class Choice:
    """One completion."""

    def __init__(self, service: Service, body: CompletionRequest, strings: TokenStrings) -> None:
        self.body, self.strings = body, strings
        self.kept: list[dict[str, Any]] = []  # the chunks
        self.scored = 0  # prompt tokens whose logprobs came
        self.logprobs = None
        if body.logprobs is not None:
            self.logprobs = CompletionLogprobs(
                strings, service.meaning, body.logprobs, resume=body.resume_token_ids or ()
            )

    reasoning_tokens = None

    def chunks(self, part: Part) -> list[dict[str, Any]]:
        wants_tokens = self.body.return_token_ids or self.logprobs is not None
        if not (part.done or part.piece.text or part.prompt_logprobs or (wants_tokens and part.piece.tokens)):
            return []
        choice = {
            "index": part.index,
            "text": part.piece.text,
            "logprobs": None,
            "finish_reason": part.done and part.done.finish_reason,
        }
        prompt = part.prompt[self.scored : self.scored + len(part.prompt_logprobs)]
        self.scored += len(prompt)
        if self.logprobs is not None:
            choice["logprobs"] = self.logprobs.of(part, prompt if self.body.echo else ())
        if self.body.prompt_logprobs is not None and prompt:
            number = self.body.prompt_logprobs
            choice["prompt_logprobs"] = prompt_logprobs(self.strings, prompt, part.prompt_logprobs, number)
        if self.body.return_token_ids:
            choice |= tokens_of(part)
        if not self.body.stream:
            self.kept.append(choice)
        return [choice]

    def whole(self, end: Part) -> dict[str, Any]:
        lists = {
            name: [each for chunk in self.kept for each in chunk.get(name, ())]
            for name in ("prompt_logprobs", "token_ids", "origins", "texts")
            if any(name in chunk for chunk in self.kept)
        }
        logprobs = [chunk["logprobs"] for chunk in self.kept if chunk["logprobs"] is not None]
        return {
            **self.kept[-1],
            **lists,
            "text": "".join(chunk["text"] for chunk in self.kept),
            "logprobs": merged_logprobs(logprobs) if logprobs else None,
        }
