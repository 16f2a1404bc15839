"""One completion in OpenAI's format, whole or as a stream of chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from actors.wire import stats_from_proto
from deploy.openai_api.errors import answer_to
from deploy.openai_api.requests import CompletionRequest
from deploy.openai_api.streaming import event
from deploy.service import Done, Part, Service
from triforce_core.messages import Origin
from triforce_core.text import joined


class Completion:
    """One completion in OpenAI's format."""

    def __init__(self, service: Service, body: CompletionRequest) -> None:
        self.body = body
        self.frame = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model.name,
            "system_fingerprint": service.model.fingerprint,
        }

    def of(self, part: Part) -> dict[str, Any]:
        """A chunk; also the whole completion if there is only one part."""
        choice = {
            "index": 0,
            "text": part.piece.text,
            "logprobs": None,
            "finish_reason": part.done and part.done.finish_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = part.piece.tokens
            choice["origins"] = [Origin(origin).name.lower() for origin in part.piece.origins]
            choice["texts"] = part.piece.texts
        return {**self.frame, "choices": [choice], **({"triforce": extras(part, part.done)} if part.done else {})}

    async def whole(self, parts: AsyncGenerator[Part, None]) -> dict[str, Any]:
        pieces = []
        async with aclosing(parts):
            async for part in parts:
                pieces.append(part.piece)
        return {**self.of(replace(part, piece=joined(pieces))), "usage": usage(part)}

    async def events(self, first: Part | None, rest: AsyncGenerator[Part | None, None]) -> AsyncGenerator[str, None]:
        """Server-sent events: a chunk for each part with content, and a comment for each None.

        The first chunk carries the seed. Parts without text have content only if the client wants token ids, and then
        each chunk also says how the output was made until now.
        """
        with_usage = self.body.stream_options is not None and self.body.stream_options.include_usage
        no_usage = {"usage": None} if with_usage else {}
        told = False
        try:
            part = first
            while part is None or part.done is None:
                if part is None:
                    yield ": waiting\n\n"
                elif part.piece.text or self.body.return_token_ids:
                    seed = {} if told else {"seed": part.seed}
                    known = seed | (progress(part) if self.body.return_token_ids else {})
                    told = True
                    yield event({**self.of(part), **({"triforce": known} if known else {}), **no_usage})
                part = await anext(rest)
            yield event({**self.of(part), **no_usage})
            if with_usage:
                yield event({**self.frame, "choices": [], "usage": usage(part)})
            yield "data: [DONE]\n\n"
        except Exception as error:  # the HTTP status is already sent, so the error goes into an event
            yield event(answer_to(error)[1])


def usage(part: Part) -> dict[str, int]:
    assert part.done is not None
    completion_tokens = part.done.completion_tokens
    return {
        "prompt_tokens": part.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": part.prompt_tokens + completion_tokens,
    }


def progress(part: Part) -> dict[str, Any]:
    """Of a chunk before the last: what `extras` will say at the end, as far as it is known."""
    if part.so_far is None:
        return {}
    stats = stats_from_proto(part.so_far)
    return {"prompt_tokens": part.prompt_tokens, "acceptance": stats.acceptance, "plan": stats.plan}


def extras(part: Part, done: Done) -> dict[str, Any]:
    """Fields beyond OpenAI's: how the output was made, and the seed that reproduces it."""
    stats = done.stats
    return {
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
