"""When a failed call is tried again, and how a stream goes on in another call without repeating or losing anything."""

import time
from dataclasses import dataclass

from triforce_core._gen.triforce.v1 import generation_pb2 as pb
from triforce_core.client.errors import CallError, OverloadedError, UnavailableError
from triforce_core.client.results import Chunk, chunk_from_proto
from triforce_core.resuming import PROVEN_TOKENS, delay_s

RETRIED = (UnavailableError, OverloadedError)
MAX_DELAY_S = 5.0


class Attempts:
    """The attempts of one call: one, and up to `retries` more in a row, all within `timeout_s` seconds from now."""

    def __init__(self, timeout_s: float | None, retries: int) -> None:
        self.until = None if timeout_s is None else time.monotonic() + timeout_s
        self.retries = retries
        self.failed = 0

    @property
    def left_s(self) -> float | None:
        """Seconds that are left for the next attempt; None: no limit."""
        return None if self.until is None else max(self.until - time.monotonic(), 0.001)

    def got_on(self) -> None:
        """The call has made progress, so later failures are counted from 0."""
        self.failed = 0

    def delay_s(self, error: CallError) -> float | None:
        """Seconds to wait before the next attempt; None if this error is final."""
        if not isinstance(error, RETRIED) or self.failed == self.retries:
            return None
        self.failed += 1
        seconds = delay_s(self.failed, MAX_DELAY_S)
        return seconds if self.left_s is None or seconds < self.left_s else None


@dataclass(slots=True)
class Amount:
    """How much of one completion: of its text, its tokens, and the logprobs of its prompt."""

    characters: int = 0
    tokens: int = 0
    scores: int = 0

    def add(self, message: pb.GenerateChunk) -> None:
        self.characters += len(message.text)
        self.tokens += len(message.token_ids)
        self.scores += len(message.prompt_logprobs)

    def take_from(self, message: pb.GenerateChunk) -> None:
        """Remove from the message's beginning up to this amount, and reduce this by what was removed."""
        characters = min(self.characters, len(message.text))
        tokens = min(self.tokens, len(message.token_ids))
        scores = min(self.scores, len(message.prompt_logprobs))
        message.text, message.origins = message.text[characters:], message.origins[tokens:]
        for values in (message.token_ids, message.logprobs, message.text_lengths):
            del values[:tokens]
        del message.prompt_logprobs[:scores]
        self.characters, self.tokens = self.characters - characters, self.tokens - tokens
        self.scores -= scores


class Progress:
    """A stream's chunks so far, from which it can go on in another call.

    The output is a function of prompt, parameters and seed. So the next call of a single completion continues after the
    tokens received. With several completions, or before the first token, the next call asks for everything again, and
    what the user already has is left out.
    """

    def __init__(self, request: pb.GenerateRequest, attempts: Attempts) -> None:
        """`request` has a seed."""
        self.request, self.attempts = request, attempts
        self.fingerprint = ""
        self.received: dict[int, Amount] = {}  # by completion, what the user has
        self.known: dict[int, Amount] = {}  # of that, what the present call still repeats
        self.tokens: list[int] = []  # of all completions, since `request` was last changed
        self.num_new = 0  # tokens that the present call brought
        self.finished: set[int] = set()  # completions of which the user has the last chunk

    @property
    def ended(self) -> bool:
        """Whether the user has the last chunk of every completion."""
        return len(self.finished) >= max(self.request.n, 1)

    def take(self, message: pb.GenerateChunk) -> Chunk | None:
        """The chunk for the user; None if nothing is new in it, as in Ray Serve's empty message before an error."""
        if not message.ByteSize() or message.index in self.finished:
            return None
        self.fingerprint = self.fingerprint or message.fingerprint
        if known := self.known.get(message.index):
            known.take_from(message)
        new = message.text or message.token_ids or message.prompt_logprobs or message.HasField("usage")
        if not new and message.index in self.received:
            return None
        if message.index in self.received:  # the user has these from the first chunk
            message.ClearField("seed")
            message.ClearField("fingerprint")
        self.received.setdefault(message.index, Amount()).add(message)
        self.tokens += message.token_ids
        self.num_new += len(message.token_ids)
        if self.num_new >= PROVEN_TOKENS:
            self.attempts.got_on()
        if message.HasField("usage"):
            self.finished.add(message.index)
        return chunk_from_proto(message)

    def delay_s(self, error: CallError) -> float | None:
        """Seconds to wait before the next call; None if the error is final."""
        return self.attempts.delay_s(error)

    def prepare(self) -> None:
        """Make `request` ask for what is missing."""
        left_s = self.attempts.left_s
        if left_s is not None:
            self.request.timeout_s = left_s
        self.num_new = 0
        if not self.received:
            return
        self.request.fingerprint = self.fingerprint
        if self.request.n <= 1 and any(each.tokens for each in self.received.values()):
            self.request.resume_token_ids.extend(self.tokens)
            self.request.ClearField("prompt_logprobs")  # they came at the latest with the first token
            self.tokens, self.known = [], {}
        else:
            self.known = {
                index: Amount(each.characters, each.tokens, each.scores) for index, each in self.received.items()
            }
