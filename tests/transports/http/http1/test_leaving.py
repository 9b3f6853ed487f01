"""Clients that leave in the middle of something, and a server that ends."""

from __future__ import annotations

import errno

import pytest
import trio
import trio.testing

from tests.transports.http.http1.served import (
    GET,
    HOST,
    Held,
    holding,
    serving,
    settle,
)
from trinamo.runtime.http.bodies import Bodies, Body
from trinamo.runtime.http.exchanges import ClientGoneError, HttpExchange
from trinamo.transports.http.http1 import connection
from trinamo.transports.http.http1.connection import PROCESSING

Clock = trio.testing.MockClock
POST = b"POST /a HTTP/1.1\r\n" + HOST + b"content-length: 5\r\n\r\n"


@pytest.mark.parametrize("way", ["fin", "rst", "cut"])
@pytest.mark.parametrize("pipelined", [b"", GET, b"GET /half"])
@pytest.mark.parametrize("is_started", [False, True])
async def test_who_leaves_is_noticed(way: str, pipelined: bytes, is_started: bool) -> None:
    """Whatever was sent behind the request. What is written afterwards is dropped."""
    held = Held()
    async with holding(held) as served:
        await served.say(POST + b"hello" + pipelined)
        if is_started:
            held.exchange.start(200, [])
            assert held.exchange.write(b"one")
        before = served.sent
        if way == "fin":
            served.socket.arrive(b"")
            if not is_started:
                # He may only have no more to send: what he is sent then, his kernel answers with a reset.
                await settle()
                before += PROCESSING
                assert (held.gone, served.sent) == (0, before)
                served.socket.error = errno.EPIPE
                await trio.testing.wait_all_tasks_blocked()
                with trio.fail_after(120):
                    while not held.gone:
                        await trio.sleep(connection._RESET_LOOK_S)
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


async def test_a_get_is_answered_though_its_sender_has_closed_his_side() -> None:
    """Probes end so, and `nc -N`: where an answer took a moment, they got nothing."""
    held = Held()
    async with holding(held) as served:
        await served.say(GET + GET, b"")
        assert (held.gone, served.is_over) == (0, False)
        held.exchange.respond(200, b"two", [])
        held.may_end.set()
        await settle()
        assert served.sent.endswith(b"two")
        assert served.sent.count(b"HTTP/1.1") == 1
        assert served.is_over


async def test_one_who_closes_his_side_of_a_stream_has_left_a_get_too() -> None:
    """As a page that is closed: what is sent to it would not show that for long."""
    held = Held()
    async with holding(held) as served:
        await served.say(GET)
        held.exchange.start(200, [])
        held.exchange.write(b"one")
        await served.end()
        assert (held.gone, served.is_over) == (1, True)


async def test_who_left_altogether_behind_a_get_is_noticed_by_a_write() -> None:
    held = Held()
    async with holding(held) as served:
        await served.say(GET, b"")
        held.exchange.start(200, [])
        served.socket.break_off()
        assert held.exchange.write(b"one")
        await settle()
        assert (held.gone, held.ended) == (1, 1)
        assert served.is_over


async def test_half_a_body_of_a_get_is_waited_for_no_longer_than_its_sender_sends() -> None:
    held = Held()
    async with holding(held) as served:
        await served.say(GET.replace(HOST, HOST + b"content-length: 5\r\n") + b"hel", b"")
        assert (held.gone, served.is_over) == (1, True)


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


async def test_a_client_that_pipelines_a_lot_keeps_the_answer_that_it_takes(
    autojump_clock: Clock,
) -> None:
    """Before: a long stream was cut off after `write_timeout_s`, though its client took all of it."""
    held = Held()
    async with holding(held, write_timeout_s=7) as served:
        await served.say(GET, b"x" * connection.READ_AHEAD_BYTES_MAX, b"y")
        held.exchange.start(200, [])
        for _ in range(10):
            await trio.sleep(5)
            assert held.exchange.write(b"still here")
            assert held.gone == 0
        start = trio.current_time()
        await held.may_end.wait()
        assert 7 <= trio.current_time() - start <= 14
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


@pytest.mark.parametrize("data", [b"", b"GET /ha", GET])
async def test_an_idle_connection_is_closed_at_once(data: bytes) -> None:
    async with serving() as served:
        await served.say(data) if data else None
        served.connection.close_when_idle()
        await settle()
        assert served.is_over


async def test_one_in_flight_is_answered_and_closed() -> None:
    held = Held()
    async with holding(held) as served:
        await served.say(GET)
        served.connection.close_when_idle()
        await settle()
        assert not served.is_over
        held.exchange.respond(200, b"whole", [])
        held.may_end.set()
        await settle()
        assert b"connection: close" in served.sent
        assert served.sent.endswith(b"whole")
        assert served.is_over


async def test_one_that_retires_ends_with_its_next_answer_and_says_so() -> None:
    """Not with one whose head has not said so, and not while it is idle: its client would run into the close."""
    held = Held()
    async with holding(held) as served:
        await served.say(GET)
        held.exchange.start(200, [])
        held.exchange.write(b"half")
        served.connection.retire()
        held.exchange.finish(b"whole")
        held.may_end.set()
        await settle()
        assert b"connection: close" not in served.sent
        assert not served.is_over
        held.may_end = trio.Event()
        await served.say(GET)
        held.exchange.respond(200, b"next", [])
        held.may_end.set()
        await settle()
        assert served.sent.count(b"connection: close") == 1
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
