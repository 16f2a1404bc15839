"""The measurements of a simulation, and the figures computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy

from triforce_core.messages import Tier


@dataclass(frozen=True, slots=True)
class Window:
    """The simulated time span in which measurements count."""

    start_s: float
    end_s: float

    def __contains__(self, now_s: float) -> bool:
        return self.start_s <= now_s <= self.end_s

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s

    def overlap_s(self, start_s: float, end_s: float) -> float:
        return max(0.0, min(end_s, self.end_s) - max(start_s, self.start_s))


class PassRecord(NamedTuple):
    """One forward pass on a device."""

    tier: Tier
    start_s: float
    end_s: float  # earlier than planned where the tier failed
    batch: int  # requests


class Finished(NamedTuple):
    """The times of one served request."""

    arrived_s: float
    first_token_s: float
    finished_s: float
    output_tokens: int

    @property
    def latency_s(self) -> float:
        return self.finished_s - self.arrived_s


class Arrival(NamedTuple):
    """One request's arrival, and the number of requests that were waiting to go live then."""

    time_s: float
    waiting: int


@dataclass(slots=True)
class Recorder:
    """Collects the measurements of all replicas; rates and latencies count within `window` only."""

    window: Window
    committed: int = 0  # tokens within the window
    rounds: int = 0  # target rounds of single requests within the window
    block_s: list[float] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)

    def commit(self, now_s: float, tokens: int, since_s: float) -> None:
        """Record that a request's block, asked for at `since_s`, was verified and `tokens` tokens were committed."""
        if now_s in self.window:
            self.committed += tokens
            self.rounds += 1
            self.block_s.append(now_s - since_s)


def percentiles(values: Sequence[float], digits: int = 6) -> dict[str, float] | None:
    """p50, p95 and p99 of the values, rounded to `digits` decimals; None if there are no values."""
    if not values:
        return None
    return {f"p{p}": round(float(numpy.percentile(values, p)), digits) for p in (50, 95, 99)}


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one simulation."""

    recorder: Recorder
    passes: dict[str, list[PassRecord]]  # by device, such as 0/draft+retrieval
    mean_queues: dict[str, float]  # requests waiting, by replica and place
    failures: dict[str, int]  # by tier
    bound_tokens_per_s: float
    with_prefill: bool

    @property
    def measured(self) -> list[Finished]:
        """Requests that arrived within the window; all of them were served in the end."""
        return [each for each in self.recorder.finished if each.arrived_s in self.recorder.window]

    @property
    def tokens_per_s(self) -> float:
        return self.recorder.committed / self.recorder.window.length_s

    @property
    def utilisation(self) -> dict[str, float]:
        window = self.recorder.window
        return {
            device: sum(window.overlap_s(each.start_s, each.end_s) for each in passes) / window.length_s
            for device, passes in self.passes.items()
        }

    @property
    def keeps_up(self) -> bool:
        """Whether the queue has stopped growing: arrivals in the window's last quarter find about as many requests
        waiting as those in its second quarter.

        A difference of at most one request per device is taken for chance.
        """
        window, means = self.recorder.window, []
        for quarter in (1, 3):
            start = window.start_s + quarter * window.length_s / 4
            within = Window(start, start + window.length_s / 4)
            seen = [arrival.waiting for arrival in self.recorder.arrivals if arrival.time_s in within]
            means.append(sum(seen) / len(seen) if seen else 0.0)
        return means[1] <= means[0] + len(self.passes)

    def figures(self) -> dict[str, Any]:
        """The figures, ready for JSON."""
        recorder, requests = self.recorder, self.measured
        result: dict[str, Any] = {
            "tokens_per_s": round(self.tokens_per_s, 3),
            "bound_tokens_per_s": round(self.bound_tokens_per_s, 3),
            "share_of_bound": round(self.tokens_per_s / self.bound_tokens_per_s, 4),
            "tokens_per_s_per_request": percentiles([each.output_tokens / each.latency_s for each in requests], 3),
            "tokens_per_round": round(recorder.committed / recorder.rounds, 4) if recorder.rounds else None,
            "block_latency_ms": percentiles([1e3 * seconds for seconds in recorder.block_s], 3),
            "request_latency_s": percentiles([each.latency_s for each in requests]),
            "ms_per_token": percentiles([1e3 * each.latency_s / each.output_tokens for each in requests], 3),
            "utilisation": {device: round(share, 4) for device, share in self.utilisation.items()},
            "mean_queues": {place: round(mean, 4) for place, mean in self.mean_queues.items()},
            "requests": len(requests),
        }
        if self.with_prefill:
            result["ttft_s"] = percentiles([each.first_token_s - each.arrived_s for each in requests])
        if self.failures:
            result["failures"] = self.failures
        return result
