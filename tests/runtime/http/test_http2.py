"""HTTP/2 without TLS: hypercorn would speak it on the same port, without a bound, so we do not."""

from __future__ import annotations

import json
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
import trio

BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()


async def ask(stream: trio.SocketStream, window: int) -> h2.connection.H2Connection:
    """Send one request; the server may answer with `window` bytes."""
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
    client.send_headers(
        1,
        [
            (":method", "POST"),
            (":path", "/v1/chat/completions"),
            (":scheme", "http"),
            (":authority", "x"),
        ],
    )
    client.send_data(1, BODY, end_stream=True)
    await stream.send_all(client.data_to_send())
    return client


async def test_it_is_refused_and_the_engine_is_not_asked(serve: Any) -> None:
    running = await serve()
    stream = await running.connect()
    client = await ask(stream, 65_535)
    headers: dict[bytes, bytes] = {}
    body, is_over = b"", False
    with trio.fail_after(5):
        while not is_over:
            for event in client.receive_data(await stream.receive_some()):
                if isinstance(event, h2.events.ResponseReceived):
                    headers |= {bytes(name): bytes(value) for name, value in event.headers or []}
                if isinstance(event, h2.events.DataReceived):
                    body += event.data
                is_over |= isinstance(event, h2.events.StreamEnded)
            await stream.send_all(client.data_to_send())
    assert headers[b":status"] == b"505"
    assert json.loads(body)["error"]["code"] == "http_version_not_supported"
    assert running.engine.requests == []
    await stream.aclose()
    await running.wait_quiet()


@pytest.mark.slow
async def test_a_client_that_grants_no_window_does_not_hold_the_stop_up(serve: Any) -> None:
    running = await serve()
    stream = await running.connect()
    await ask(stream, 0)
    await running.wait_for(lambda: running.value("connections", kind="http") == 1)
    running.service.stop()
    await running.wait_quiet()
    await stream.aclose()


async def test_an_upgrade_to_it_is_refused(serve: Any) -> None:
    running = await serve()
    stream = await running.connect()
    await stream.send_all(
        b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\n"
        b"upgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n\r\n"
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    )
    received = b""
    with trio.fail_after(5):
        while b"http_version_not_supported" not in received:
            received += await stream.receive_some()
    await stream.aclose()
    await running.wait_quiet()
