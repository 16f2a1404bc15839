"""What the answers to completions and to chats share: how they are sent, whole or as a stream of chunks."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Any, Protocol

from actors.wire import stats_from_proto
from deploy.openai_api.errors import answer_to
from deploy.openai_api.requests import StreamOptions
from deploy.openai_api.streaming import COMMENT, event
from deploy.parts import Part
from deploy.service import Service
from triforce_core.messages import Origin


class Choice(Protocol):
    """One completion, as its parts come. What a whole answer needs of them is kept, unless they are streamed."""

    def chunks(self, part: Part) -> list[dict[str, Any]]:
        """What the part adds, as choices of chunks; none if it has nothing that the client asked for."""
        ...

    def whole(self, end: Part) -> dict[str, Any]:
        """The completion as a choice of a whole answer; `end`: its last part. May take long: not for an event loop."""
        ...

    @property
    def reasoning_tokens(self) -> int | None:
        """The tokens of its reasoning so far; None if it is no chat's."""
        ...


class Answers:
    """The completions that one call asks for, in order: a `streaming.Answer`."""

    alive = COMMENT

    def __init__(
        self, service: Service, kind: str, id_prefix: str, count: int, usage: Usage, new_choice: Callable[[int], Choice]
    ) -> None:
        """`kind`: of OpenAI's objects. `count`: of completions. `new_choice`: called with the number of a completion
        when its first part comes: the service, which bounds `count`, has not seen the request before.
        """
        self.count, self.usage, self.new_choice = count, usage, new_choice
        self.choices: dict[int, Choice] = {}
        self.latest: dict[int, Part] = {}  # by completion; not of streams
        self.begun = set[int]()  # the completions of which the client has a chunk
        self.frame = {
            "id": f"{id_prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": service.model.name,
            "system_fingerprint": service.model.fingerprint,
        }

    def events(self, part: Part) -> Iterator[str]:
        self.saw(part)
        for chunk in self.chunks(part):
            yield event({**self.frame, **chunk, **self.usage.of_chunk(self.reasoning_tokens)})

    def last_events(self) -> Iterator[str]:
        if self.usage.at_end:
            yield event({**self.frame, "choices": [], "usage": self.usage.tokens(self.reasoning_tokens)})
        yield "data: [DONE]\n\n"

    def failed(self, error: Exception) -> str:
        return event(answer_to(error)[1])

    def add(self, part: Part) -> None:
        self.saw(part)
        self.chunks_of(part)
        self.latest[part.index] = part

    def whole(self) -> dict[str, Any]:
        """The whole answer. How an output was made stands beside the choices if there is one, else in each."""
        ends = [self.latest[index] for index in range(self.count)]
        choices = [self.choices[index].whole(end) for index, end in enumerate(ends)]
        made = [{"triforce": extras(end)} for end in ends]
        answer = {**self.frame, "choices": choices, "usage": self.usage.tokens(self.reasoning_tokens)}
        if self.count == 1:
            return answer | made[0]
        return answer | {"choices": [choice | each for choice, each in zip(choices, made, strict=True)]}

    @property
    def reasoning_tokens(self) -> int | None:
        """Of all completions so far; None if these are no chats."""
        counts = [choice.reasoning_tokens for choice in self.choices.values()]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None

    def saw(self, part: Part) -> None:
        """To be called before anything of the part is sent."""
        self.usage.saw(part)
        if part.fingerprint:  # of the target that made it
            self.frame["system_fingerprint"] = part.fingerprint

    def chunks(self, part: Part) -> Iterator[dict[str, Any]]:
        """The part as chunks of a stream, without their frame. The first chunk of a choice carries its seed, and the
        last one how it was made; each chunk with token ids also says how the output was made until now.
        """
        for chunk in self.chunks_of(part):
            made = {} if part.index in self.begun else {"seed": part.seed}
            self.begun.add(part.index)
            if "token_ids" in chunk:
                made |= progress(part)
            if chunk["finish_reason"]:
                made = extras(part)
            yield {"choices": [chunk], **({"triforce": made} if made else {})}

    def chunks_of(self, part: Part) -> list[dict[str, Any]]:
        if part.index not in self.choices:
            self.choices[part.index] = self.new_choice(part.index)
        return self.choices[part.index].chunks(part)


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

    def tokens(self, reasoning_tokens: int | None) -> dict[str, Any]:
        prompts = [part for index, part in self.latest.items() if index % self.n == 0]
        prompt_tokens, completion_tokens = sum(part.prompt_tokens for part in prompts), sum(self.output.values())
        cached_tokens = sum(part.cached_tokens for part in prompts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        } | ({} if reasoning_tokens is None else {"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}})

    def of_chunk(self, reasoning_tokens: int | None) -> dict[str, Any]:
        """The field of a chunk before the last: null, unless each chunk tells the usage until then."""
        return {"usage": self.tokens(reasoning_tokens) if self.in_chunks else None} if self.at_end else {}


def tokens_of(part: Part) -> dict[str, list[Any]]:
    """The part's tokens, where each comes from, and the text that each completes. The part's text may have more at its
    end, held back until then.
    """
    text, ends = part.piece.text[part.echoed :], [0, *accumulate(part.piece.lengths)]
    return {
        "token_ids": [*part.piece.tokens],
        "origins": [Origin(origin).name.lower() for origin in part.piece.origins],
        "texts": [text[begin:end] for begin, end in pairwise(ends)],
    }


def progress(part: Part) -> dict[str, Any]:
    """For a chunk before the last: the fields of `extras` that are known by then."""
    if part.so_far is None:  # the last part, of which `extras` tells more
        return {}
    stats = stats_from_proto(part.so_far)
    return {"prompt_tokens": part.prompt_tokens, "acceptance": stats.acceptance, "plan": stats.plan}


def extras(end: Part) -> dict[str, Any]:
    """Fields beyond OpenAI's: how the output was made, and the seed that reproduces it."""
    assert end.done is not None, "the last part of a completion"
    stats = end.done.stats
    lossy = {} if end.lossy is None else {"lossy": end.lossy}
    return lossy | {
        "seed": end.seed,
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
