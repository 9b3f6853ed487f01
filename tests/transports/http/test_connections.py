"""One connection more than the limit: whose place it takes."""

from __future__ import annotations

import resource
import socket
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import pytest
import trio

from trinamo.runtime.context import Context
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason, GenerateRequest

LIVE = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"
HALF_A_HEAD = LIVE[:20]
HALF_A_BODY = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: 100\r\n\r\n{"
)


async def say_hello_slowly(_: GenerateRequest, context: Context) -> AsyncGenerator[Delta, None]:
    yield Delta("hello", [1])
    await context.wait_stopped()
    yield Delta("", [], FinishReason.STOP)


async def connect(running: Any, data: bytes = b"") -> Any:
    """A connection that the server has seen, and all that `data` does there."""
    before = running.value("connections", kind="http") + running.value("connections_taken_total")
    stream = await running.connect()
    await running.wait_for(
        lambda: (
            running.value("connections", kind="http") + running.value("connections_taken_total")
            > before
        )
    )
    await stream.send_all(data)
    return stream


async def wait_closed(stream: Any) -> None:
    """Until the server has closed it; what it said before is read over."""
    with trio.fail_after(120), suppress(trio.BrokenResourceError):
        while await stream.receive_some():
            pass


def is_open(stream: Any) -> bool:
    """Whether neither an end nor a reset has arrived so far; the tickets of TLS may have."""
    with suppress(BlockingIOError):
        return bool(stream.socket._sock.recv(1, socket.MSG_PEEK))
    return True


async def ask_live(stream: Any) -> bytes:
    await stream.send_all(LIVE)
    received = b""
    with trio.fail_after(120):
        while not received.endswith(b"}"):
            received += await stream.receive_some()
    return received


@pytest.mark.parametrize("data", [b"", HALF_A_HEAD], ids=["idle", "half a head"])
async def test_it_takes_the_place_of_the_one_that_waits_longest(serve: Any, data: bytes) -> None:
    running = await serve(connections_max=3)
    held = [await connect(running, data) for _ in range(3)]
    async with await connect(running) as fourth:
        assert b" 200 " in await ask_live(fourth)
        await wait_closed(held[0])
        assert is_open(held[2])
    assert running.value("connections_taken_total") == 1
    for stream in held:
        await stream.aclose()
    await running.wait_quiet()


async def test_one_that_was_answered_waits_anew(serve: Any) -> None:
    running = await serve(connections_max=2)
    first, second = await connect(running), await connect(running)
    assert b" 200 " in await ask_live(first)
    async with await connect(running):
        await wait_closed(second)
        assert b" 200 " in await ask_live(first)
    await first.aclose()
    await second.aclose()
    await running.wait_quiet()


async def test_an_idle_one_is_taken_before_one_whose_body_arrives(serve: Any) -> None:
    running = await serve(connections_max=2)
    arriving = await connect(running, HALF_A_BODY)
    idle = await connect(running)
    async with await connect(running, HALF_A_BODY):
        await wait_closed(idle)
        assert is_open(arriving)
        async with await connect(running):
            await wait_closed(arriving)
    await arriving.aclose()
    await idle.aclose()
    await running.wait_quiet()


async def test_a_crowd_of_half_bodies_pushes_out_none_that_has_just_come(serve: Any) -> None:
    """Whose request is on its way, and looks idle until it is there."""
    running = await serve(connections_max=3)
    arriving = [await connect(running, HALF_A_BODY) for _ in range(2)]
    new = await connect(running)
    async with await connect(running):
        await wait_closed(arriving[0])
        assert b" 200 " in await ask_live(new)
    for stream in (*arriving, new):
        await stream.aclose()
    await running.wait_quiet()


# With TLS there are no words without a handshake, of which there are too many then.
@pytest.mark.parametrize("http_server", ["native"])
async def test_one_that_is_being_answered_is_never_taken(serve: Any) -> None:
    running = await serve(say_hello_slowly, connections_max=2)
    streams = [await connect(running, running.post(stream=True)) for _ in range(2)]
    await running.wait_for(lambda: running.engine.running == 2)
    async with running.client() as client:
        response = await client.get("/live")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["code"] == "overloaded"
    assert running.engine.running == 2
    assert running.value("connections_taken_total") == 0
    for stream in streams:
        await stream.aclose()
    await running.wait_quiet()


async def test_live_is_answered_while_connections_hang_around(serve: Any) -> None:
    """However many idle and half-open connections there are, nobody else is kept out."""
    running = await serve(connections_max=64)
    held = [
        await running.connect() if number % 2 else await connect(running, HALF_A_HEAD)
        for number in range(200)
    ]
    for _ in range(20):
        async with await running.connect() as stream:
            assert b" 200 " in await ask_live(stream)
    assert running.value("connections", kind="http") <= 64
    for stream in held:
        await stream.aclose()
    await running.wait_quiet()


@pytest.mark.check
@pytest.mark.parametrize("http_server", ["native", "tls"])
async def test_2048_idle_connections_keep_nobody_out(serve: Any) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    running = await serve()
    held = [await running.connect() for _ in range(2048)]
    try:
        await running.wait_for(lambda: running.value("connections", kind="http") == 2048)
        for number in (0, 1000, 2047):
            assert b" 200 " in await ask_live(held[number])
        async with await running.connect() as one_more:
            assert b" 200 " in await ask_live(one_more)
        assert running.value("connections_taken_total") == 1
    finally:
        for stream in held:
            stream.socket.close()
        await running.wait_quiet()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
