"""HTTP/2 without TLS is not spoken: it is told so in HTTP/1.1 at the first bytes, and closed."""

from __future__ import annotations

import json
from typing import Any

import h2.config
import h2.connection
import pytest
import trio

pytestmark = pytest.mark.check

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


def open_http2() -> bytes:
    """What a client sends first, with one request."""
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    names = {":method": "POST", ":path": "/live", ":scheme": "http", ":authority": "localhost"}
    client.send_headers(1, list(names.items()), end_stream=True)
    return client.data_to_send()


async def read_to_end(stream: trio.SocketStream) -> bytes:
    received = b""
    with trio.fail_after(120):
        while data := await stream.receive_some():
            received += data
    return received


@pytest.mark.parametrize(
    "data",
    [PREFACE[:18], PREFACE, PREFACE + SETTINGS, PREFACE + SETTINGS * 1000, open_http2()],
    ids=["half a preface", "preface", "settings", "a flood", "a request"],
)
async def test_it_is_refused_and_closed_at_its_preface(serve: Any, data: bytes) -> None:
    running = await serve()
    stream = await running.connect()
    await stream.send_all(data)
    head, _, body = (await read_to_end(stream)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 505 HTTP Version Not Supported\r\n")
    assert json.loads(body)["error"]["code"] == "http_version_not_supported"
    assert running.engine.requests == []
    await stream.aclose()
    await running.wait_quiet()


async def test_a_client_that_stays_is_closed_all_the_same(
    serve: Any, autojump_clock: trio.testing.MockClock
) -> None:
    """Whoever opens HTTP/2 and neither reads nor leaves holds no connection."""
    running = await serve()
    stream = await running.connect()
    await stream.send_all(PREFACE + SETTINGS)
    await running.wait_for(lambda: running.value("connections", kind="http") == 1)
    await running.wait_quiet()
    await stream.aclose()


async def test_an_upgrade_to_it_is_ignored(serve: Any) -> None:
    running = await serve()
    stream = await running.connect()
    await stream.send_all(
        b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade, HTTP2-Settings\r\n"
        b"upgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n\r\n" + PREFACE
    )
    received = await read_to_end(stream)
    assert received.startswith(b"HTTP/1.1 200 ")
    assert b'{"status":"live"}' in received
    # What follows is read as the next request of HTTP/1.1, which it is not.
    assert received.count(b"HTTP/1.1 505 ") == 1
    await stream.aclose()
    await running.wait_quiet()
