"""Requests on one connection of our own: framing, order, keep-alive, and applications that fail."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trio

from tests.transports.http.http1.served import (
    DATE,
    GET,
    HOST,
    LAST,
    echo,
    echo_handler,
    serving,
    settle,
)
from trinamo.runtime.http.exchanges import HttpExchange
from trinamo.transports.http.connections import LINGER_MAX_S, LINGER_S
from trinamo.transports.http.http1 import connection

KEPT = b"HTTP/1.1 200 OK\r\n" + DATE + b"content-length: %d\r\n\r\n%b"
CLOSED = b"HTTP/1.1 200 OK\r\n" + DATE + b"content-length: %d\r\nconnection: close\r\n\r\n%b"


def kept(body: bytes) -> bytes:
    return KEPT % (len(body), body)


def closed(body: bytes) -> bytes:
    return CLOSED % (len(body), body)


def post(body: bytes, *lines: bytes) -> bytes:
    more = b"".join(line + b"\r\n" for line in lines)
    return (
        b"POST /a HTTP/1.1\r\n"
        + HOST
        + more
        + b"content-length: %d\r\n\r\n%b"
        % (
            len(body),
            body,
        )
    )


async def test_the_connection_is_kept_until_a_client_says_otherwise() -> None:
    async with serving() as served:
        sent = await served.say(GET, post(b"hello"), LAST)
        assert sent == kept(b"GET /a ") + kept(b"POST /a hello") + closed(b"GET /last ")
        assert served.is_over
        assert served.phases == ["answering", "idle"] * 3


async def test_a_handler_is_found_by_its_method_and_path_and_nothing_else() -> None:
    async with serving(handlers={(b"POST", b"/a"): echo_handler}) as served:
        sent = await served.say(post(b"x"), post(b"x").replace(b"/a", b"/a?b"), GET, LAST)
        heads = [answer.partition(b"\r\n\r\n")[0] for answer in sent.split(b"HTTP/1.1 ")[1:]]
    assert [b"text/plain" in head for head in heads] == [True, True, False, False]


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving() as served:
        sent = await served.say(GET + post(b"hello") * 2 + LAST + GET)
        assert sent == kept(b"GET /a ") + kept(b"POST /a hello") * 2 + closed(b"GET /last ")
        assert served.socket.has_ended


@pytest.mark.parametrize(
    ("line", "head", "is_kept"),
    [
        (b"", b"connection: close\r\n", False),
        (b"connection: keep-alive\r\n", b"connection: keep-alive\r\n", True),
    ],
)
async def test_http_1_0_keeps_what_it_asks_to_keep(line: bytes, head: bytes, is_kept: bool) -> None:
    async with serving() as served:
        sent = await served.say(b"GET /a HTTP/1.0\r\n" + line + b"\r\n")
        assert sent == b"HTTP/1.1 200 OK\r\n" + DATE + b"content-length: 7\r\n" + head + (
            b"\r\nGET /a "
        )
        assert served.is_over != is_kept


async def stream(_: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for piece in (b"", b"one ", b"two"):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body"})


async def test_a_body_of_unknown_length_is_sent_in_chunks() -> None:
    async with serving(stream) as served:
        head = b"HTTP/1.1 200 OK\r\n" + DATE + b"transfer-encoding: chunked\r\n\r\n"
        assert await served.say(GET) == head + b"4\r\none \r\n3\r\ntwo\r\n0\r\n\r\n"


async def test_to_http_1_0_it_ends_with_the_connection() -> None:
    async with serving(stream) as served:
        sent = await served.say(b"GET /a HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
        assert sent == b"HTTP/1.1 200 OK\r\n" + DATE + b"connection: close\r\n\r\none two"
        assert served.is_over


@pytest.mark.parametrize("app", [stream, echo])
async def test_an_answer_to_head_has_no_body_and_the_next_is_read(app: Any) -> None:
    async with serving(app) as served:
        head, _, rest = (await served.say(b"HEAD /a HTTP/1.1\r\n" + HOST + b"\r\n")).partition(
            b"\r\n\r\n"
        )
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert rest == b""
        assert (b"content-length: 8" if app is echo else b"chunked") in head
        assert (await served.say(GET)).count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_that_has_no_body_says_nothing_of_one(status: int) -> None:
    async def empty(exchange: HttpExchange) -> None:
        exchange.start(status, [])
        exchange.finish()

    async with serving(handlers={(b"GET", b"/a"): empty}) as served:
        sent = await served.say(GET)
    assert b"content-length" not in sent
    assert b"chunked" not in sent


async def test_who_expects_it_is_told_to_continue_when_the_body_is_asked_for() -> None:
    async with serving() as served:
        request = post(b"hello", b"expect: 100-continue")
        head, body = request[:-5], request[-5:]
        assert await served.say(head) == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert served.phases == ["arriving"]
        assert (await served.say(body)).endswith(kept(b"POST /a hello"))


async def test_whoever_sends_the_body_at_once_need_not_be_told() -> None:
    async with serving() as served:
        assert await served.say(post(b"hello", b"expect: 100-continue")) == kept(b"POST /a hello")


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": b"no"})


async def test_an_answer_before_the_body_s_end_is_the_last_and_the_rest_is_dropped(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Nor is its client told to continue. A client that goes on sending is cut off in the end."""
    async with serving(refuse) as served:
        sent = await served.say(post(b"hello", b"expect: 100-continue")[:-5])
        assert sent.startswith(b"HTTP/1.1 413 ")
        assert sent.endswith(b"connection: close\r\n\r\nno")
        assert served.socket.has_ended
        assert await served.say(b"hello", GET, b"x" * 1_000_000) == sent
        assert not served.is_over
        await trio.sleep(LINGER_S + 0.1)
        assert served.is_over


async def test_a_client_that_sends_on_behind_its_answer_is_read_as_long_as_something_comes(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A slow line is to see the answer, too; whoever sends for ever is cut off all the same."""
    async with serving(refuse) as served:
        sent = await served.say(post(b"hello")[:-5])
        for _ in range(int(LINGER_MAX_S / (LINGER_S / 2)) - 1):
            await trio.sleep(LINGER_S / 2)
            assert not served.is_over
            assert await served.say(b"x") == sent
        await trio.sleep(LINGER_S)
        assert served.is_over


async def test_a_body_that_nobody_reads_is_not_taken_for_the_next_request() -> None:
    async with serving(stream) as served:
        sent = await served.say(post(GET))
        assert sent.count(b"HTTP/1.1 ") == 1
        assert (await served.say(GET)).count(b"HTTP/1.1 ") == 2


async def test_a_faulty_chunk_is_refused_and_its_application_told() -> None:
    left: list[str] = []

    async def read(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] == "http.request":
            pass
        left.append(message["type"])
        await echo(scope, receive, send)

    async with serving(read) as served:
        head = b"POST /a HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n"
        sent = await served.say(head, b"5\r\nhel", b"lo\r\n", b"zzz\r\n", GET)
        assert sent.startswith(b"HTTP/1.1 400 ")
        assert sent.count(b"HTTP/1.1 ") == 1
        await served.end()
        assert served.is_over
    assert left == ["http.disconnect"]


async def raise_first(scope: Any, receive: Any, send: Any) -> None:
    raise ZeroDivisionError("secret")


async def raise_with_a_status(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    raise ZeroDivisionError("secret")


async def answer_nothing(scope: Any, receive: Any, send: Any) -> None:
    await receive()


@pytest.mark.parametrize("app", [raise_first, raise_with_a_status, answer_nothing])
async def test_an_application_that_fails_before_its_answer_is_a_500(
    app: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(app) as served:
        sent = await served.say(GET)
        assert sent.startswith(b"HTTP/1.1 500 ")
        assert b"secret" not in sent
        assert (await served.say(GET)).count(b"HTTP/1.1 500 ") == 2
    records = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(records) == 2


async def raise_later(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"one", "more_body": True})
    raise ZeroDivisionError


async def write_too_little(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-length", b"4")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"one", "more_body": True})
    await send({"type": "http.response.body"})


async def write_too_much(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-length", b"4")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"one", "more_body": True})
    await send({"type": "http.response.body", "body": b" two"})


@pytest.mark.parametrize("app", [raise_later, write_too_little, write_too_much])
async def test_an_application_that_fails_within_its_answer_ends_the_connection(app: Any) -> None:
    """A client sees that it is not whole: no last chunk, or too few bytes."""
    async with serving(app) as served:
        sent = await served.say(GET, GET)
        assert sent.count(b"HTTP/1.1 ") == 1
        assert b"one" in sent
        assert not sent.endswith((b"0\r\n\r\n", b" two"))
        assert served.is_over
        assert served.socket.is_closed


async def test_a_header_that_would_be_two_is_not_sent() -> None:
    async def split(exchange: HttpExchange) -> None:
        exchange.respond(200, b"", [(b"x-a", b"b\r\nset-cookie: c")])

    async with serving(handlers={(b"GET", b"/a"): split}) as served:
        sent = await served.say(GET)
    assert sent.startswith(b"HTTP/1.1 500 ")
    assert b"set-cookie" not in sent


async def test_a_connection_ends_after_its_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "REQUESTS_MAX", 3)
    async with serving() as served:
        sent = await served.say(GET, GET, GET)
        assert sent == kept(b"GET /a ") * 2 + closed(b"GET /a ")
        assert served.is_over


async def test_asgi_is_told_what_was_asked() -> None:
    scopes: list[Any] = []

    async def remember(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        await echo(scope, receive, send)

    async with serving(remember) as served:
        await served.say(b"GET /a%20b/%C3%A4?c=%20 HTTP/1.1\r\n" + HOST + b"X-D: e\r\n\r\n")
    (scope,) = scopes
    assert (scope["type"], scope["http_version"], scope["method"]) == ("http", "1.1", "GET")
    assert (scope["path"], scope["raw_path"]) == ("/a b/ä", b"/a%20b/%C3%A4")
    assert scope["query_string"] == b"c=%20"
    assert scope["headers"] == [(b"host", b"localhost"), (b"x-d", b"e")]
    assert (scope["client"], scope["server"]) == (("192.0.2.1", 4711), ("127.0.0.1", 8787))


async def test_an_application_that_never_waits_holds_nobody_up() -> None:
    async def endless(exchange_scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x", "more_body": True})

    async with serving(endless) as served:
        served.socket.arrive(GET)
        for _ in range(10):
            await trio.lowlevel.checkpoint()
        served.socket.room = 0
        await settle()
        assert b"x" in served.sent
