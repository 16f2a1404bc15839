"""The completions of one request in OpenAI's format, whole or as a stream of chunks."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from itertools import accumulate, pairwise
from typing import Any

from fastapi.responses import Response

from actors.wire import stats_from_proto
from deploy.client_request import ClientRequest
from deploy.openai_api.errors import answer_to
from deploy.openai_api.large import json_response
from deploy.openai_api.logprobs import CompletionLogprobs, TokenStrings, merged_logprobs, prompt_logprobs
from deploy.openai_api.requests import CompletionRequest, StreamOptions
from deploy.openai_api.streaming import EventStream, event, with_idle
from deploy.service import Done, Part, Service
from triforce_core.messages import Origin


class Choice:
    """One completion, as its parts come."""

    def __init__(self, service: Service, body: CompletionRequest, strings: TokenStrings) -> None:
        self.body, self.strings = body, strings
        self.begun = False  # whether the client has a part
        self.scored = 0  # prompt tokens whose logprobs came
        self.logprobs = None
        if body.logprobs is not None:
            self.logprobs = CompletionLogprobs(strings, service.meaning, body.logprobs)

    def of(self, part: Part) -> dict[str, Any]:
        """The part as a choice of a chunk."""
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
            choice["token_ids"] = part.piece.tokens
            choice["origins"] = [Origin(origin).name.lower() for origin in part.piece.origins]
            choice["texts"] = token_texts(part)
        return choice

    def has_content(self, part: Part) -> bool:
        """Whether the part tells the client anything that it asked for."""
        wants_tokens = self.body.return_token_ids or self.logprobs is not None
        return bool(part.piece.text or part.prompt_logprobs or (wants_tokens and part.piece.tokens))


def token_texts(part: Part) -> list[str]:
    """For each token, the text that it completes. The part's text may have more at its end, held back until then."""
    text, ends = part.piece.text[part.echoed :], [0, *accumulate(part.piece.lengths)]
    return [text[begin:end] for begin, end in pairwise(ends)]


def whole_choice(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One completion, from the choices of its chunks."""
    lists = {
        name: [each for chunk in chunks for each in chunk.get(name, ())]
        for name in ("prompt_logprobs", "token_ids", "origins", "texts")
        if any(name in chunk for chunk in chunks)
    }
    logprobs = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"] is not None]
    return {
        **chunks[-1],
        **lists,
        "text": "".join(chunk["text"] for chunk in chunks),
        "logprobs": merged_logprobs(logprobs) if logprobs else None,
    }


class Answers:
    """What the answers to a body of completions and to a chat share: how they are sent."""

    usage: Usage
    count: int  # of choices
    frame: dict[str, Any]  # the fields of every object

    async def whole(self, parts: AsyncGenerator[Part, None]) -> dict[str, Any]:
        raise NotImplementedError

    def chunks(self, part: Part) -> Iterator[dict[str, Any]]:
        """The part as chunks of a stream, without their frame; none if it has nothing that the client asked for."""
        raise NotImplementedError

    async def sent(self, parts: AsyncGenerator[Part, None], stream: bool | None, idle_s: float) -> Response:
        """The answer, whole or as events. What is raised before the first event is raised here."""
        if not stream:
            return await json_response(await self.whole(parts))
        paced = with_idle(parts, idle_s)
        try:
            first = await anext(paced)
        except BaseException:
            await paced.aclose()
            raise
        return EventStream(self.events(first, paced), source=paced)

    async def events(self, first: Part | None, rest: AsyncGenerator[Part | None, None]) -> AsyncGenerator[str, None]:
        """Server-sent events: the chunks of each part, and a comment for each None."""
        ended = 0
        try:
            part = first
            while True:
                if part is None:
                    yield ": waiting\n\n"
                else:
                    self.usage.saw(part)
                    for chunk in self.chunks(part):
                        yield event({**self.frame, **chunk, **self.usage.of_chunk()})
                    if part.done:
                        ended += 1
                        if ended == self.count:
                            break
                part = await anext(rest)
            if self.usage.at_end:
                yield event({**self.frame, "choices": [], "usage": self.usage.tokens()})
            yield "data: [DONE]\n\n"
        except Exception as error:  # the HTTP status is already sent, so the error goes into an event
            yield event(answer_to(error)[1])


class Completions(Answers):
    """The completions that one body asks for. Each prompt of the body is a request of its own, with `n` completions."""

    def __init__(
        self, service: Service, body: CompletionRequest, strings: TokenStrings, asked: Sequence[ClientRequest]
    ) -> None:
        self.body, self.count = body, sum(request.n for request in asked)
        self.usage = Usage(asked[0].n, body.stream_options, len(asked[0].resume))
        # Made as their parts come: the service, which bounds their number, has not seen the request yet.
        self.choices = defaultdict[int, Choice](lambda: Choice(service, body, strings))
        self.frame = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model.name,
            "system_fingerprint": service.model.fingerprint,
        }

    async def whole(self, parts: AsyncGenerator[Part, None]) -> dict[str, Any]:
        """The whole completion. How an output was made stands beside the choices if there is one, else in each."""
        chunks = defaultdict[int, list[dict[str, Any]]](list)
        last: dict[int, Part] = {}
        async with aclosing(parts):
            async for part in parts:
                self.usage.saw(part)
                chunks[part.index].append(self.choices[part.index].of(part))
                last[part.index] = part
        ends = [last[index] for index in range(self.count)]
        # Some have a hundred thousand entries.
        choices = [await asyncio.to_thread(whole_choice, chunks[index]) for index in range(self.count)]
        made = [{"triforce": extras(end, end.done)} for end in ends if end.done]
        answer = {**self.frame, "choices": choices, "usage": self.usage.tokens()}
        if len(choices) == 1:
            return answer | made[0]
        return answer | {"choices": [choice | each for choice, each in zip(choices, made, strict=True)]}

    def chunks(self, part: Part) -> Iterator[dict[str, Any]]:
        """The first chunk of a choice carries its seed, and the last one how it was made; if the client wants token
        ids, each chunk also says how the output was made until now.
        """
        choice = self.choices[part.index]
        if part.done or choice.has_content(part):
            seed = {} if choice.begun else {"seed": part.seed}
            choice.begun = True
            known = seed | (progress(part) if self.body.return_token_ids else {})
            made = extras(part, part.done) if part.done else known
            yield {"choices": [choice.of(part)], **({"triforce": made} if made else {})}


class Usage:
    """Counts the tokens of all completions of a request, `n` of each prompt, as their parts come."""

    def __init__(self, n: int, options: StreamOptions | None, resumed: int = 0) -> None:
        self.n = n
        self.at_end = options is not None and bool(options.include_usage)
        self.in_chunks = options is not None and self.at_end and bool(options.continuous_usage_stats)
        self.latest: dict[int, Part] = {}  # by completion
        self.output = defaultdict[int, int](lambda: resumed)  # tokens by completion

    def saw(self, part: Part) -> None:
        self.latest[part.index] = part
        self.output[part.index] += len(part.piece.tokens)
        if part.done:
            self.output[part.index] = part.done.completion_tokens

    def tokens(self) -> dict[str, Any]:
        prompts = [part for index, part in self.latest.items() if index % self.n == 0]
        prompt_tokens, completion_tokens = sum(part.prompt_tokens for part in prompts), sum(self.output.values())
        cached_tokens = sum(part.so_far.cached_tokens for part in prompts if part.so_far)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }

    def of_chunk(self) -> dict[str, Any]:
        """The field of a chunk before the last: null, unless each chunk tells the usage until then."""
        return {"usage": self.tokens() if self.in_chunks else None} if self.at_end else {}


def progress(part: Part) -> dict[str, Any]:
    """For a chunk before the last: the fields of `extras` that are known by then."""
    if part.so_far is None:
        return {}
    stats = stats_from_proto(part.so_far)
    return {"prompt_tokens": part.prompt_tokens, "acceptance": stats.acceptance, "plan": stats.plan}


def extras(part: Part, done: Done) -> dict[str, Any]:
    """Fields beyond OpenAI's: how the output was made, and the seed that reproduces it."""
    stats = done.stats
    lossy = {} if part.lossy is None else {"lossy": part.lossy}
    return lossy | {
        "seed": part.seed,
        "queued_s": stats.queued_s,
        "prefill_s": stats.prefill_s,
        "ms_per_token": stats.ms_per_token,
        "tokens_per_round": stats.tokens_per_round,
        "acceptance": stats.acceptance,
        "snapshots": stats.snapshots,
        "preempted": stats.preempted,
        "controller": {
            "plan": stats.plan,
            "rounds": stats.plans,
            "changes": stats.plan_changes,
            "expected_ms_per_token": stats.expected_ms,
            "plain_ms_per_token": stats.plain_ms,
        },
    }
