"""Spans to a collector: OTLP over HTTP, by OpenTelemetry's own exporter in a thread of its own.

The ids, the parents and what is sampled are decided before (`runtime/traces/spans.py`); here a span is
only put into the SDK's words. The batch processor keeps at most `OTEL_BSP_MAX_QUEUE_SIZE` (2048) of them
and drops the oldest over that, and its thread sends them every few seconds, so nothing here waits
for a collector but the end of the process, and that not for long.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

import trio
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from trinamo.runtime.config.config import TracingConfig
from trinamo.runtime.planes.spans import Span

__all__ = ["OtlpSpans", "open_spans"]

_NS: Final = 1_000_000_000
_SCOPE: Final = InstrumentationScope("trinamo")
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_KINDS: Final = {
    "http": SpanKind.SERVER,
    "worker": SpanKind.SERVER,
    "attempt": SpanKind.CLIENT,
    "put": SpanKind.PRODUCER,
    "queue": SpanKind.PRODUCER,
    "job": SpanKind.CONSUMER,
}
_GOOD: Final = ("success", "adopted", "done")
_UNSET: Final = Status(StatusCode.UNSET)


class OtlpSpans:
    """A `SpanSink` that hands spans to a batch processor."""

    def __init__(self, processor: BatchSpanProcessor, process: Mapping[str, str]) -> None:
        self._processor = processor
        named = {"service.name": "trinamo", **{f"trinamo.{key}": process[key] for key in process}}
        if "instance" in process:
            named["service.instance.id"] = process["instance"]
        # What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say wins.
        self._resource = Resource.create(named).merge(OTELResourceDetector().detect())

    def take(self, span: Span) -> None:
        """Queue one; over the processor's bound the oldest is dropped."""
        self._processor.on_end(self.readable(span))

    def readable(self, span: Span) -> ReadableSpan:
        """The same in the SDK's words."""
        outcome = span.facts.get("outcome", "success")
        parent = None
        if span.parent_id:
            parent = SpanContext(span.trace_id, span.parent_id, is_remote=False)
        return ReadableSpan(
            name=span.name,
            context=SpanContext(span.trace_id, span.span_id, is_remote=False, trace_flags=_SAMPLED),
            parent=parent,
            resource=self._resource,
            attributes={
                "trinamo.request_id": span.request_id,
                **{f"trinamo.{name}": value for name, value in span.facts.items()},
            },
            events=[Event(name, timestamp=int(at * _NS)) for name, at in span.marks],
            kind=_KINDS.get(span.name, SpanKind.INTERNAL),
            status=_UNSET if outcome in _GOOD else Status(StatusCode.ERROR, str(outcome)),
            start_time=int(span.start * _NS),
            end_time=int(span.end * _NS),
            instrumentation_scope=_SCOPE,
        )


@asynccontextmanager
async def open_spans(
    section: TracingConfig, process: Mapping[str, str]
) -> AsyncIterator[OtlpSpans]:
    """Export spans while inside. `process` is what they say of where they are from.

    Leaving sends what waits, for `section.flush_timeout_s` at most; cancelled, it drops that.
    """
    endpoint = None
    if section.endpoint is not None:
        endpoint = f"{section.endpoint.rstrip('/')}/v1/traces"
    exporter = OTLPSpanExporter(endpoint=endpoint)
    processor = BatchSpanProcessor(exporter)
    is_sent = False
    try:
        yield OtlpSpans(processor, process)
        with trio.move_on_after(section.flush_timeout_s):
            await trio.to_thread.run_sync(processor.shutdown, abandon_on_cancel=True)
            is_sent = True
    finally:
        if not is_sent:
            # Ends the wait for a collector that is away, and with it the thread.
            exporter.shutdown()  # type: ignore[no-untyped-call]
