"""Spans as we write them, beside what the SDK makes of the same."""

from __future__ import annotations

from typing import Any

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
        [
            span(
                endpoint="completions",
                method="POST",
                path="/v1/completions",
                status=200,
                model="m",
                asked_model="alias",
                finish_reasons="stop,length",
                temperature=0.0,
                max_tokens=0,
                outcome="deadline",
            )
        ],
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


def test_a_request_of_http_has_the_names_that_dashboards_look_for() -> None:
    facts: dict[str, Any] = {
        "endpoint": "chat",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
    }
    more: dict[str, Any] = {
        "prompt_tokens": 3,
        "output_tokens": 2,
        "model": "m",
        "finish_reasons": "stop,length",
    }
    (found,) = (
        ExportTraceServiceRequest.FromString(SpanEncoder(RESOURCE).encode([span(**facts, **more)]))
        .resource_spans[0]
        .scope_spans[0]
        .spans
    )
    told = {each.key: each.value for each in found.attributes}
    assert found.name == "POST /v1/chat/completions"
    assert told["trinamo.leg"].string_value == "http"
    assert told["http.request.method"].string_value == "POST"
    assert told["http.route"] == told["url.path"] == told["trinamo.path"]
    assert told["http.response.status_code"].int_value == 200
    assert told["gen_ai.operation.name"].string_value == "chat"
    assert told["gen_ai.response.model"].string_value == "m"
    assert told["gen_ai.usage.input_tokens"].int_value == 3
    assert told["gen_ai.usage.output_tokens"].int_value == 2
    reasons = told["gen_ai.response.finish_reasons"].array_value.values
    assert [each.string_value for each in reasons] == ["stop", "length"]
    assert "error.type" not in told
    assert "gen_ai.request.max_tokens" not in told


def test_an_error_has_its_type_and_only_requests_of_http_have_such_names() -> None:
    spans = [span(outcome="overloaded"), span("worker", outcome="overloaded", model="m")]
    encoder = SpanEncoder(RESOURCE)
    told = [dict(encoder.readable(each).attributes or {}) for each in spans]
    assert told[0]["error.type"] == "overloaded"
    assert all(name.startswith("trinamo.") for name in told[1])
