"""A collector: takes OTLP over HTTP, and keeps the spans that it was sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import attrs
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@attrs.frozen
class Received:
    """One span, ids in hexadecimal digits; `parent` is empty for a root."""

    name: str
    trace: str
    id: str
    parent: str
    process: dict[str, str]
    facts: dict[str, Any]
    events: list[str]
    is_error: bool
    start_ns: int
    end_ns: int


@attrs.define
class Collector:
    """What came, and by which requests."""

    url: str = ""
    spans: list[Received] = attrs.Factory(list)
    requests: list[tuple[str, dict[str, str]]] = attrs.Factory(list)
    """Path and headers of each."""
    refuses: bool = False
    """Answer with 503."""

    def names(self) -> list[str]:
        return sorted(span.name for span in self.spans)

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            process = _values(resource.resource.attributes)
            for scope in resource.scope_spans:
                self.spans += [_received(span, process) for span in scope.spans]


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def _received(span: Any, process: dict[str, str]) -> Received:
    return Received(
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        process=process,
        facts=_values(span.attributes),
        events=[event.name for event in span.events],
        is_error=span.status.code == span.status.STATUS_CODE_ERROR,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
    )


@contextmanager
def open_collector() -> Iterator[Collector]:
    """A collector on a port of its own, in threads, until left."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
            if not collector.refuses:
                collector.take(body)
            self.send_response(503 if collector.refuses else 200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- the base class's
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
