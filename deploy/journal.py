"""A completion that outlives the engines that decode it. Its tokens so far are kept, and another engine continues them.

The output is a function of the request, its seed and the target. So a request with the tokens received so far as
`resume` gets, from any replica with the same fingerprint, exactly the tokens that would have followed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

from actors.wire import finish_reason_from_proto, is_notice, request_to_proto
from deploy import calls
from deploy.errors import EngineCrashError, EngineLostError
from deploy.parts import Pipelines
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.engine.sequence import Request
from triforce_core.errors import FingerprintError, TriForceError, UnavailableError
from triforce_core.resuming import PROVEN_TOKENS, delay_s

log = logging.getLogger("ray.serve")

MAX_DEATHS = 3  # after this number of deaths of engines during one request, the request counts as their cause
MAX_DELAY_S = 2.0
# The other suspects wait this long, counted from when the suspect that has the turn reached a target.
TURN_S = 30.0
CLAIM_S = 10.0  # most seconds to look for a replica with the fingerprint that the client claims


class Turns:
    """Lets one suspect at a time be decoded, so that no other is blamed if it kills the engine. One per gateway."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.reached_at: float | None = None  # when the one whose turn it is reached a target

    async def take(self) -> bool:
        """Wait for the turn. False if another request has had the turn for `TURN_S` seconds since it reached a target:
        that request is slow, and does not kill engines. While no target serves, all wait.
        """
        now = asyncio.get_running_loop().time
        while True:
            left_s = TURN_S if self.reached_at is None else self.reached_at + TURN_S - now()
            if left_s <= 0:
                return False
            try:
                async with asyncio.timeout(left_s):
                    return await self.lock.acquire()
            except TimeoutError:
                continue

    def reached(self) -> None:
        """The one whose turn it is has reached a target."""
        if self.reached_at is None:
            self.reached_at = asyncio.get_running_loop().time()

    def give_back(self) -> None:
        self.reached_at = None
        self.lock.release()


class Attempt:
    """One request to the pipelines: how far it came, and what it brought."""

    def __init__(self, *, alone: bool) -> None:
        self.alone = alone  # whether it has the suspects' turn
        self.reached = False  # whether it reached the target
        self.entered = False  # whether it entered one of the target's passes
        self.num_tokens = 0
        self.num_scores = 0  # prompt tokens whose logprobs came

    def saw(self, event: pb.DecodeEvent) -> None:
        self.reached = True
        self.entered |= event.entered or not is_notice(event)
        self.num_tokens += len(event.token_ids)


class Journal:
    """One completion over all attempts to decode it. `events` can be read once."""

    def __init__(
        self,
        source: Pipelines,
        turns: Turns,
        request: Request,
        deadline: float,
        claim: str = "",
        *,
        stats_in_each: bool = False,
    ) -> None:
        """`deadline`: in the running loop's seconds. `claim`: the fingerprint that the client claims; empty: any.
        `stats_in_each`: whether all events with output have stats; the last one always has.
        """
        self.source, self.turns, self.request, self.deadline = source, turns, request, deadline
        self.claim, self.stats_in_each = claim, stats_in_each
        self.fingerprint = ""  # of the target that was reached last,
        self.reached_at = time.monotonic()  # and when it was
        self.began = asyncio.get_running_loop().time()
        self.received: list[int] = []
        self.num_scores = 0  # prompt tokens whose logprobs the reader has
        self.cached_tokens: int | None = None  # those that the first attempt found that came so far
        # Deaths of engines that count against this request, since an attempt last brought `PROVEN_TOKENS` tokens.
        self.deaths = 0
        self.unseen_deaths = 0  # deaths in a row of targets that had the request and sent no `entered`
        self.failures = 0  # since the last event
        self.again = False  # whether there was an attempt before the present one
        self.turn = False  # whether this request has the suspects' turn
        self.blocked: TriForceError | None = None  # what keeps the request from going on

    async def events(self) -> AsyncGenerator[pb.DecodeEvent, None]:
        """The events of the whole output; stats are those of the attempt that they come from.

        Raises `EngineCrashError`, `EngineLostError`, `FingerprintError`, and the errors of the pipelines.
        """
        try:
            while True:
                async with self.in_time():
                    await self.wait()
                attempt = Attempt(alone=self.turn)
                try:
                    async with aclosing(self.source.decode(self.message())) as events:
                        while True:
                            event = await self.next(events, attempt)
                            if is_notice(event):
                                continue
                            yield self.taken(attempt, event)
                            if event.no_token or finish_reason_from_proto(event.finish_reason) is not None:
                                return
                except (UnavailableError, FingerprintError) as error:
                    if error is self.blocked:  # raised at the deadline: the last failure, not a new one
                        raise
                    if isinstance(error, FingerprintError):
                        self.refused(error)
                    else:
                        self.died(attempt, error)
                finally:
                    self.give_back()
        finally:
            self.give_back()

    async def next(self, events: AsyncGenerator[pb.DecodeEvent, None], attempt: Attempt) -> pb.DecodeEvent:
        """The next event of an attempt. Raises `UnavailableError` if the attempt breaks off."""
        async with self.in_time():
            event = await anext(events, None)
        if event is None:
            raise UnavailableError("the pipeline ended the request before its end")
        attempt.saw(event)
        if self.turn:
            self.turns.reached()
        if event.fingerprint:  # the first event of an attempt
            self.fingerprint, self.reached_at = event.fingerprint, time.monotonic()
        if event.entered and self.cached_tokens is None:
            self.cached_tokens = event.cached_tokens
        self.blocked, self.failures = None, 0
        return event

    def message(self) -> pb.DecodeRequest:
        """The request for what is missing."""
        left_s = self.deadline - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise self.blocked or TimeoutError
        request = replace(self.request, resume=(*self.request.resume, *self.received), timeout_s=left_s)
        if self.received:  # the prompt's logprobs came at the latest with the first token
            request = replace(request, prompt_logprobs=None)
        message = request_to_proto(request)
        message.stats_in_each = self.stats_in_each
        message.fingerprint = self.claim or (self.fingerprint if self.received or self.num_scores else "")
        return message

    def taken(self, attempt: Attempt, event: pb.DecodeEvent) -> pb.DecodeEvent:
        """Note the event, and return it as the reader gets it."""
        self.received += event.token_ids
        if attempt.num_tokens >= PROVEN_TOKENS:
            self.deaths = self.unseen_deaths = 0
            self.give_back()
        if not self.again:
            attempt.num_scores = self.num_scores = self.num_scores + len(event.prompt_logprobs)
            return event
        new = event.prompt_logprobs[max(0, self.num_scores - attempt.num_scores) :]
        attempt.num_scores += len(event.prompt_logprobs)
        self.num_scores = max(self.num_scores, attempt.num_scores)
        told = pb.DecodeEvent()
        told.CopyFrom(event)
        del told.prompt_logprobs[:]
        told.prompt_logprobs.extend(new)
        return told

    # -- failures ------------------------------------------------------------------------------------------------------

    def died(self, attempt: Attempt, error: UnavailableError) -> None:
        """Count a failed attempt. The death of an engine counts against the request only if the engine worked on it: if
        the target alone has died, its replica knows, and `error.suspect` says it. If the whole replica has died, the
        death counts if the engine had reported a pass over the request (`attempt.entered`), or if it had the request
        and the request had the suspects' turn. If it had the request and reported no pass, `unseen_deaths` counts the
        death; two in a row make the request a suspect.
        """
        self.again = True
        self.failures += 1
        if (trace := calls.current().trace) is not None:
            trace.lose(error, len(self.received))
        self.blocked = EngineLostError(
            f"the engine of this request is gone, and none took over in time ({error}); ask again, and if that fails"
            " too, see which replicas /status shows as ready, and their logs"
        )
        if error.suspect is not None:
            self.unseen_deaths = 0
            self.deaths += error.suspect
        else:
            self.unseen_deaths = self.unseen_deaths + 1 if attempt.reached and not attempt.entered else 0
            self.deaths += attempt.entered or (attempt.reached and attempt.alone)
        log.warning(
            "a request lost its engine after %d tokens, %d of them from it: %s",
            len(self.received),
            attempt.num_tokens,
            error,
        )
        if self.deaths >= MAX_DEATHS:
            raise EngineCrashError(
                f"the engine died {self.deaths} times while it decoded this request, with fewer than {PROVEN_TOKENS}"
                " tokens between; do not send it again: the operator finds in the target's log what fails"
            )

    def refused(self, error: FingerprintError) -> None:
        """A replica would continue the output differently. Others are asked until the deadline, new ones too."""
        self.again = True
        self.failures += 1
        self.blocked = FingerprintError(
            f"no replica continues this output, because the model or its settings have changed ({error}); ask anew"
        )
        if not self.fingerprint:  # no target with the fingerprint that the client claims was reached
            self.deadline = min(self.deadline, self.began + CLAIM_S)

    async def wait(self) -> None:
        """Wait until the next attempt may begin.

        After one death of an engine all its requests go on together, because usually no request is to blame. After a
        second death, requests take turns.
        """
        if self.failures:
            await asyncio.sleep(delay_s(self.failures, MAX_DELAY_S))
        if self.deaths > 1 or self.unseen_deaths > 1:
            self.turn = await self.turns.take()

    def give_back(self) -> None:
        if self.turn:
            self.turn = False
            self.turns.give_back()

    @asynccontextmanager
    async def in_time(self) -> AsyncGenerator[None, None]:
        """Like `asyncio.timeout_at` the deadline. If `blocked` is set, it is raised in place of `TimeoutError`."""
        try:
            async with asyncio.timeout_at(self.deadline):
                yield
        except TimeoutError:
            if self.blocked is not None:
                raise self.blocked from None
            raise
