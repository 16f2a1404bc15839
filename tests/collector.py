"""A collector of traces that keeps what it gets: OTLP over HTTP, as OpenTelemetry's own collector takes it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2 as pb

ERROR, SERVER = pb.Status.STATUS_CODE_ERROR, pb.Span.SPAN_KIND_SERVER


def value_of(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(each) for each in value.array_value.values]
    return getattr(value, kind)


def attributes_of(pairs: list[KeyValue]) -> dict[str, Any]:
    return {pair.key: value_of(pair.value) for pair in pairs}


@dataclass
class Collected:
    """A span, with those whose parent it is in the order in which they began."""

    span: pb.Span
    resource: dict[str, Any]
    children: list[Collected] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def attributes(self) -> dict[str, Any]:
        return attributes_of(list(self.span.attributes))

    @property
    def seconds(self) -> float:
        return (self.span.end_time_unix_nano - self.span.start_time_unix_nano) / 1e9

    @property
    def tree(self) -> dict[str, Any]:
        """The names of those below it."""
        return {child.name: child.tree for child in self.children}

    def child(self, name: str) -> Collected:
        [found] = [child for child in self.children if child.name == name]
        return found

    def within(self, other: Collected) -> bool:
        one, two = self.span, other.span
        began, ended = two.start_time_unix_nano, two.end_time_unix_nano
        return began <= one.start_time_unix_nano <= one.end_time_unix_nano <= ended


class Collector:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.bodies: list[bytes] = []

    @property
    def roots(self) -> list[Collected]:
        """The spans whose parents did not come, by their beginning."""
        spans: list[Collected] = []
        for body in self.bodies:
            for each in ExportTraceServiceRequest.FromString(body).resource_spans:
                resource = attributes_of(list(each.resource.attributes))
                spans += [Collected(span, resource) for scope in each.scope_spans for span in scope.spans]
        spans.sort(key=lambda each: each.span.start_time_unix_nano)
        known = {each.span.span_id: each for each in spans}
        for each in spans:
            if parent := known.get(each.span.parent_span_id):
                assert parent.span.trace_id == each.span.trace_id
                parent.children.append(each)
        return [each for each in spans if each.span.parent_span_id not in known]

    def wait(self, count: int, timeout_s: float = 20.0) -> list[Collected]:
        """The roots, once so many have come."""
        until = time.monotonic() + timeout_s
        while len(found := self.roots) < count:
            assert time.monotonic() < until, f"{len(found)} of {count} traces: {[each.name for each in found]}"
            time.sleep(0.05)
        return found


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            collector.bodies.append(body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(server.server_address[1])
        thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
