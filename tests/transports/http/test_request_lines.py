"""What a frontend's log says of each request: one line, with its id, when it has ended.

What a worker's says is in `tests/runtime/worker/test_worker.py`.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import pytest
import trio

from tests.runtime.http.running import on_every_server
from trinamo.runtime.config.config import LogConfig
from trinamo.runtime.context import Context
from trinamo.runtime.logs.access import ACCESS_LOGGER, LOOK_AGENT
from trinamo.runtime.logs.setup import setup_log
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason, GenerateRequest
from trinamo.transports.http.refusals import HEADERS_MAX

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}
Lines = Callable[[], list[dict[str, Any]]]


async def answer(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
    yield Delta("hello", [1], FinishReason.STOP)


async def never_ends(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
    yield Delta("hello", [1], None)
    await trio.sleep_forever()


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What the log writes, at `info` and as JSON."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    loggers = [root, logging.getLogger("trinamo"), logging.getLogger(ACCESS_LOGGER)]
    levels = [each.level for each in loggers]
    stream = io.StringIO()
    setup_log(LogConfig(format="json"), stream=stream)
    yield stream
    root.handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    logging.captureWarnings(capture=False)


@pytest.fixture
def lines(stream: io.StringIO) -> Lines:
    """The log's lines about requests."""
    return lambda: [
        line
        for line in map(json.loads, stream.getvalue().splitlines())
        if line["logger"] == ACCESS_LOGGER
    ]


@on_every_server
async def test_a_request_that_succeeds_has_a_line_with_its_tokens_and_times(
    serve: Any, lines: Lines
) -> None:
    running = await serve(answer)
    async with running.client() as client:
        await client.post(CHAT, json=BODY, headers={"x-request-id": "mine"})
    await running.wait_for(lambda: bool(lines()))

    [line] = lines()
    assert line["request_id"].startswith("mine")
    told = (line["event"], line["level"], line["outcome"], line["model"])
    assert told == (f"POST {CHAT} 200", "info", "success", "local")
    assert (line["method"], line["path"], line["status"]) == ("POST", CHAT, 200)
    # The engine of the test does not tell how long its prompt was, as some upstreams do not.
    assert "prompt_tokens" not in line
    assert line["output_tokens"] == 1
    assert 0 <= line["first_token_s"] <= line["duration_s"]


async def test_a_client_that_leaves_has_a_line(serve: Any, lines: Lines) -> None:
    running = await serve(never_ends)
    stream = await running.connect()
    await stream.send_all(running.post(stream=True))
    await stream.receive_some()
    await stream.aclose()
    await running.wait_for(lambda: bool(lines()))

    [line] = lines()
    assert (line["level"], line["outcome"]) == ("info", "client_disconnect")
    assert (line["status"], line["output_tokens"]) == (200, 1)


async def test_a_client_that_leaves_before_its_body_is_there_has_a_line(
    serve: Any, lines: Lines
) -> None:
    running = await serve(answer)
    stream = await running.connect()
    await stream.send_all(running.post()[:-4])
    await running.wait_for(lambda: running.value("connections", kind="http") == 1)
    await stream.aclose()
    await running.wait_for(lambda: bool(lines()))

    [line] = lines()
    assert (line["status"], line["outcome"]) == (499, "client_disconnect")


@pytest.mark.parametrize(
    ("body", "status", "outcome"),
    [
        ({**BODY, "model": "gpt-9\x1b[2J"}, 404, "model_not_found"),
        ({"messages": 7}, 400, "invalid_request"),
    ],
)
async def test_a_request_that_is_refused_has_a_line_with_the_reason(
    serve: Any, lines: Lines, body: Any, status: int, outcome: str
) -> None:
    running = await serve(answer)
    async with running.client() as client:
        await client.post(CHAT, json=body)
    await running.wait_for(lambda: bool(lines()))

    [line] = lines()
    assert (line["level"], line["status"], line["outcome"]) == ("info", status, outcome)
    assert line["error"]
    assert line["request_id"]


@on_every_server
async def test_whatever_else_is_asked_has_a_line_and_monitors_have_none(
    serve: Any, lines: Lines
) -> None:
    running = await serve(answer)
    async with running.client() as client:
        await client.get("/health")
        await client.get("/metrics")
        await client.get("/v1/models", headers={"User-Agent": LOOK_AGENT})
        await client.get("/v1/models")
        await client.get("/nowhere%1b%0aelse")
        await client.get(CHAT)
    await running.wait_for(lambda: len(lines()) >= 3)

    found = [(line["path"], line["status"], line["outcome"]) for line in lines()]
    assert found == [
        ("/v1/models", 200, "success"),
        ("/nowhere\x1b\nelse", 404, "path_not_found"),
        (CHAT, 405, "method_not_allowed"),
    ]


async def test_a_fault_of_ours_has_a_line_at_error_with_its_id_and_traceback(
    serve: Any, stream: io.StringIO, lines: Lines
) -> None:
    async def crash(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        yield Delta("hello", [1], None)
        raise ZeroDivisionError("by zero")

    running = await serve(crash)
    async with running.client() as client:
        await client.post(CHAT, json=BODY)
    await running.wait_quiet()

    [line] = lines()
    assert line["status"] == 500
    [fault] = [
        each for each in map(json.loads, stream.getvalue().splitlines()) if each["level"] == "error"
    ]
    assert fault["error"] == "ZeroDivisionError: by zero"
    assert fault["request_id"] == line["request_id"]
    assert fault["model"] == "local"
    assert "in crash" in fault["exception"]


async def test_log_access_leaves_out_successes_or_all(
    serve: Any, stream: io.StringIO, lines: Lines
) -> None:
    running = await serve(answer)

    async def ask() -> None:
        async with running.client() as client:
            await client.post(CHAT, json=BODY)
            await client.post(CHAT, json={"messages": 7})
            await client.get("/nowhere")
        await running.wait_quiet()

    setup_log(LogConfig(format="json", access="none"), stream=stream)
    await ask()
    assert lines() == []

    setup_log(LogConfig(format="json", access="failures"), stream=stream)
    await ask()
    assert [line["status"] for line in lines()] == [400, 404]
    assert {line["level"] for line in lines()} == {"info"}


async def test_access_lines_are_not_held_back(serve: Any, lines: Lines) -> None:
    running = await serve(answer)
    async with running.client() as client:
        for _ in range(70):
            await client.get("/v1/models")
    await running.wait_quiet()

    assert len(lines()) == 70


async def test_on_a_terminal_a_line_is_for_people_and_cannot_command_it(
    serve: Any, stream: io.StringIO
) -> None:
    running = await serve(answer)
    setup_log(LogConfig(format="console"), stream=stream)
    async with running.client() as client:
        await client.post(CHAT, json=BODY)
        await client.get("/nowhere%1b%5b2J")
    await running.wait_quiet()

    first, second = stream.getvalue().splitlines()
    assert f"POST {CHAT} 200 [trinamo.access] request_id=" in first
    assert "model=local outcome=success" in first
    assert "GET /nowhere\\u001b[2J 404" in second


async def test_a_library_that_formats_records_itself_can_read_these(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    running = await serve(answer)
    with caplog.at_level(logging.INFO, ACCESS_LOGGER):
        async with running.client() as client:
            await client.post(CHAT, json=BODY)
        await running.wait_quiet()

    [record] = [each for each in caplog.records if each.name == ACCESS_LOGGER]
    assert record.getMessage() == f"POST {CHAT} 200"
    assert vars(record)["outcome"] == "success"
    form = logging.Formatter("%(levelname)s %(name)s %(module)s %(message)s %(status)d")
    assert form.format(record) == f"INFO {ACCESS_LOGGER} access POST {CHAT} 200 200"


@pytest.mark.parametrize(
    ("http_server", "is_http2"), [("native", False), ("tls", False), ("tls", True)]
)
async def test_no_value_of_a_header_is_in_the_log_at_any_level(
    serve: Any, stream: io.StringIO, http_server: str, is_http2: bool
) -> None:
    setup_log(LogConfig(format="json", level="debug"), stream=stream)
    running = await serve(answer)
    secret = {"authorization": "Bearer sk-alice", "cookie": "session=tell-nobody"}
    async with running.client(http2=is_http2) as client:
        said = await client.post("/v1/chat/completions", json=BODY, headers=secret)
    assert said.status_code == 200
    await running.wait_quiet()
    assert stream.getvalue()
    assert "sk-alice" not in stream.getvalue()
    assert "tell-nobody" not in stream.getvalue()


TOO_MANY_HEADERS = (
    b"GET /live HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * HEADERS_MAX + b"\r\n"
)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /live HTTP/1.1\nhost: localhost\n\n", 400),
        (TOO_MANY_HEADERS, 431),
        (TOO_MANY_HEADERS[:-2], 431),
        (b"GET /live HTTP/1.1\r\nhost: evil.example\r\nx-request-id: mine\r\n\r\n", 421),
    ],
)
async def test_what_the_listener_refuses_has_a_line_a_date_and_an_id(
    serve: Any, lines: Lines, data: bytes, status: int
) -> None:
    """Before: neither date nor id nor line, so that nobody could find out why a client fails."""
    running = await serve(answer)
    stream = await running.connect()
    await stream.send_all(data)
    told = b""
    with trio.fail_after(120):
        while b"}}" not in told:
            piece = await stream.receive_some()
            assert piece, told
            told += piece
    await stream.aclose()

    head = told.partition(b"\r\n\r\n")[0].lower()
    assert head.startswith(b"http/1.1 %d " % status)
    assert b"\r\ndate: " in head
    [line] = lines()
    assert (line["status"], line["level"]) == (status, "info")
    assert b"\r\nx-request-id: %b" % line["request_id"].encode() in head
    assert line["error"]
    if status == 421:
        assert (line["method"], line["path"], line["request_id"]) == ("GET", "/live", "mine")
