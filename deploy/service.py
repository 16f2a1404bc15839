"""Text completions for all APIs: admits requests, encodes prompts, and turns output tokens into text.

`Service` owns what the APIs share. It reaches a pipeline through the `Pipelines` protocol and does not depend on Ray.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import triforce_core
from actors.wire import finish_reason_from_proto, request_to_proto, stats_from_proto
from deploy.encoding import Encoder
from deploy.errors import DeadlineError, OverloadedError
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import MAX_LOOKAHEAD, Settings
from triforce_core.engine.limits import Limits, target_limits
from triforce_core.engine.sequence import FinishReason, Request, Stats
from triforce_core.errors import InvalidValueError, TooLargeError, UnavailableError, UnknownModelError, require
from triforce_core.messages import GREEDY, SamplingParams
from triforce_core.models.files import load_config, load_tokenizer, stop_token_ids
from triforce_core.text import OutputText, TextDelta, TokenText, joined

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024  # per stop string; the event loop prepares each string and checks it at every character
PROBE_S = 5.0  # limit for the probe, a completion of two tokens
RANDOM_SEED_BITS = 53  # JSON readers that use doubles keep a seed of this size exact


class Pipelines(Protocol):
    """The pipelines that decode requests."""

    def decode(self, request: pb.DecodeRequest) -> AsyncGenerator[pb.DecodeEvent, None]:
        """A request's tokens as they are committed; closing the generator stops the request."""
        ...

    async def status(self) -> dict[str, list[pb.TierStatus]]:
        """By the replica's name, the status of each of its tiers, draft first. Raises `UnavailableError`."""
        ...

    async def check(self) -> None:
        """Raise `UnavailableError` unless a pipeline can serve."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """A client's request, in the form common to all APIs."""

    prompt: str | tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int | None  # None: bounded by the context and the KV pool only
    seed: int | None = None  # None: the service draws a seed
    stop: tuple[str, ...] = ()
    model: str = ""  # empty: the default model
    lookaheads: tuple[int, ...] | None = None  # None: those of the settings
    resume: tuple[int, ...] = ()  # output tokens that the client already has
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """The summary of a finished completion."""

    finish_reason: FinishReason
    completion_tokens: int
    stats: Stats


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a completion; the last one has `done`."""

    piece: TextDelta
    seed: int
    prompt_tokens: int
    done: Done | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The target as clients know it."""

    name: str
    limits: Limits
    stop_token_ids: tuple[int, ...]
    tokenizer: Any
    fingerprint: str  # while it is unchanged, the same seed gives the same output
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def load(cls, settings: Settings) -> ServedModel:
        target = settings.target.model
        what = [triforce_core.__version__, target, settings.dtype, settings.device, settings.attention]
        return cls(
            name=served_name(settings),
            limits=target_limits(load_config(target, "target"), settings),
            stop_token_ids=stop_token_ids(target),
            tokenizer=load_tokenizer(target),
            fingerprint="fp_" + hashlib.sha256(json.dumps(what).encode()).hexdigest()[:10],
        )


def served_name(settings: Settings) -> str:
    return settings.target.served_name or settings.target.model.rstrip("/").rpartition("/")[2]


class Service:
    """Serves completions. Each process that clients connect to has one `Service`. All methods must run on one asyncio
    loop.
    """

    def __init__(self, settings: Settings, model: ServedModel, pipelines: Pipelines) -> None:
        self.settings, self.model, self.pipelines = settings, model, pipelines
        self.meaning = TokenText(model.tokenizer)
        self.max_token_characters = max(map(len, model.tokenizer.get_vocab()))
        self.encoder = Encoder(model.tokenizer)
        self.room = settings.places
        self.in_flight = 0
        self.served = False  # whether any completion has yielded a part
        self.draining = False

    async def check(self) -> None:
        """Raise `UnavailableError` unless a request would be served.

        If no request was served yet and none is in flight, this serves a short one itself, so that no user is the first
        to find a fault.
        """
        if self.draining:
            raise UnavailableError("the server is shutting down")
        await self.pipelines.check()
        if self.served or self.in_flight:
            return
        try:
            async for _ in self.complete(ClientRequest(prompt="a", sampling=GREEDY, max_tokens=2, timeout_s=PROBE_S)):
                pass
        except DeadlineError as error:
            raise UnavailableError(f"no completion comes through: {error}") from None

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests; return whether those in flight finished within `timeout_s` seconds."""
        self.draining = True
        until = asyncio.get_running_loop().time() + timeout_s
        while self.in_flight and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.05)
        return not self.in_flight

    async def complete(self, asked: ClientRequest) -> AsyncGenerator[Part, None]:
        """The parts of a completion as they are decoded; closing the generator stops the request.

        Raises `InvalidValueError` or a subclass, `OverloadedError`, `DeadlineError` or `UnavailableError`. Errors in
        the request itself are raised before the first part.
        """
        if self.draining:
            raise UnavailableError("the server is shutting down")
        if self.in_flight >= self.room:
            raise OverloadedError(f"all {self.room} places are taken; try again later")
        self.in_flight += 1
        try:
            self.check_model(asked.model or self.model.name)
            limit_s = self.settings.server.request_timeout_s
            if asked.timeout_s is not None:
                require(asked.timeout_s > 0, "timeout_s", asked.timeout_s, "must be above 0")
                limit_s = min(limit_s, asked.timeout_s)
            deadline = asyncio.get_running_loop().time() + limit_s
            try:
                async with asyncio.timeout_at(deadline):
                    request = await self.request(asked)
                async with aclosing(self.parts(asked, request, deadline)) as parts:
                    async for part in parts:
                        self.served = True
                        yield part
            except TimeoutError:
                raise DeadlineError(f"the request was not done within {limit_s:g} s") from None
        finally:
            self.in_flight -= 1

    def check_model(self, name: str) -> None:
        if name != self.model.name:
            raise UnknownModelError("model", name, f"is not served here; {self.model.name!r} is")

    async def request(self, asked: ClientRequest) -> Request:
        """The request for the pipeline. Everything that the pipeline would refuse is refused here.

        Raises `InvalidValueError` or a subclass.
        """
        require(
            len(asked.stop) <= MAX_STOP_STRINGS, "stop", len(asked.stop), f"must be at most {MAX_STOP_STRINGS} strings"
        )
        require(all(asked.stop), "stop", "", "must not hold an empty string")
        longest = max(map(len, asked.stop), default=0)
        rule = f"must be at most {MAX_STOP_CHARACTERS} characters in each string"
        require(longest <= MAX_STOP_CHARACTERS, "stop", longest, rule)
        lookaheads = self.settings.speculation.effective if asked.lookaheads is None else asked.lookaheads
        check_lookaheads("lookaheads", lookaheads)
        prompt = await self.encode(asked.prompt) if isinstance(asked.prompt, str) else asked.prompt
        limits = self.model.limits
        request = Request(
            prompt=prompt,
            max_tokens=limits.longest_output(len(prompt)) if asked.max_tokens is None else asked.max_tokens,
            sampling=asked.sampling,
            seed=secrets.randbits(RANDOM_SEED_BITS) if asked.seed is None else asked.seed,
            lookaheads=(lookaheads[0], lookaheads[1]),
            stop_token_ids=self.model.stop_token_ids,
            resume=asked.resume,
        )
        limits.check(request)
        return request

    async def encode(self, text: str) -> tuple[int, ...]:
        """The text's tokens, special ones included. Raises `InvalidValueError` or a subclass."""
        require(text != "", "prompt", text, "must not be empty")
        context = self.model.limits.context_length
        if len(text) > context * self.max_token_characters:
            rule = (
                f"cannot fit the context of {context} tokens, none of which is longer than {self.max_token_characters}"
            )
            raise TooLargeError("prompt", f"{len(text)} characters", rule)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidValueError("prompt", text, "must be text without lone surrogates") from None
        return await self.encoder.encode(text)

    async def parts(self, asked: ClientRequest, request: Request, deadline: float) -> AsyncGenerator[Part, None]:
        """Decode, and turn tokens into text, until the output ends."""
        output = OutputText(self.meaning, stop=asked.stop, end_tokens=request.stop_token_ids, resumed=request.resume)
        prompt_tokens = len(request.prompt)
        if output.stopped:  # the client already has the whole output
            done = Done(FinishReason.STOP, output.num_tokens, Stats())
            yield Part(output.finish(), request.seed, prompt_tokens, done)
            return
        async with aclosing(self.pipelines.decode(request_to_proto(request))) as events:
            while True:
                async with asyncio.timeout_at(deadline):
                    event = await anext(events, None)
                if event is None:
                    raise UnavailableError("the pipeline ended the request before its end")
                piece = output.feed(event.token_ids, event.origins)
                finish_reason = finish_reason_from_proto(event.finish_reason)
                if output.stopped or finish_reason is not None:
                    break
                if piece.text or piece.tokens:
                    yield Part(piece, request.seed, prompt_tokens)
            last = joined([piece, output.finish()])
        reason = FinishReason.STOP if output.stopped or finish_reason is None else finish_reason
        done = Done(reason, output.num_tokens, stats_from_proto(event.stats))
        yield Part(last, request.seed, prompt_tokens, done)


def check_lookaheads(field: str, lookaheads: Sequence[int]) -> None:
    require(len(lookaheads) == 2, field, lookaheads, "must be two numbers: of the retrieval and of the draft tier")
    bounded = all(0 <= n <= MAX_LOOKAHEAD for n in lookaheads)
    require(bounded, field, lookaheads, f"must each be at least 0 and at most {MAX_LOOKAHEAD}")
