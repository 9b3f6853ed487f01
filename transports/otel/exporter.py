"""Spans to a collector: OTLP over HTTP, by OpenTelemetry's own exporter in a thread of its own.

The ids, the parents and what is sampled are decided before (`runtime/traces/spans.py`). In the loop's
thread a span is only put into the batch processor's queue; the SDK's thread has it encoded
and sends it every few seconds, with the SDK's retries, certificates and headers. The
queue keeps at most `OTEL_BSP_MAX_QUEUE_SIZE` (2048) and drops the oldest over that, so nothing here
waits for a collector but the end of the process, and that not for long.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Final, TypeAlias

import attrs
import trio
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2 as otlp
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from trinamo.runtime.config.config import TracingConfig
from trinamo.runtime.traces.spans import Span

# Spans as OTLP's protobuf messages, written straight from what the runtime tells.
#
# The SDK's own way, a `ReadableSpan` with its contexts, events and status and then its encoder, takes four
# times the CPU for the same bytes. It is what is left where an exporter takes nothing else.
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
# OTLP has a zero for "not said", before the kinds of the SDK.
_CODES: Final = {name: kind.value + 1 for name, kind in _KINDS.items()}
_INTERNAL: Final = SpanKind.INTERNAL.value + 1
_GOOD: Final = ("success", "adopted", "done")
_SERVER: Final = "http"
"""The leg that has names by OpenTelemetry's conventions, for HTTP servers and generative AI, too."""
_CONVENTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "method": ("http.request.method",),
    "path": ("http.route", "url.path"),
    "status": ("http.response.status_code",),
    "asked_model": ("gen_ai.request.model",),
    "max_tokens": ("gen_ai.request.max_tokens",),
    "temperature": ("gen_ai.request.temperature",),
    "top_p": ("gen_ai.request.top_p",),
    "model": ("gen_ai.response.model",),
    "finish_reasons": ("gen_ai.response.finish_reasons",),
    "prompt_tokens": ("gen_ai.usage.input_tokens",),
    "output_tokens": ("gen_ai.usage.output_tokens",),
    "cached_tokens": ("gen_ai.usage.cache_read.input_tokens",),
}
"""Of its facts."""
_OPERATIONS: Final = {
    **dict.fromkeys(("chat", "responses", "messages"), "chat"),
    "completions": "text_completion",
    "embeddings": "embeddings",
}
"""By its endpoint."""
_LISTS: Final = ("gen_ai.response.finish_reasons",)
Told: TypeAlias = str | int | float | tuple[str, ...]
_INT64_MAX: Final = 2**63 - 1


class SpanEncoder:
    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        # Of one span that says nothing, what is said of all: the SDK knows how.
        root = ReadableSpan(
            "",
            context=SpanContext(1, 1, is_remote=False),
            resource=resource,
            instrumentation_scope=_SCOPE,
        )
        self._frame = encode_spans([root])
        del self._frame.resource_spans[0].scope_spans[0].spans[:]

    def encode(self, spans: Iterable[Span]) -> bytes:
        request = ExportTraceServiceRequest()
        request.CopyFrom(self._frame)
        add = request.resource_spans[0].scope_spans[0].spans.add
        for span in spans:
            _write(span, add())
        return request.SerializeToString()

    def readable(self, span: Span) -> ReadableSpan:
        outcome = span.facts.get("outcome", "success")
        parent = None
        if span.parent_id:
            parent = SpanContext(span.trace_id, span.parent_id, is_remote=False)
        return ReadableSpan(
            name=_name(span),
            context=SpanContext(span.trace_id, span.span_id, is_remote=False, trace_flags=_SAMPLED),
            parent=parent,
            resource=self._resource,
            attributes=dict(_attributes(span)),
            events=[Event(name, timestamp=int(at * _NS)) for name, at in span.marks],
            kind=_KINDS.get(span.name, SpanKind.INTERNAL),
            status=Status(StatusCode.UNSET)
            if outcome in _GOOD
            else Status(StatusCode.ERROR, str(outcome)),
            start_time=int(span.start * _NS),
            end_time=int(span.end * _NS),
            instrumentation_scope=_SCOPE,
        )


def _name(span: Span) -> str:
    """As the leg is called; a request of HTTP by its method and route."""
    if "path" in span.facts:
        return f"{span.facts['method']} {span.facts['path']}"
    return span.name


def _attributes(span: Span) -> Iterator[tuple[str, Told]]:
    """Names of our own, and those that other people's dashboards look for."""
    yield "trinamo.request_id", span.request_id
    for name, value in span.facts.items():
        yield f"trinamo.{name}", value
    if span.name != _SERVER:
        return
    yield "trinamo.leg", span.name
    yield "gen_ai.provider.name", "trinamo"
    operation = _OPERATIONS.get(str(span.facts.get("endpoint")))
    if operation is not None:
        yield "gen_ai.operation.name", operation
    for name, keys in _CONVENTIONS.items():
        value = span.facts.get(name, "")
        for key in keys if value != "" else ():
            yield key, tuple(str(value).split(",")) if key in _LISTS else value
    outcome = span.facts.get("outcome", "success")
    if outcome not in _GOOD:
        yield "error.type", outcome


def _write(span: Span, told: otlp.Span) -> None:
    told.trace_id = span.trace_id.to_bytes(16, "big")
    told.span_id = span.span_id.to_bytes(8, "big")
    if span.parent_id:
        told.parent_span_id = span.parent_id.to_bytes(8, "big")
    told.name = _name(span)
    told.kind = _CODES.get(span.name, _INTERNAL)  # type: ignore[assignment]
    told.start_time_unix_nano = int(span.start * _NS)
    told.end_time_unix_nano = int(span.end * _NS)
    told.flags = otlp.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
    outcome = span.facts.get("outcome", "success")
    if outcome in _GOOD:
        told.status.SetInParent()
    else:
        told.status.code = otlp.Status.STATUS_CODE_ERROR
        told.status.message = str(outcome)
    add = told.attributes.add
    for key, value in _attributes(span):
        fact = add()
        fact.key = key
        if isinstance(value, str):
            fact.value.string_value = value
        elif isinstance(value, int):
            fact.value.int_value = min(max(value, -_INT64_MAX), _INT64_MAX)
        elif isinstance(value, float):
            fact.value.double_value = value
        else:
            for each in value:
                fact.value.array_value.values.add(string_value=each)
    for name, at in span.marks:
        told.events.add(name=name, time_unix_nano=int(at * _NS))


BATCH_BYTES_MAX: Final = 64 << 20
"""Of one request; a batch of 512 spans has some 300 KB."""
SENDER: Final = "_client"
"""What the SDK's exporter calls whoever sends bytes."""
_ALWAYS: Final = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


@attrs.define
class _Waiting:
    """A span in the processor's queue, which asks one thing of it: whether it is sampled."""

    span: Span
    context: ClassVar[SpanContext] = _ALWAYS


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
