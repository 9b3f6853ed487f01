"""Spans in a real collector's hands, and what happens where there is none."""

from __future__ import annotations

import threading

import pytest
import trio

from tests.transports.otel.collector import open_collector
from trinamo.runtime.config.config import TracingConfig, load_config
from trinamo.runtime.errors import ConfigError
from trinamo.runtime.traces.spans import Span
from trinamo.transports.otel import exporter, open_spans

WORKER = {"instance": "abcd"}


def span(number: int = 1, *, name: str = "worker", outcome: str = "success") -> Span:
    return Span(
        name=name,
        request_id="mine",
        trace_id=7,
        span_id=number,
        parent_id=number - 1,
        start=1000.0,
        end=1001.5,
        marks=[("first_item", 1001.0)],
        facts={"endpoint": "a/b/c", "tokens": 3, "outcome": outcome},
    )


@pytest.mark.parametrize("sender", [exporter.SENDER, "_of_another_version"])
async def test_a_span_arrives_as_it_was(monkeypatch: pytest.MonkeyPatch, sender: str) -> None:
    monkeypatch.setattr(exporter, "SENDER", sender)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=secret")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    with open_collector() as collector:
        async with open_spans(
            TracingConfig(endpoint=f"{collector.url}/", flush_timeout_s=60), WORKER
        ) as spans:
            spans.take(span(2))
            spans.take(span(1, name="http", outcome="overloaded"))
    ((path, headers),) = collector.requests
    assert (path, headers["authorization"]) == ("/v1/traces", "secret")
    good, bad = sorted(collector.spans, key=lambda each: each.id, reverse=True)
    assert (good.name, good.trace, good.id, good.parent) == (
        "worker",
        f"{7:032x}",
        f"{2:016x}",
        f"{1:016x}",
    )
    assert good.facts == {
        "trinamo.request_id": "mine",
        "trinamo.endpoint": "a/b/c",
        "trinamo.tokens": 3,
        "trinamo.outcome": "success",
    }
    assert (good.events, good.end_ns - good.start_ns) == (["first_item"], 1_500_000_000)
    assert (good.is_error, bad.is_error, bad.parent) == (False, True, "")
    told = {key: good.process[key] for key in ("service.name", "service.instance.id")}
    assert told == {"service.name": "trinamo", "service.instance.id": "abcd"}
    assert good.process["deployment.environment"] == "test"


async def test_the_environment_names_the_service_and_the_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
        async with open_spans(TracingConfig(flush_timeout_s=60), WORKER) as spans:
            spans.take(span())
    assert [each.process["service.name"] for each in collector.spans] == ["mine"]


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_collector_that_takes_nothing_holds_nobody_up(is_there: bool) -> None:
    with open_collector() as collector:
        collector.refuses = True
        url = collector.url if is_there else "http://127.0.0.1:1"
        with trio.fail_after(120):
            section = TracingConfig(endpoint=url, flush_timeout_s=0.2)
            async with open_spans(section, WORKER) as spans:
                # More than are kept for it.
                for number in range(1, 5000):
                    spans.take(span(number))
        # Its thread ends on its own: not in the middle of another test, which may be a simulated run.
        for thread in threading.enumerate():
            if thread.name == "OtelBatchSpanRecordProcessor":
                await trio.to_thread.run_sync(thread.join, 120)
    assert collector.spans == []


@pytest.mark.parametrize("endpoint", ["collector:4318", "http://me:secret@collector:4318"])
def test_an_endpoint_that_is_no_url_or_holds_a_password_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="endpoint") as caught:
        load_config(environ={}, overrides={"tracing.endpoint": endpoint})
    assert "secret" not in str(caught.value)
