"""Spans to a collector: OTLP over HTTP, by OpenTelemetry's own exporter in a thread of its own.

The ids, the parents and what is sampled are decided before (`runtime/traces/spans.py`). In the loop's
thread a span is only put into the batch processor's queue; the SDK's thread has it encoded
(`encoding.py`) and sends it every few seconds, with the SDK's retries, certificates and headers. The
queue keeps at most `OTEL_BSP_MAX_QUEUE_SIZE` (2048) and drops the oldest over that, so nothing here
waits for a collector but the end of the process, and that not for long.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Final

import attrs
import trio
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags

from trinamo.runtime.config.config import TracingConfig
from trinamo.runtime.traces.spans import Span

from .encoding import SpanEncoder

BATCH_BYTES_MAX: Final = 64 << 20
"""Of one request; a batch of 512 spans has some 300 KB."""
SENDER: Final = "_client"
"""What the SDK's exporter calls whoever sends bytes."""
_SAMPLED: Final = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


@attrs.define
class _Waiting:
    """A span in the processor's queue, which asks one thing of it: whether it is sampled."""

    span: Span
    context: ClassVar[SpanContext] = _SAMPLED


class _Exporter(OTLPSpanExporter):
    """The SDK's, with an encoder that takes our spans."""

    def __init__(self, endpoint: str | None, encoder: SpanEncoder) -> None:
        super().__init__(endpoint=endpoint)
        self._encoder = encoder
        # No part of its public face; of an exporter without it the public way is taken, which is slower.
        self._send: Any = getattr(getattr(self, SENDER, None), "export", None)

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        """Send `spans`, all of them `_Waiting`. Called in the processor's thread."""
        waiting: list[Span] = [each.span for each in spans]
        if self._send is None:
            return super().export([self._encoder.readable(span) for span in waiting])
        body = self._encoder.encode(waiting)
        is_sent = len(body) <= BATCH_BYTES_MAX and self._send(body).success
        return SpanExportResult.SUCCESS if is_sent else SpanExportResult.FAILURE


class OtlpSpans:
    """A `SpanSink` that hands spans to a batch processor."""

    def __init__(self, processor: BatchSpanProcessor) -> None:
        self._processor = processor

    def take(self, span: Span) -> None:
        """Queue one; over the processor's bound the oldest is dropped."""
        waiting: Any = _Waiting(span)
        self._processor.on_end(waiting)


def _resource(process: Mapping[str, str]) -> Resource:
    named = {"service.name": "trinamo", **{f"trinamo.{key}": process[key] for key in process}}
    if "instance" in process:
        named["service.instance.id"] = process["instance"]
    # What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say wins.
    return Resource.create(named).merge(OTELResourceDetector().detect())


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
    exporter = _Exporter(endpoint, SpanEncoder(_resource(process)))
    processor = BatchSpanProcessor(exporter)
    is_sent = False
    try:
        yield OtlpSpans(processor)
        with trio.move_on_after(section.flush_timeout_s):
            await trio.to_thread.run_sync(processor.shutdown, abandon_on_cancel=True)
            is_sent = True
    finally:
        if not is_sent:
            # Ends the wait for a collector that is away, and with it the thread.
            exporter.shutdown()  # type: ignore[no-untyped-call]
