"""A worker that answers nonsense: its request is a typed 502, and no bug of ours in any log."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import trio

from tests.runtime.one_process import OneProcess, open_process
from trinamo import HttpService
from trinamo.runtime.context import Context
from trinamo.runtime.http.models.discovery import watch_models
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.protocol.discovery.model_cards import encode_card, model_key
from trinamo.runtime.protocol.openai.generate import ModelCard

ENDPOINT = EndpointName("attack", "backend", "generate")

# Each is sent as the second item of an answer; an honest one is `[text, ids, reason, count]`.
NONSENSE: dict[str, Any] = {
    "a negative count of prompt tokens": ["a", [1], None, -5],
    "too large a count of prompt tokens": ["a", [1], None, 2**63],
    "a count that is no integer": ["a", [1], None, 0.5],
    "a count that is no number": ["a", [1], None, "5"],
    "an unknown finish reason": ["a", [1], "because"],
    "text that is bytes": [b"\xff\xfe", [1]],
    "ids that are text": ["a", ["b"]],
    "an id of 64 bits and more in a float": ["a", [1e300]],
    "no delta": 17,
    "nothing": None,
    "a map": {"text": "a"},
    "depth": [[[[[[[]]]]]]],
}


@asynccontextmanager
async def attacked(item: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A frontend whose only worker answers with one good delta and then `item`."""

    async def lie(_: Any, __: Context) -> AsyncGenerator[Any, None]:
        yield ["good", [1], None, 3]
        yield item

    transports = OneProcess()
    async with (
        open_process(transports, serving=True) as worker,
        open_process(transports) as frontend,
        trio.open_nursery() as nursery,
    ):
        await worker.serve(ENDPOINT, lie)
        assert worker.instance_id is not None
        card = ModelCard(name="m", endpoint=str(ENDPOINT), context_tokens_max=64)
        await worker.publish(model_key(card.name, worker.instance_id), encode_card(card))
        service = HttpService.builder().port(0).build()
        manager = service.model_manager()
        await nursery.start(watch_models, frontend.control, frontend, manager)
        client = await frontend.client(ENDPOINT)
        await client.router.wait_instances(1)
        port = await nursery.start(service.run)
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=120
        ) as http:
            yield http
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("kind", NONSENSE)
async def test_a_nonsensical_item_is_the_worker_s_fault(
    kind: str, caplog: pytest.LogCaptureFixture, *, is_streamed: bool
) -> None:
    async with attacked(NONSENSE[kind]) as http:
        with caplog.at_level(logging.INFO):
            body = {"prompt": "hi", "stream": is_streamed}
            response = await http.post("/v1/completions", json=body)
            exposition = (await http.get("/metrics")).text
    assert response.status_code == (200 if is_streamed else 502)
    assert '"code":"remote_protocol"' in response.text
    assert "[DONE]" not in response.text
    assert 'outcome="remote_protocol"} 1.0' in exposition
    assert [record for record in caplog.records if record.exc_info] == []


async def test_ids_that_are_no_ids_harm_nobody() -> None:
    """Only how many there are matters to a frontend."""
    async with attacked(["a", [-1, 2**64 - 1], "stop"]) as http:
        response = await http.post("/v1/completions", json={"prompt": "hi"})
    assert response.status_code == 200
    assert response.json()["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
