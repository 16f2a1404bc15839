"""What the sender asks of a server and gets back, whatever the protocol; and the record of one request."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

from triforce_core.client.results import Usage
from triforce_core.errors import TriForceError


@dataclass(frozen=True, slots=True)
class Question:
    """One request as it is sent."""

    model: str
    prompt: str
    max_tokens: int
    temperature: float
    seed: int
    priority: int | None = None
    lookaheads: tuple[int, int] | None = None  # None: the server chooses


class Piece(NamedTuple):
    """One chunk of an answer. The text may be empty; the usage comes with a last chunk."""

    text: str
    usage: Usage | None = None


class FailedError(TriForceError):
    """A request that got no whole answer. `kind` is what it is counted under, such as `HTTP 500`; a server that is
    full has `refused` it.
    """

    def __init__(self, kind: str, message: str, *, refused: bool = False) -> None:
        super().__init__(" ".join(message.split())[:300])  # one line, even of a page of HTML
        self.kind, self.refused = kind, refused


class Client(Protocol):
    """A client of the server at `address`. Both methods raise `FailedError`."""

    address: str

    async def models(self) -> list[str]:
        """The names of the server's models, the default one first."""
        ...

    def answer(self, question: Question) -> AsyncGenerator[Piece, None]:
        """The chunks of the answer, each as soon as it arrives. Closing the generator ends the request."""
        ...


@dataclass(frozen=True, slots=True)
class Record:
    """What became of one request. Times are seconds since the load's start."""

    due_s: float  # when it should have been sent; all latencies count from here
    sent_s: float
    text_at_s: tuple[float, ...]  # when each chunk with text arrived
    ended_s: float
    usage: Usage | None = None  # as the server states it
    failure: FailedError | None = None

    @property
    def ttft_s(self) -> float:
        """Seconds to the first text, or to the end of an answer that has none."""
        return (self.text_at_s[0] if self.text_at_s else self.ended_s) - self.due_s

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between each two chunks with text."""
        return [later - earlier for earlier, later in pairwise(self.text_at_s)]

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first; None if the server did not state two or more."""
        if self.usage is None or self.usage.completion_tokens < 2 or not self.text_at_s:
            return None
        return (self.text_at_s[-1] - self.text_at_s[0]) / (self.usage.completion_tokens - 1)
