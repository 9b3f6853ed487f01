"""What a frontend's log says of each request: one line, with its id, when it has ended."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import pytest
import trio

from trinamo.runtime.config.config import LogConfig
from trinamo.runtime.context import Context
from trinamo.runtime.logs.setup import setup_log
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason, GenerateRequest

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}
Lines = Callable[[], list[dict[str, Any]]]


async def answer(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
    yield Delta("hello", [1], FinishReason.STOP)


async def never_ends(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
    yield Delta("hello", [1], None)
    await trio.sleep_forever()


@pytest.fixture
def lines() -> Iterator[Lines]:
    """The log's lines about requests, at `debug`, in JSON."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    stream = io.StringIO()
    setup_log(LogConfig(level="debug", format="json"), stream=stream)
    yield lambda: [
        line
        for line in map(json.loads, stream.getvalue().splitlines())
        if line["event"] == "request ended"
    ]
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)


async def test_a_request_that_succeeds_has_a_line_at_debug(serve: Any, lines: Lines) -> None:
    running = await serve(answer)
    async with running.client() as client:
        await client.post(CHAT, json=BODY, headers={"x-request-id": "mine"})
    await running.wait_quiet()

    [line] = lines()
    assert line["request_id"].startswith("mine")
    assert (line["level"], line["outcome"], line["model"]) == ("debug", "success", "local")
    assert line["duration_s"] >= 0


async def test_a_client_that_leaves_has_a_line_at_info(serve: Any, lines: Lines) -> None:
    running = await serve(never_ends)
    stream = await running.connect()
    await stream.send_all(running.post(stream=True))
    await stream.receive_some()
    await stream.aclose()
    await running.wait_for(lambda: bool(lines()))

    [line] = lines()
    assert (line["level"], line["outcome"]) == ("info", "client_disconnect")


@pytest.mark.parametrize(
    ("body", "outcome"),
    [({**BODY, "model": "gpt-9\x1b[2J"}, "model_not_found"), ({"messages": 7}, "invalid_request")],
)
async def test_a_request_that_is_refused_has_a_line_at_info_with_the_reason(
    serve: Any, lines: Lines, body: Any, outcome: str
) -> None:
    running = await serve(answer)
    async with running.client() as client:
        await client.post(CHAT, json=body)
    await running.wait_quiet()

    [line] = lines()
    assert line["level"] == "info"
    assert line["error"]
    assert line["outcome"] == outcome


async def test_a_fault_of_ours_has_one_line_at_error_with_its_id_and_traceback(
    serve: Any, lines: Lines
) -> None:
    async def crash(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        yield Delta("hello", [1], None)
        raise ZeroDivisionError("by zero")

    running = await serve(crash)
    async with running.client() as client:
        await client.post(CHAT, json=BODY)
    await running.wait_quiet()

    [line] = lines()
    assert (line["level"], line["error"]) == ("error", "ZeroDivisionError: by zero")
    assert line["request_id"]
    assert "in crash" in line["exception"]
