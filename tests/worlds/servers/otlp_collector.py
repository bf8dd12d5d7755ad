"""An OpenTelemetry collector on loopback, which receives spans over HTTP and keeps them."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of a trace by name; those of one name are in the order of their starts."""

    spans: dict[str, list[Span]] = field(default_factory=dict)

    @property
    def root(self) -> Span:
        [root] = [
            span for spans in self.spans.values() for span in spans if not span.parent_span_id
        ]
        return root

    def seconds(self, name: str) -> list[tuple[float, float]]:
        return [
            (span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9)
            for span in self.spans[name]
        ]

    def parents(self) -> set[tuple[str, str]]:
        """Return the name of each span that has a parent, with the parent's name."""
        names = {span.span_id: name for name, spans in self.spans.items() for span in spans}
        return {
            (name, names[span.parent_span_id])
            for name, spans in self.spans.items()
            for span in spans
            if span.parent_span_id
        }


def attributes(span: Span) -> dict[str, object]:
    return {
        each.key: getattr(each.value, str(each.value.WhichOneof("value")))
        for each in span.attributes
    }


@dataclass
class Collector:
    url: str
    _spans: list[Span] = field(default_factory=list)

    def traces(self) -> dict[str, Trace]:
        """Return the traces by the rollout of their root."""
        by_id: dict[bytes, Trace] = {}
        for span in sorted(self._spans, key=lambda span: span.start_time_unix_nano):
            spans = by_id.setdefault(span.trace_id, Trace()).spans
            spans.setdefault(span.name, []).append(span)
        return {
            str(attributes(trace.root)["rayloom.rollout_id"]): trace for trace in by_id.values()
        }

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self._spans += scope.spans


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            is_packed = self.headers.get("content-encoding") == "gzip"
            collector.take(gzip.decompress(body) if is_packed else body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(url=f"http://127.0.0.1:{server.server_port}/v1/traces")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
