"""The load: which requests are sent, and when. The same seed gives the same load."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice, repeat

from triforce_core.errors import require
from triforce_tools.load.trace import MOST_TOKENS, TracedRequest


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens, drawn uniformly from `least` to `most`, both included."""

    least: int
    most: int

    @classmethod
    def parse(cls, field: str, text: str) -> Lengths:
        """From a text such as `2048` or `512:8192`. Raises `InvalidValueError` naming `field`."""
        written = re.fullmatch(r"(\d{1,18})(?::(\d{1,18}))?", text, re.ASCII)
        rule = "must be a whole number, such as 2048, or two for a range, such as 512:8192"
        require(written is not None, field, text, rule)
        assert written is not None
        least, most = int(written[1]), int(written[2] or written[1])
        require(least <= most, field, text, "is an empty range: the second number must be at least the first")
        require(least >= 1 and most <= MOST_TOKENS, field, text, f"must be between 1 and {MOST_TOKENS} tokens")
        return cls(least, most)

    def draw(self, chance: random.Random) -> int:
        return chance.randint(self.least, self.most)

    def __str__(self) -> str:
        return f"{self.least}" if self.least == self.most else f"{self.least}:{self.most}"


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of the load."""

    index: int
    arrival_s: float | None  # seconds after the load's start; None: as soon as a user is free
    input_tokens: int
    output_tokens: int  # at most; the model may end its text earlier
    document: int | None = None  # which of the common documents its prompt begins with
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that arrive at `rate` per second (Poisson), or are sent by `concurrency` users who each wait for an
    answer before the next request, or arrive as in `trace`, which states lengths too.

    It ends after `requests` requests, or when `duration_s` seconds have passed, whichever comes first.
    """

    rate: float | None = None
    concurrency: int | None = None
    trace: tuple[TracedRequest, ...] | None = None
    requests: int | None = None
    duration_s: float | None = None
    input: Lengths = Lengths(512, 512)
    output: Lengths = Lengths(128, 128)
    shared: float = 0.0  # share of the requests whose prompt begins with a common document
    documents: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        ways = [name for name in ("rate", "concurrency", "trace") if getattr(self, name) is not None]
        rule = "must be one of --rate, --concurrency and --trace"
        require(len(ways) == 1, "arrivals", " and ".join(ways) or None, rule)
        if self.rate is not None:
            require(0 < self.rate < math.inf, "rate", self.rate, "must be above 0 and finite")
        if self.concurrency is not None:
            require(self.concurrency >= 1, "concurrency", self.concurrency, "must be at least 1")
        if self.requests is not None:
            require(self.requests >= 1, "requests", self.requests, "must be at least 1")
        if self.duration_s is not None:
            require(0 < self.duration_s < math.inf, "duration", self.duration_s, "must be above 0 s and finite")
        ends = self.trace is not None or self.requests is not None or self.duration_s is not None
        require(ends, "requests", None, "was given: a load needs an end, so give --requests or --duration")
        require(0 <= self.shared <= 1, "shared", self.shared, "must be between 0 and 1")
        require(self.documents >= 1, "documents", self.documents, "must be at least 1")
        rule = "must be between -2^63 and 2^62: the seeds of requests count on from it, and must fit 64 bits"
        require(-(2**63) <= self.seed <= 2**62, "seed", self.seed, rule)

    def planned(self) -> Iterator[PlannedRequest]:
        """The requests in the order of their arrival. With users and without `requests` they have no end: the sender
        stops when `duration_s` have passed.
        """
        expected = self._drawn() if self.trace is None else self._traced()
        for request in islice(expected, self.requests):
            if self.duration_s is not None and request.arrival_s is not None and request.arrival_s >= self.duration_s:
                return
            yield request

    def _drawn(self) -> Iterator[PlannedRequest]:
        for index, arrival_s in zip(count(), repeat(None) if self.rate is None else self._arrivals(), strict=False):
            chance = self._chance("lengths", index)
            input_tokens, output_tokens = self.input.draw(chance), self.output.draw(chance)
            yield PlannedRequest(index, arrival_s, input_tokens, output_tokens, self._document(index))

    def _traced(self) -> Iterator[PlannedRequest]:
        for index, each in enumerate(self.trace or ()):
            yield PlannedRequest(
                index, each.arrival_s, each.input_tokens, each.output_tokens, self._document(index), each.priority
            )

    def _arrivals(self) -> Iterator[float]:
        assert self.rate is not None
        chance, now_s = self._chance("arrivals"), 0.0
        while True:
            now_s += chance.expovariate(self.rate)
            yield now_s

    def _document(self, index: int) -> int | None:
        chance = self._chance("document", index)
        return chance.randrange(self.documents) if chance.random() < self.shared else None

    def _chance(self, *of: object) -> random.Random:
        """A separate random generator for each thing that is drawn, so that another rate changes no length."""
        return random.Random(f"{self.seed} {of}")
