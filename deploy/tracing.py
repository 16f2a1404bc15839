"""OpenTelemetry traces: one span for each call, with children for the phases of its completions.

All spans of a call are made when it has ended, from the figures that its last event brings anyway. So nothing is done
for a token, and without the variables `OTEL_*` that ask for traces, OpenTelemetry is not imported. Spans hold figures
and names, but neither prompts nor outputs, nor the messages of errors, which may quote them.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, NamedTuple

from triforce_core import __version__
from triforce_core.errors import require

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

    from deploy.calls import Call
    from deploy.parts import Done, Part
    from triforce_core.engine.sequence import Stats
    from triforce_core.messages import Tally

EXPORTER = "OTEL_TRACES_EXPORTER"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
OTLP = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}  # exporters by protocol
PACKAGES = {
    "otlp_proto_http": "'triforce-serve[tracing]'",
    "otlp_proto_grpc": "opentelemetry-exporter-otlp-proto-grpc",
}
# By the route or method: what the call asks of the model, in OpenTelemetry's words.
OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "Generate": "text_completion",
    "GenerateStream": "text_completion",
}
CLIENT_ERROR, SERVER_ERROR = 400, 500  # HTTP statuses from here on
# Of gRPC: those that OpenTelemetry takes for errors of a server, and ABORTED, which here says that an engine died.
SERVER_CODES = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "ABORTED"}
Attributes = dict[str, Any]


class Completed(NamedTuple):
    """A completion of a call."""

    number: int  # among those of the call
    prompt_tokens: int
    cached_tokens: int
    done: Done


class Lost(NamedTuple):
    """An engine that a completion lost."""

    at: float  # in seconds of `time.monotonic`
    tokens: int  # of the output so far
    error: str  # its class


@dataclass(slots=True)
class Trace:
    """What is noted of one call for its spans."""

    carrier: dict[str, list[str]]  # headers or metadata, which may name the client's span
    route: str = ""  # the path of the HTTP route, with names in place of values; "" where there is none
    error: str = ""  # the code of what ended the completions, or `cancelled`; "" if they ended well
    completed: list[Completed] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)

    @classmethod
    def of(cls, headers: Iterable[tuple[str, Any]]) -> Trace:
        carrier: dict[str, list[str]] = {}
        for name, value in headers:
            carrier.setdefault(name, []).append(value)
        return cls(carrier)

    def saw(self, part: Part, done: Done) -> None:
        """The last part of a completion goes out."""
        self.completed.append(Completed(part.index, part.prompt_tokens, part.cached_tokens, done))

    def lose(self, error: Exception, tokens: int) -> None:
        self.lost.append(Lost(time.monotonic(), tokens, type(error).__name__))


def exporters(variables: Mapping[str, str]) -> list[str]:
    """The exporters that these environment variables ask for; none where they ask for no traces.

    Raises `InvalidValueError` for a protocol without an exporter.
    """

    def first(*names: str) -> str:
        return next((value for name in names if (value := variables.get(name, "").strip())), "")

    if first("OTEL_SDK_DISABLED").lower() == "true" or not first(EXPORTER, *ENDPOINTS):
        return []
    names = [name.strip() for name in (first(EXPORTER) or "otlp").split(",")]
    protocol = first(*PROTOCOLS) or "http/protobuf"
    rule = f"is not supported: must be {' or '.join(OTLP)}"
    require("otlp" not in names or protocol in OTLP, PROTOCOLS[1], protocol, rule)
    return [OTLP[protocol] if name == "otlp" else name for name in names if name not in ("", "none")]


def exporter(name: str) -> Any:
    """The class of an exporter. Raises `InvalidValueError` if it is not installed."""
    installed = {each.name: each for each in entry_points(group="opentelemetry_traces_exporter")}
    package = f"needs a package: pip install {PACKAGES.get(name)}"
    require(name in installed, EXPORTER, name, package if name in PACKAGES else f"must be among {sorted(installed)}")
    return installed[name].load()


def tracing(model: str, variables: Mapping[str, str] = os.environ) -> Tracing | None:
    """The traces that the environment asks for, if any. Raises `InvalidValueError` if an exporter is not installed."""
    made = [exporter(name)() for name in exporters(variables)]
    return Tracing(model, made) if made else None


class Tracing:
    """Makes the spans of calls and sends them, in batches, from a thread of its own. Each gateway has one."""

    def __init__(self, model: str, targets: Iterable[SpanExporter]) -> None:
        """`model`: its name. What is not given here, such as the sampler, the SDK reads from the environment."""
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        ours = {"service.name": "triforce", "service.version": __version__, "service.instance.id": str(uuid.uuid4())}
        # Not the global provider: that belongs to whoever runs the process, which is Ray.
        self.provider = TracerProvider(resource=Resource.create(ours).merge(OTELResourceDetector().detect()))
        for target in targets:
            self.provider.add_span_processor(BatchSpanProcessor(target))
        self.model, self.tracer = model, self.provider.get_tracer("triforce", __version__)

    def ended(self, call: Call, trace: Trace) -> None:
        """Make the spans of a call that has just ended."""
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        clock = Clock()
        name, attributes = named(call, trace)
        attributes |= {"triforce.request_id": call.id, "triforce.api_key": call.key or None}
        if operation := OPERATIONS.get(trace.route or call.route):
            attributes |= asked(call, trace, operation, self.model)
        root = self.tracer.start_span(
            name, extract(trace.carrier), SpanKind.SERVER, given(attributes), start_time=clock.ns(call.began)
        )
        if root.is_recording():
            if error := error_type(call, trace):
                root.set_attribute("error.type", error)
                if serious(call, error):
                    root.set_status(Status(StatusCode.ERROR))
            for each in trace.lost:
                told: Attributes = {"error.type": each.error, "triforce.tokens": each.tokens}
                root.add_event("engine lost", told, clock.ns(each.at))
            for completed in trace.completed:
                several = {"triforce.completion": completed.number} if len(trace.completed) > 1 else {}
                Phases(self.tracer, set_span_in_context(root), clock, several).make(completed)
        root.end(clock.now_ns)

    def flush(self) -> None:
        """Send what is not sent yet. It may take as long as the exporter's timeout."""
        self.provider.force_flush()

    def close(self) -> None:
        self.provider.shutdown()


class Clock:
    """The wall clock's time for times of `time.monotonic`, up to the present."""

    def __init__(self) -> None:
        self.now_ns, self.now = time.time_ns(), time.monotonic()

    def ns(self, at: float) -> int:
        return self.now_ns - max(0, round(1e9 * (self.now - at)))


class Phases:
    """The spans of one completion: `queue`, `prefill` and `rounds`, one after the other from when the target had the
    request; within `rounds` one for each tier below. The length of these is the sum of their passes in which the
    request took part; where within the rounds the passes were is not known.
    """

    def __init__(self, tracer: Tracer, parent: Context, clock: Clock, common: Attributes) -> None:
        self.tracer, self.parent, self.clock, self.common = tracer, parent, clock, common

    def make(self, completed: Completed) -> None:
        from opentelemetry.trace import set_span_in_context

        stats, at = completed.done.stats, completed.done.reached_at
        if at is None or not stats.prefill_s:  # the client had the whole output before: no engine was asked
            return
        target, retrieval, draft = stats.tallies
        read = {"triforce.prompt_tokens": completed.prompt_tokens, "triforce.cached_tokens": completed.cached_tokens}
        self.span("queue", at, stats.queued_s, {"triforce.preempted": stats.preempted})
        self.span("prefill", at + stats.queued_s, stats.prefill_s, read)
        began = at + stats.queued_s + stats.prefill_s
        if not target.rounds:
            return
        rounds = self.span("rounds", began, stats.decode_s, figures(target, target.passes, target.busy_s) | of(stats))
        below = Phases(self.tracer, set_span_in_context(rounds), self.clock, self.common)
        # As in `Stats.acceptance`: a tier's tokens are judged by the tier above that asked for them.
        for tier, own, judged in (
            ("retrieval", retrieval, target - stats.direct),
            ("draft", draft, retrieval + stats.direct),
        ):
            if own.passes or judged.proposed:
                seconds = min(own.busy_s, stats.decode_s)
                below.span(tier, began, seconds, figures(judged, own.passes, own.busy_s))

    def span(self, name: str, began: float, seconds: float, attributes: Attributes) -> Span:
        start = self.clock.ns(began)
        made = self.tracer.start_span(name, self.parent, attributes=given(attributes | self.common), start_time=start)
        made.end(max(start, self.clock.ns(began + seconds)))
        return made


def figures(judged: Tally, passes: int, busy_s: float) -> Attributes:
    """Of a tier: its passes and their seconds, and what became of proposed tokens."""
    return {
        "triforce.passes": passes,
        "triforce.pass_seconds": busy_s,
        "triforce.proposed": judged.proposed,
        "triforce.accepted": judged.accepted,
    }


def of(stats: Stats) -> Attributes:
    """Of the rounds."""
    plans = {f"triforce.rounds.{plan}": rounds for plan, rounds in stats.plans.items()}
    return plans | {
        "triforce.tokens": stats.decoded,
        "triforce.rounds": stats.tallies[0].rounds,
        "triforce.tokens_per_round": stats.tokens_per_round,
        "triforce.snapshots": stats.snapshots,
    }


def given(attributes: Attributes) -> Attributes:
    return {name: value for name, value in attributes.items() if value is not None}


def named(call: Call, trace: Trace) -> tuple[str, Attributes]:
    """The name of a call's span, and what its protocol says of it."""
    if call.api == "grpc":
        service = "grpc.health.v1.Health" if call.route == "Watch" else "triforce.v1.Generation"
        method = f"{service}/{call.route}"
        return method, {
            "rpc.system.name": "grpc",
            "rpc.method": method,
            "rpc.response.status_code": call.status,
        }
    method, _, path = call.route.partition(" ")
    return f"{method} {trace.route}".rstrip(), {
        "http.request.method": method,
        "http.route": trace.route or None,
        "http.response.status_code": call.status,
        "url.path": path,
        "url.scheme": "http",
    }


def asked(call: Call, trace: Trace, operation: str, model: str) -> Attributes:
    """What a call that asks for completions says of the model."""
    done = sorted(trace.completed)
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "triforce",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.choice.count": len(done) if len(done) > 1 else None,
        "gen_ai.response.finish_reasons": [str(each.done.finish_reason) for each in done] or None,
        "gen_ai.response.time_to_first_chunk": call.ttft_s,
        "gen_ai.usage.input_tokens": call.prompt_tokens,
        "gen_ai.usage.output_tokens": call.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": done[0].cached_tokens if len(done) == 1 else None,
        "triforce.engines_lost": len(trace.lost),
    }


def error_type(call: Call, trace: Trace) -> str:
    """The code of the error with which a call ended, or its status; "" if it ended well."""
    if trace.error or call.status is None:
        return trace.error or "cancelled"
    failed = call.status != "OK" if isinstance(call.status, str) else call.status >= CLIENT_ERROR
    return str(call.status) if failed else ""


def serious(call: Call, error: str) -> bool:
    """Whether an error is the server's, so that the span's status says so."""
    if error == "cancelled":
        return False
    if isinstance(call.status, str):
        return call.status in SERVER_CODES
    # A stream that has begun has the status 200, whatever ends it.
    return call.status is None or call.status >= SERVER_ERROR or call.status < CLIENT_ERROR


def check(variables: Mapping[str, str] = os.environ) -> str:
    """What the environment asks for. Raises `InvalidValueError` if an exporter is not installed."""
    names = exporters(variables)
    for name in names:
        exporter(name)
    return ", ".join(names) or f"none: {EXPORTER} and {ENDPOINTS[1]} ask for none"
