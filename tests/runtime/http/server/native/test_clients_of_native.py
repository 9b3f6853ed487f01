"""Clients of our own server that are slow, silent or gone, and the end of the server."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from tests.runtime.http.server.native.served import (
    GET,
    HOST,
    Served,
    echo_handler,
    serving,
    settle,
)
from trinamo.runtime.http.bodies import Bodies, Body
from trinamo.runtime.http.exchanges import ClientGoneError, HttpExchange
from trinamo.runtime.http.server.native import connection, output
from trinamo.runtime.http.status import BodyTimeoutError, BodyTooLargeError

Clock = trio.testing.MockClock
POST = b"POST /a HTTP/1.1\r\n" + HOST + b"content-length: 5\r\n\r\n"


class Held:
    """A handler that answers when a test says so."""

    def __init__(self) -> None:
        self.exchange: Any = None
        self.may_end = trio.Event()
        self.gone = self.rooms = self.ended = 0

    async def __call__(self, exchange: HttpExchange) -> None:
        self.exchange = exchange
        exchange.on_gone(self._left)
        exchange.on_room(self._has_room)
        await self.may_end.wait()
        self.ended += 1

    def _left(self) -> None:
        self.gone += 1
        self.may_end.set()

    def _has_room(self) -> None:
        self.rooms += 1


def holding(held: Held, **settings: Any) -> Any:
    return serving(handlers={(b"GET", b"/a"): held, (b"POST", b"/a"): held}, **settings)


# --- silence -------------------------------------------------------------------------------------


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


# --- leaving -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["fin", "rst", "cut"])
@pytest.mark.parametrize("pipelined", [b"", GET, b"GET /half"])
@pytest.mark.parametrize("is_started", [False, True])
async def test_who_leaves_is_noticed(way: str, pipelined: bytes, is_started: bool) -> None:
    """Whatever was sent behind the request. What is written afterwards is dropped."""
    held = Held()
    async with holding(held) as served:
        await served.say(GET + pipelined)
        if is_started:
            held.exchange.start(200, [])
            assert held.exchange.write(b"one")
        before = served.sent
        if way == "fin":
            served.socket.arrive(b"")
        elif way == "rst":
            served.socket.break_off()
        else:
            served.connection.abort()
        await settle()
        assert (held.gone, held.exchange.is_gone, held.ended) == (1, True, 1)
        if not is_started:
            held.exchange.start(200, [])
        assert held.exchange.write(b"two")
        held.exchange.finish()
        await held.exchange.sent()
        assert served.sent == before
        assert served.is_over
        held.exchange.on_gone(held._left)
        assert held.gone == 2, "told at once, who asks late"


async def test_leaving_within_a_body_is_said_to_who_reads_it() -> None:
    errors: list[Exception] = []

    async def read(exchange: HttpExchange) -> None:
        with Body(Bodies(1000)) as body:
            try:
                await exchange.read_body(body, bytes_max=100, timeout_s=10)
            except ClientGoneError as error:
                errors.append(error)

    async with serving(handlers={(b"POST", b"/a"): read}) as served:
        await served.say(POST, b"hel", b"")
        assert served.is_over
    assert len(errors) == 1


async def test_what_was_written_whole_is_sent_to_who_only_ends_his_side() -> None:
    held = Held()
    async with holding(held) as served:
        served.socket.room = 10
        await served.say(GET)
        held.exchange.respond(200, b"x" * 1000, [])
        held.may_end.set()
        await served.end()
        assert not served.is_over
        served.socket.make_room(10_000)
        await settle()
        assert served.sent.endswith(b"x" * 1000)
        assert served.is_over
    assert held.gone == 0


async def test_a_client_that_pipelines_without_end_is_cut_off(autojump_clock: Clock) -> None:
    """Beyond what is read ahead its FIN could not be seen, so it does not get that far."""
    held = Held()
    async with holding(held, write_timeout_s=7) as served:
        start = trio.current_time()
        await served.say(GET, b"x" * connection.READ_AHEAD_BYTES_MAX, b"y")
        assert held.gone == 0
        await held.may_end.wait()
        assert trio.current_time() == start + 7
        assert served.socket.is_closed


async def test_room_in_time_keeps_it(autojump_clock: Clock) -> None:
    may_answer = trio.Event()

    async def answer_late(exchange: HttpExchange) -> None:
        await may_answer.wait()
        exchange.respond(200, b"", [])

    handlers = {(b"GET", b"/a"): answer_late}
    async with serving(handlers=handlers, write_timeout_s=7) as served:
        many = connection.READ_AHEAD_BYTES_MAX // len(GET) + 1
        await served.say(GET, GET * many, GET)
        await trio.sleep(5)
        may_answer.set()
        await trio.sleep(5)
        assert served.sent.count(b"HTTP/1.1 200") == many + 2
        assert not served.is_over


# --- bodies --------------------------------------------------------------------------------------


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


# --- slow readers --------------------------------------------------------------------------------


async def test_who_writes_is_told_to_stop_and_to_go_on() -> None:
    held = Held()
    async with holding(held, backlog_bytes_max=1000) as served:
        await served.say(GET)
        served.socket.room = 0
        held.exchange.start(200, [])
        assert held.exchange.write(b"x" * 500)
        assert not held.exchange.write(b"x" * 1000)
        served.socket.make_room(300)
        await settle()
        assert held.rooms == 0
        assert not held.exchange.write(b"x")
        served.socket.make_room(1200)
        await settle()
        assert held.rooms == 1
        assert held.exchange.write(b"y")
        held.exchange.finish()
        served.socket.make_room(10_000)
        held.may_end.set()
        await settle()
        body = served.sent.partition(b"\r\n\r\n")[2]
        parts = [
            b"%x\r\n%b\r\n" % (len(part), part) for part in (b"x" * 500, b"x" * 1000, b"x", b"y")
        ]
        assert body == b"".join(parts) + b"0\r\n\r\n"


async def test_who_is_told_of_room_may_fill_it_at_once() -> None:
    """The task that flushes tells of it, and goes on with what is written then."""
    held = Held()
    async with holding(held, backlog_bytes_max=1000) as served:
        await served.say(GET)
        served.socket.room = 0
        held.exchange.start(200, [])
        assert not held.exchange.write(b"a" * 2000)
        pieces = [b"b" * 3000, b"c" * 3000]

        def refill() -> None:
            if pieces:
                held.exchange.write(pieces.pop(0))
            else:
                held.exchange.finish()
                held.may_end.set()

        held.exchange.on_room(refill)
        while not served.socket.has_ended and held.ended == 0:
            served.socket.make_room(700)
            await settle()
        served.socket.make_room(1000)
        await settle()
        body = served.sent.partition(b"\r\n\r\n")[2]
        parts = [
            b"%x\r\n%b\r\n" % (len(part), part) for part in (b"a" * 2000, b"b" * 3000, b"c" * 3000)
        ]
        assert body == b"".join(parts) + b"0\r\n\r\n"


async def test_a_reader_that_takes_nothing_is_cut_off(autojump_clock: Clock) -> None:
    held = Held()
    async with holding(held, write_timeout_s=7, backlog_bytes_max=1000) as served:
        start = trio.current_time()
        await served.say(GET)
        served.socket.room = 0
        held.exchange.start(200, [])
        assert not held.exchange.write(b"x" * 2000)
        await held.may_end.wait()
        assert trio.current_time() == start + 7
        assert (held.gone, held.rooms) == (1, 1)
        await settle()
        assert served.is_over


async def test_progress_is_so_much_in_the_time(autojump_clock: Clock) -> None:
    """Bytes that trickle are none; a piece in time begins the time anew."""
    held = Held()
    async with holding(held, write_timeout_s=10, backlog_bytes_max=1 << 30) as served:
        await served.say(GET)
        served.socket.room = 0
        held.exchange.start(200, [])
        held.exchange.write(b"x" * 10_000_000)
        for _ in range(5):
            await trio.sleep(9)
            served.socket.make_room(output.WRITE_BYTES)
        await settle()
        assert held.gone == 0
        for _ in range(4):
            await trio.sleep(3)
            served.socket.make_room(10)
        assert held.gone == 1


async def test_the_next_request_waits_until_the_last_answer_is_sent() -> None:
    """So what is kept is bounded by one answer, however many requests are pipelined."""
    async with serving(handlers={(b"GET", b"/a"): echo_handler}) as served:
        served.socket.room = 50
        await served.say(GET * 3)
        assert len(served.sent) == 50
        served.socket.make_room(1000)
        await settle()
        assert served.sent.count(b"HTTP/1.1 200") == 3


async def test_a_write_that_fails_ends_the_request() -> None:
    held = Held()
    async with holding(held) as served:
        await served.say(GET)
        served.socket.is_broken = True
        held.exchange.start(200, [])
        assert held.exchange.write(b"one")
        assert held.gone == 1
        await settle()
        assert served.is_over


# --- the end of the server -----------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"GET /ha", GET])
async def test_an_idle_connection_is_closed_at_once(data: bytes) -> None:
    async with serving() as served:
        await served.say(data) if data else None
        await served.driver.close_idle()
        await settle()
        assert served.is_over


async def test_one_in_flight_is_answered_and_closed() -> None:
    held = Held()
    async with holding(held) as served:
        await served.say(GET)
        await served.driver.close_idle()
        await settle()
        assert not served.is_over
        held.exchange.respond(200, b"whole", [])
        held.may_end.set()
        await settle()
        assert b"connection: close" in served.sent
        assert served.sent.endswith(b"whole")
        assert served.is_over


async def test_one_that_nobody_reads_is_aborted_at_once() -> None:
    held = Held()
    async with holding(held) as served:
        await served.say(GET)
        served.socket.room = 0
        held.exchange.respond(200, b"x" * 1000, [])
        served.connection.abort()
        await settle()
        assert served.is_over
        assert held.gone == 1
