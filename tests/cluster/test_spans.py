"""One trace of a request through real processes, as a collector gets it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.processes import until
from tests.cluster.test_disaggregation import MODES, body, disaggregated
from tests.transports.otel.collector import Collector, Received, open_collector

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROMPT = ("abcdefgh " * 40)[:200]
SERVER = "POST /v1/chat/completions"
LEGS = {
    "decode_first": {SERVER, "attempt", "worker", "remote_prefill", "queue", "job", "prefill"}
    | {"transfer", "reservation", "engine"},
    "prefill_first": {SERVER, "attempt", "worker", "remote_prefill", "prefill", "transfer"}
    | {"reservation", "engine"},
}


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    with open_collector() as collector:
        yield collector


@pytest.mark.parametrize("mode", MODES)
async def test_one_trace_crosses_frontend_queue_prefill_transfer_and_decode(
    tmp_path: Path, mode: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every span is in the client's trace, and the descendant of the client's span."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    settings: dict[str, Any] = {"tracing__enabled": True, "tracing__endpoint": collector.url}
    async with disaggregated(
        tmp_path, "decode", "prefill", disaggregation__mode=mode, **settings
    ) as (cluster, _):
        answer = await cluster.client.post(
            f"{cluster.url}/v1/chat/completions",
            json=body(PROMPT, 0),
            headers={"traceparent": f"00-{TRACE}-{SPAN}-01"},
        )
        assert answer.status_code == 200, answer.text

        async def is_whole() -> bool:
            spans = _of_trace(collector)
            known = {SPAN, *(span.id for span in spans)}
            has_parents = all(span.parent in known for span in spans)
            return has_parents and {span.name for span in spans} >= LEGS[mode]

        await until(is_whole, "all spans have come")
    spans = _of_trace(collector)
    parents = {span.id: span.parent for span in spans}
    for span in spans:
        above, steps = span.id, 0
        while above != SPAN:
            above, steps = parents[above], steps + 1
            assert steps <= len(spans)
    where = {span.name: span.process["service.instance.id"] for span in spans}
    assert len({where[SERVER], where["reservation"], where["prefill"]}) == 3
    assert len(spans) == len(parents)
    (server,) = (span.facts for span in spans if span.name == SERVER)
    assert server["http.response.status_code"] == 200
    assert server["gen_ai.request.model"] == server["gen_ai.response.model"] == "exact"
    assert server["gen_ai.usage.output_tokens"] == answer.json()["usage"]["completion_tokens"]
    assert not any("abcdefgh" in str(value) for value in server.values())
    assert not any(span.is_error for span in spans)


def _of_trace(collector: Collector) -> list[Received]:
    return [span for span in collector.spans if span.trace == TRACE]
