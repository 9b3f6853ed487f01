"""Spans as we write them, beside what the SDK makes of the same."""

from __future__ import annotations

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource

from trinamo.runtime.traces.spans import Span
from trinamo.transports.otel.exporter import SpanEncoder

RESOURCE = Resource.create({"service.name": "mine", "trinamo.role": "frontend"})


def span(name: str = "http", *, parent_id: int = 0, **facts: str | float) -> Span:
    return Span(
        name=name,
        request_id="mine",
        trace_id=2**128 - 1,
        span_id=1,
        parent_id=parent_id,
        start=1_700_000_000.25,
        end=1_700_000_001.5,
        marks=[("body", 1_700_000_000.5), ("first_token", 1_700_000_001.25)],
        facts=facts,
    )


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [span()],
        [span(name, parent_id=2**64 - 1) for name in ("worker", "put", "job", "attempt", "engine")],
        [span(outcome="success"), span(outcome="overloaded"), span(outcome="done")],
        [span(text="ä", empty="", count=-3, much=2**62, ratio=0.5, nothing=0)],
    ],
)
def test_a_collector_cannot_tell_our_encoding_from_the_sdk_s(spans: list[Span]) -> None:
    encoder = SpanEncoder(RESOURCE)
    told = ExportTraceServiceRequest.FromString(encoder.encode(spans))
    expected = encode_spans([encoder.readable(each) for each in spans])
    if spans:
        assert told == expected
    else:
        assert [list(each.spans) for each in told.resource_spans[0].scope_spans] == [[]]


def test_a_number_that_otlp_has_no_room_for_is_the_largest_it_has() -> None:
    told = ExportTraceServiceRequest.FromString(SpanEncoder(RESOURCE).encode([span(count=2**70)]))
    (found,) = told.resource_spans[0].scope_spans[0].spans
    assert found.attributes[1].value.int_value == 2**63 - 1
