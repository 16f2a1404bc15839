"""Metrics for Prometheus: counts the gateway's own as requests pass, and asks for those of the tiers at a scrape.

docs/metrics.md is for operators; docs/decisions/0021-metrics.md says why the metrics are here and not Ray's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from deploy.calls import Call, current
from deploy.errors import entry_for
from deploy.openai_api.errors import ANSWERS
from deploy.parts import Part, Pipelines
from deploy.tier_metrics import Statuses, TierFamilies
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.errors import UnavailableError

FRESH_S = 1.0  # the tiers are asked no more often, however often metrics are scraped
# Bounds of histograms in seconds: from the time of a small model's token to that of a prompt that takes minutes.
LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600)
GAPS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class Meters:
    """What the gateway counts, in a registry of its own, so that several services in one process do not share it."""

    def __init__(self, model: str, in_flight: Callable[[], float], places: Callable[[], float]) -> None:
        """`model`: its name. `in_flight`, `places`: read at each scrape."""
        self.registry = CollectorRegistry()
        self.model = model
        self.requests = self._counter(
            "requests",
            "Completions that ended, by finish reason; requests that failed, once each, by the code in the error's"
            " body, or `cancelled` where the client went away. Requests that are refused before the service gets them"
            " (form, API key, size) count as calls only.",
            "status",
        )
        self.calls = self._counter(
            "calls",
            "Calls of all HTTP routes and gRPC methods that ended, by API and by status, `cancelled` where the client"
            " went away before there was one. Health probes that succeed do not count.",
            "api",
            "status",
        )
        self.prompt_tokens = self._counter(
            "prompt_tokens", "Tokens of prompts, each prompt once; those whose KV was found count too."
        )
        self.generation_tokens = self._counter("generation_tokens", "Output tokens handed to clients.")
        self._gauge(
            "requests_in_flight", "Completions at the gateway, streams included, and calls that tokenize or detokenize."
        ).set_function(in_flight)
        self._gauge(
            "places", "The most completions and calls that tokenize or detokenize at once; beyond them clients get 429."
        ).set_function(places)
        self.first_token_s = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival at the gateway to its first tokens."
        )
        self.gap_s = self._histogram(
            "inter_token_latency_seconds",
            "Between two pieces of a completion's output. A piece has the tokens of one round, often several; of more "
            "than one round where text was held back because it might have become a stop string.",
            GAPS,
        )
        self.token_s = self._histogram(
            "request_time_per_output_token_seconds",
            "Of a completion: the time from the first piece to the last, per token of those after the first.",
            GAPS,
        )
        self.request_s = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival at the gateway to the end of a completion."
        )
        self.queue_s = self._histogram(
            "request_queue_time_seconds", "Of a completion: how long it waited for room, in the target that ended it."
        )
        self.prefill_s = self._histogram(
            "request_prefill_time_seconds",
            "Of a completion: the time for the prompt, up to the first token, of the target that ended it.",
        )

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        counter = Counter(f"triforce_{name}", about, ["model_name", *labels], registry=self.registry)
        return counter if labels else counter.labels(self.model)

    def _gauge(self, name: str, about: str) -> Gauge:
        return Gauge(f"triforce_{name}", about, ["model_name"], registry=self.registry).labels(self.model)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...] = LATENCIES) -> Histogram:
        of_all = Histogram(f"triforce_{name}", about, ["model_name"], registry=self.registry, buckets=buckets)
        return of_all.labels(self.model)

    def ended(self, call: Call) -> None:
        """Count a client's call."""
        self.calls.labels(self.model, call.api, str(call.status or "cancelled")).inc()

    @contextmanager
    def watching(self, prompts: int, n: int) -> Iterator[Watch]:
        """Counts a request while the block runs, which tells the watch each part of its completions, `n` a prompt."""
        watch = Watch(self, prompts, n)
        status = "cancelled"  # unless it ends otherwise: closing a generator raises no `Exception`
        try:
            yield watch
        except Exception as error:
            status = answer.code if (answer := entry_for(ANSWERS, error)) else "internal_error"
            raise
        finally:
            if watch.running:
                self.requests.labels(self.model, status).inc()
                if watch.call.trace is not None:
                    watch.call.trace.error = status


class Times(NamedTuple):
    """The times of one completion, in seconds of `time.monotonic`."""

    first: float
    latest: float
    tokens: int  # after those of the first piece


class Watch:
    """Observes one request, for the metrics and for the log of its call."""

    def __init__(self, meters: Meters, prompts: int, n: int) -> None:
        self.meters, self.n, self.running = meters, max(1, n), max(1, prompts * n)
        self.call = current()
        self.times: dict[int, Times] = {}  # by completion
        self.read = set[int]()  # prompts, by index

    def saw(self, part: Part) -> None:
        self.call.saw(part)
        meters, now, tokens = self.meters, time.monotonic(), len(part.piece.tokens)
        before = self.times.get(part.index)
        prompt = part.index // self.n
        if prompt not in self.read:
            self.read.add(prompt)
            meters.prompt_tokens.inc(part.prompt_tokens)
        if tokens:
            if before is None:
                meters.first_token_s.observe(now - self.call.began)
                self.times[part.index] = Times(now, now, 0)
            else:
                meters.gap_s.observe(now - before.latest)
                self.times[part.index] = Times(before.first, now, before.tokens + tokens)
            meters.generation_tokens.inc(tokens)
        if part.done is None:
            return
        self.running -= 1
        meters.requests.labels(meters.model, part.done.finish_reason).inc()
        meters.request_s.observe(now - self.call.began)
        if times := self.times.get(part.index):
            meters.queue_s.observe(part.done.stats.queued_s)
            meters.prefill_s.observe(part.done.stats.prefill_s)
            if times.tokens:
                meters.token_s.observe((times.latest - times.first) / times.tokens)


class Scrape:
    """What a scrape returns."""

    def __init__(self, meters: Meters, pipelines: Pipelines) -> None:
        self.meters, self.pipelines = meters, pipelines
        self.lock = asyncio.Lock()
        self.asked_at, self.statuses = float("-inf"), dict[str, list[pb.TierStatus]]()

    async def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        statuses = await self._statuses()
        return generate_latest(Families(self.meters.registry, TierFamilies(self.meters.model, statuses)))

    async def _statuses(self) -> Statuses:
        """The tiers' status, at most `FRESH_S` seconds old; scrapes at the same time share one question."""
        async with self.lock:
            if time.monotonic() - self.asked_at > FRESH_S:
                try:
                    self.statuses = await self.pipelines.status()
                except UnavailableError:
                    self.statuses = {}
                self.asked_at = time.monotonic()
            return self.statuses


class Families(Collector):
    """The metrics of several collectors, without the times of creation that prometheus_client adds to each series."""

    def __init__(self, *collectors: CollectorRegistry | TierFamilies) -> None:
        self.collectors = collectors

    def collect(self) -> Iterable[Metric]:
        for collector in self.collectors:
            for family in collector.collect():
                family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
                yield family
