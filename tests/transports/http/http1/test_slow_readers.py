"""Clients that are slow to take their answers."""

from __future__ import annotations

import trio
import trio.testing

from tests.transports.http.http1.served import (
    GET,
    Held,
    echo_handler,
    holding,
    serving,
    settle,
)
from trinamo.transports.http import output

Clock = trio.testing.MockClock


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
