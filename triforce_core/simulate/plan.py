"""A search for the fewest devices that serve a load within a latency: the fewest replicas of each placement."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from triforce_core.errors import require
from triforce_core.simulate.bound import replica_bound
from triforce_core.simulate.measures import Result
from triforce_core.simulate.model import simulate
from triforce_core.simulate.scenario import PLACEMENTS, Scenario, device_name


@dataclass(frozen=True, slots=True)
class Goal:
    """Upper limits on the latency, from arrival to last token, of 95% of the requests; None is no limit."""

    p95_ms_per_token: float | None = None  # request latency over output tokens
    p95_request_s: float | None = None

    def __post_init__(self) -> None:
        for field, value in ("p95-ms-per-token", self.p95_ms_per_token), ("p95-request-s", self.p95_request_s):
            require(value is None or value > 0, field, value, "must be above 0")
        require(
            (self.p95_ms_per_token, self.p95_request_s) != (None, None),
            "plan",
            True,
            "needs a limit: --p95-ms-per-token or --p95-request-s",
        )


@dataclass(frozen=True, slots=True)
class Option:
    """One scenario that was tried, and whether it serves the load within the goal."""

    scenario: Scenario
    result: Result
    serves: bool

    @property
    def gpus(self) -> int:
        return len(self.scenario.devices) * self.scenario.replicas

    def figures(self) -> dict[str, Any]:
        measured = self.result.figures()
        return {
            "colocate": self.scenario.colocate,
            "replicas": self.scenario.replicas,
            "gpus": self.gpus,
            "gpus_by_tier": {device_name(tiers): self.scenario.replicas for tiers in self.scenario.devices},
            "serves": self.serves,
            "keeps_up": self.result.keeps_up,
        } | {name: measured[name] for name in ("ms_per_token", "request_latency_s", "tokens_per_s", "share_of_bound")}


@dataclass(frozen=True, slots=True)
class Plan:
    """All options tried, in order; `best` is None if none of them serves."""

    goal: Goal
    tried: list[Option]

    @property
    def best(self) -> Option | None:
        """The option that serves with the fewest devices, and among equals with the fewest milliseconds per token."""
        serving = [option for option in self.tried if option.serves]
        return min(serving, key=lambda option: (option.gpus, _p95_ms(option.result)), default=None)

    def figures(self) -> dict[str, Any]:
        load = self.tried[0].scenario.load
        return {
            "load": load.model_dump(mode="json", exclude_none=True),
            "goal": {
                "p95_ms_per_token": self.goal.p95_ms_per_token,
                "p95_request_s": self.goal.p95_request_s,
            },
            "serves": self.best is not None,
            "best": self.best.figures() if self.best else None,
            "tried": [option.figures() for option in self.tried],
        }


def _p95_ms(result: Result) -> float:
    """95th percentile of the milliseconds per output token, with queueing and prefill included."""
    latencies = result.figures()["ms_per_token"]
    return float(latencies["p95"]) if latencies else 0.0


def serves(result: Result, goal: Goal) -> bool:
    """Whether the queue does not grow and the latencies are within the goal."""
    figures = result.figures()
    if not figures["requests"]:
        return False  # nothing was measured
    per_token = goal.p95_ms_per_token is None or figures["ms_per_token"]["p95"] <= goal.p95_ms_per_token
    request = goal.p95_request_s is None or figures["request_latency_s"]["p95"] <= goal.p95_request_s
    return result.keeps_up and per_token and request


def plan(scenario: Scenario, goal: Goal, max_gpus: int) -> Plan:
    """Try each placement with as few replicas as possible; `scenario.replicas` and `scenario.colocate` are ignored.

    Raises `InvalidValueError` if the load is not a rate, or if `max_gpus` allows no option.
    """
    rate = scenario.load.rate_per_s
    require(rate is not None, "load", "concurrency", "must be a rate for --plan: --rate, or load.rate_per_s")
    assert rate is not None
    output = scenario.load.output_tokens
    offered = rate * sum(output) / len(output)  # tokens per second
    tried: list[Option] = []
    seen = set()
    for colocate in PLACEMENTS:
        placed = scenario.model_copy(update={"colocate": colocate, "replicas": 1})
        if placed.devices in seen or (scenario.run_ahead and len(placed.devices) == 1):
            continue
        seen.add(placed.devices)
        known = Plan(goal, tried).best
        limit = (known.gpus if known else max_gpus) // len(placed.devices)
        # With fewer replicas the load exceeds the bound.
        fewest = ceil(offered / replica_bound(placed, placed.max_sequences))
        tried += _search(placed, goal, fewest, limit)
    require(bool(tried), "max-gpus", max_gpus, f"is below what any placement needs for {offered:g} tokens a second")
    return Plan(goal, tried)


def _search(scenario: Scenario, goal: Goal, fewest: int, most: int) -> list[Option]:
    """The options tried to find the smallest number of replicas from `fewest` to `most` that serves: steps of growing
    size up to a number that serves, then bisection.
    """
    tried: list[Option] = []

    def try_replicas(replicas: int) -> bool:
        placed = scenario.model_copy(update={"replicas": replicas})
        result = simulate(placed)
        tried.append(Option(placed, result, serves(result, goal)))
        return tried[-1].serves

    if fewest > most:
        return tried
    failing, replicas, step = fewest - 1, fewest, 1
    while not try_replicas(replicas):
        if replicas == most:
            return tried
        failing, replicas, step = replicas, min(replicas + step, most), 2 * step
    serving = replicas
    while serving - failing > 1:
        middle = (serving + failing) // 2
        if try_replicas(middle):
            serving = middle
        else:
            failing = middle
    return tried
