"""Clients that are silent or slow to send: heads, bodies and their time."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tests.transports.http.http1.served import (
    GET,
    HOST,
    Held,
    Served,
    echo_handler,
    holding,
    serving,
    settle,
)
from trinamo.runtime.http.bodies import Bodies, Body
from trinamo.runtime.http.exchanges import HttpExchange
from trinamo.runtime.http.status import BodyTimeoutError, BodyTooLargeError

Clock = trio.testing.MockClock
POST = b"POST /a HTTP/1.1\r\n" + HOST + b"content-length: 5\r\n\r\n"


async def over_after(served: Served) -> float:
    start = trio.current_time()
    while not served.is_over:
        await trio.sleep(0.5)
    return trio.current_time() - start


@pytest.mark.parametrize("pieces", [[], [b"GET /a HT"], [b"G", b"E", b"T"], [b"\r\n"] * 4])
async def test_a_head_has_its_time_dripping_or_not(
    pieces: list[bytes], autojump_clock: Clock
) -> None:
    async with serving(keep_alive_s=10) as served:
        for piece in pieces:
            await trio.sleep(2)
            await served.say(piece)
        await trio.sleep(9 - 2 * len(pieces))
        assert not served.is_over
        assert await over_after(served) < 2
        assert served.sent == b""


async def test_each_request_begins_the_time_anew(autojump_clock: Clock) -> None:
    async with serving(keep_alive_s=10) as served:
        for _ in range(5):
            await served.say(GET)
            await trio.sleep(9)
        assert not served.is_over
        assert await over_after(served) < 2


async def test_an_answer_may_take_longer_than_a_head(autojump_clock: Clock) -> None:
    held = Held()
    async with holding(held, keep_alive_s=1) as served:
        await served.say(GET)
        await trio.sleep(100)
        held.exchange.respond(200, b"", [])
        held.may_end.set()
        await settle()
        assert b" 200 " in served.sent
        assert not served.is_over
        assert await over_after(served) < 2


@pytest.mark.parametrize(
    "head", [b"content-length: 101", b"transfer-encoding: chunked"], ids=["announced", "chunked"]
)
async def test_a_body_over_the_limit_is_refused(head: bytes) -> None:
    errors: list[Exception] = []

    async def read(exchange: HttpExchange) -> None:
        with Body(Bodies(1000)) as body:
            try:
                await exchange.read_body(body, bytes_max=100, timeout_s=10)
            except BodyTooLargeError as error:
                errors.append(error)
        exchange.respond(413, b"", [])

    async with serving(handlers={(b"POST", b"/a"): read}) as served:
        await served.say(b"POST /a HTTP/1.1\r\n" + HOST + head + b"\r\n\r\n")
        assert len(errors) == ("length" in head.decode())
        await served.say(b"64\r\n" + b"x" * 100)
        sent = await served.say(b"\r\n1\r\nx\r\n")
    assert len(errors) == 1
    assert sent.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in sent


async def test_a_body_has_its_time(autojump_clock: Clock) -> None:
    errors: list[float] = []

    async def read(exchange: HttpExchange) -> None:
        with Body(Bodies(1000)) as body:
            try:
                await exchange.read_body(body, bytes_max=100, timeout_s=10)
            except BodyTimeoutError:
                errors.append(trio.current_time())
        exchange.respond(408, b"", [])

    async with serving(handlers={(b"POST", b"/a"): read}) as served:
        start = trio.current_time()
        await served.say(POST, b"h")
        for _ in range(3):
            await trio.sleep(3)
            await served.say(b"e")
        await trio.sleep(3)
    assert errors == [start + 10]


async def test_a_body_in_pieces_is_whole_and_counted_as_it_arrives() -> None:
    bodies = Bodies(1 << 30)
    held: list[int] = []
    got: list[bytes] = []

    async def read(exchange: HttpExchange) -> None:
        with Body(bodies) as body:
            got.append(bytes(await exchange.read_body(body, bytes_max=1 << 30, timeout_s=10)))
        await echo_handler(exchange)

    async with serving(handlers={(b"POST", b"/a"): read}) as served:
        size = 1_000_000
        await served.say(b"POST /a HTTP/1.1\r\n" + HOST + b"content-length: %d\r\n\r\n" % size)
        for start in range(0, size, 100_000):
            await served.say(bytes([65 + start // 100_000]) * 100_000)
            held.append(bodies.bytes_held)
    assert got == [b"".join(bytes([65 + number]) * 100_000 for number in range(10))]
    assert held[:-1] == sorted(held[:-1])
    assert 0 < held[0] <= 100_000
    assert held[-1] == 0
