"""The server below the routes: listening, limits, garbage, and readers that do not read."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
from collections.abc import AsyncGenerator
from typing import Any

import h11
import httpx
import msgspec
import pytest
import trio
import trio.lowlevel

from tests.sse import parse_events
from trinamo import HttpService
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.errors import ConfigError
from trinamo.runtime.protocol.openai.answers import DONE_DATA, ChatChunk
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason, GenerateRequest
from trinamo.transports.http.listening import open_listeners

# Makes a generator of a function that yields nothing.
NO_DELTAS: list[Delta] = []

JSON = {"content-type": "application/json"}


async def read_to_end(stream: trio.SocketStream) -> bytes:
    received = b""
    with trio.fail_after(120):
        try:
            while data := await stream.receive_some():
                received += data
        except trio.BrokenResourceError:
            pass
    return received


async def test_a_port_in_use_is_explained() -> None:
    (taken,) = await open_listeners("127.0.0.1", 0)
    port = taken.socket.getsockname()[1]
    with pytest.raises(ConfigError, match=f"port {port} is in use; stop the program"):
        await open_listeners("127.0.0.1", port)
    await taken.aclose()


async def test_an_address_of_another_machine_is_explained() -> None:
    with pytest.raises(ConfigError, match="no address of this machine"):
        await open_listeners("192.0.2.1", 0)


async def test_an_unknown_host_is_explained() -> None:
    with pytest.raises(ConfigError, match="the host 'no such host' is not known here"):
        await open_listeners("no such host", 0)


async def test_all_addresses_of_a_host_share_one_port() -> None:
    listeners = await open_listeners("localhost", 0)
    assert len({listener.socket.getsockname()[1] for listener in listeners}) == 1
    for listener in listeners:
        await listener.aclose()


@pytest.mark.parametrize("reuse_port", [False, True])
async def test_two_colons_are_the_addresses_of_both_families(
    serve: Any, *, reuse_port: bool
) -> None:
    running = await serve(host="::", reuse_port=reuse_port)
    for host in ("127.0.0.1", "[::1]"):
        url = running.url.replace("127.0.0.1", host)
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=120) as client:
            response = await client.get(f"{url}/live")
        assert response.json() == {"status": "live"}
    await running.wait_quiet()


async def test_it_serves_ipv6(serve: Any) -> None:
    running = await serve(host="::1")
    url = running.url.replace("127.0.0.1", "[::1]")
    async with httpx.AsyncClient(trust_env=False, verify=False, timeout=120) as client:
        response = await client.get(f"{url}/live")
    assert response.json() == {"status": "live"}
    await running.wait_quiet()


def test_the_defaults_are_loopback_and_8787() -> None:
    config = HttpService.builder().build().config
    assert (config.host, config.port) == ("127.0.0.1", 8787)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"port": 65536}, r"<= 65535 - at `\$.port`"),
        ({"keep_alive_s": -1}, r"\$.keep_alive_s"),
        ({"colour": "red"}, "colour"),
        ({"on_disconnect": "sulk"}, "'sulk'"),
    ],
)
def test_a_wrong_setting_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HttpService.builder().config(**changes).build()


def test_the_builder_reads_as_in_the_seeds() -> None:
    service = (
        HttpService.builder()
        .port(8080)
        .host("0.0.0.0")
        .enable_chat_endpoints(True)
        .enable_cmpl_endpoints(False)
        .build()
    )
    assert (service.config.port, service.config.host) == (8080, "0.0.0.0")
    assert not service.config.enable_cmpl_endpoints


@pytest.mark.parametrize("disabled", ["chat", "completions"])
async def test_a_disabled_endpoint_says_what_works_in_its_place(serve: Any, disabled: str) -> None:
    setting = {"chat": "enable_chat_endpoints", "completions": "enable_cmpl_endpoints"}[disabled]
    running = await serve(**{setting: False})
    async with running.client() as client:
        chat = await client.post("/v1/chat/completions", json={"messages": []})
        completions = await client.post("/v1/completions", json={})
    # Not 404: a proxy that is told so puts the model aside for everybody.
    assert chat.status_code == completions.status_code == 400
    code = "unsupported_endpoint"
    assert (chat.json()["error"]["code"] == code) == (disabled == "chat")
    assert (completions.json()["error"]["code"] == code) == (disabled == "completions")


@pytest.mark.parametrize("size", [33_000, 60_000, 200_000])
async def test_a_head_over_the_limit_is_refused_at_any_size(serve: Any, size: int) -> None:
    running = await serve(header_bytes_max=16_000)
    stream = await running.connect()
    head = b"GET /live HTTP/1.1\r\nhost: localhost\r\nx-long: " + b"a" * size + b"\r\n\r\n"
    async with trio.open_nursery() as nursery:

        async def send() -> None:
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.send_all(head)

        nursery.start_soon(send)
        assert b" 431 " in await read_to_end(stream)
    await stream.aclose()
    await running.wait_quiet()


@pytest.mark.parametrize(
    "garbage", [b"\x00\xff" * 500 + b"\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00"]
)
async def test_garbage_is_answered_with_400_and_affects_nobody_else(
    serve: Any, garbage: bytes
) -> None:
    running = await serve(keep_alive_s=6)
    stream = await running.connect()
    await stream.send_all(garbage)
    received = await read_to_end(stream)
    assert not received or received.startswith(b"HTTP/1.1 400 ")
    await stream.aclose()
    async with running.client() as client:
        assert (await client.get("/live")).status_code == 200
    await running.wait_quiet()


async def test_clients_that_reset_at_once_leave_nothing(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    running = await serve()
    for _ in range(50):
        stream = await running.connect()
        linger = struct.pack("ii", 1, 0)
        stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        stream.socket.close()
    async with running.client() as client:
        assert (await client.get("/live")).status_code == 200
    await running.wait_quiet()
    assert not [record for record in caplog.records if record.name == "trinamo.http"]


async def test_a_head_that_never_ends_is_cut_off(serve: Any) -> None:
    running = await serve(keep_alive_s=0.02)
    stream = await running.connect()
    await stream.send_all(b"GET /live HTTP/1.1\r\nhost:")
    assert await read_to_end(stream) == b""
    await stream.aclose()
    await running.wait_quiet()


async def test_a_reader_that_does_not_read_is_cut_off(serve: Any) -> None:
    """hypercorn shields its sends, so only the connection itself can end this."""

    async def tokens_for_ever(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        while True:
            yield Delta("x" * 10_000, [1])
            await trio.lowlevel.checkpoint()

    running = await serve(tokens_for_ever, write_timeout_s=0.1)
    stream = await running.connect()
    await stream.send_all(running.post(stream=True))
    await running.wait_for(lambda: bool(running.engine.contexts))
    await running.wait_quiet()
    assert running.engine.contexts[0].kill_reason is Reason.CLIENT_DISCONNECT
    await stream.aclose()


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_an_answer_that_nobody_reads_is_no_success(serve: Any, *, is_streamed: bool) -> None:
    """It was made whole, and sent as far as the buffers went; the client never had it."""

    async def much(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        yield Delta("x" * 20_000_000, [1], FinishReason.STOP)

    running = await serve(much, write_timeout_s=0.1, backlog_bytes_max=1 << 30)
    stream = await running.connect()
    await stream.send_all(running.post(stream=is_streamed))
    await running.wait_for(lambda: bool(running.engine.contexts))
    await running.wait_quiet()
    labels = {"model": "local", "endpoint": "chat"}
    assert running.value("requests_total", outcome="client_disconnect", **labels) == 1
    assert running.value("requests_total", outcome="success", **labels) == 0
    assert running.value("client_disconnects_total", **labels) == 1
    await stream.aclose()


async def test_a_slow_reader_slows_the_engine_down(serve: Any) -> None:
    """Nothing is kept beyond the backlog and the sockets' buffers."""
    yielded = 0

    async def tokens_for_ever(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        nonlocal yielded
        while True:
            yielded += 1
            yield Delta("x" * 10_000, [1])
            await trio.lowlevel.checkpoint()

    running = await serve(tokens_for_ever)
    stream = await running.connect()
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await stream.send_all(running.post(stream=True))
    before = -1
    while before != yielded:
        before = yielded
        await trio.sleep(0.05)
    # Some megabytes of kernel buffers at most: without backpressure it would never stand still.
    assert 0 < yielded * 10_000 < 50_000_000
    await stream.aclose()
    await running.wait_quiet()


async def test_a_body_over_the_limit_is_refused_before_it_is_read(serve: Any) -> None:
    running = await serve()
    stream = await running.connect()
    await stream.send_all(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        b"content-type: application/json\r\ncontent-length: 50000000\r\n\r\n{"
    )
    received = b""
    with trio.fail_after(120):
        while b"body_too_large" not in received:
            received += await stream.receive_some()
    assert received.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close\r\n" in received
    await stream.aclose()
    await running.wait_quiet()


async def test_a_chunked_body_over_the_limit_is_refused_while_it_is_read(serve: Any) -> None:
    running = await serve(body_bytes_max=100_000)

    async def body() -> AsyncGenerator[bytes, None]:
        for _ in range(200):
            yield b"x" * 10_000

    async with running.client() as client:
        response = await client.post("/v1/chat/completions", content=body(), headers=JSON)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    await running.wait_quiet()


async def test_a_50_mb_body_gets_its_413(serve: Any) -> None:
    running = await serve()
    async with running.client() as client:
        response = await client.post("/v1/completions", content=b"x" * 50_000_000, headers=JSON)
    assert response.status_code == 413
    assert response.json()["error"]["type"] == "invalid_request_error"
    await running.wait_quiet()


async def test_a_body_that_does_not_come_is_refused(serve: Any) -> None:
    running = await serve(body_timeout_s=0.02)
    stream = await running.connect()
    await stream.send_all(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    )
    received = b""
    with trio.fail_after(120):
        while b"body_timeout" not in received:
            received += await stream.receive_some()
    assert received.startswith(b"HTTP/1.1 408 ")
    await stream.aclose()
    await running.wait_quiet()


async def test_a_client_that_leaves_within_its_body_leaves_nothing(serve: Any) -> None:
    running = await serve()
    stream = await running.connect()
    await stream.send_all(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    )
    await running.wait_for(lambda: running.value("connections", kind="http") == 1)
    await stream.aclose()
    await running.wait_quiet()
    assert running.engine.requests == []


async def test_an_offer_of_a_websocket_is_none(serve: Any) -> None:
    running = await serve()
    stream = await running.connect()
    await stream.send_all(
        b"GET /v1/realtime HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
    )
    with trio.fail_after(120):
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 404 ")
    await stream.aclose()
    await running.wait_quiet()


async def test_an_engine_that_raises_is_one_line_in_the_log(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def crash(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        for never in NO_DELTAS:
            yield never
        raise ZeroDivisionError("secret")

    running = await serve(crash)
    with caplog.at_level(logging.INFO, "trinamo.http"):
        async with running.client() as client:
            body = {"messages": [{"role": "user", "content": "hi"}]}
            response = await client.post("/v1/chat/completions", json=body)
        await running.wait_quiet()
    assert response.status_code == 500
    assert "secret" not in response.text
    (record,) = [record for record in caplog.records if record.name == "trinamo.http"]
    assert record.exc_info is not None


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_slow_reader_gets_every_byte_of_big_paced_events(
    serve: Any, version: bytes
) -> None:
    """What the socket does not take at once is neither lost nor overtaken, chunked or not."""
    texts = [chr(ord("a") + number) * 200_000 for number in range(20)]

    async def paced(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        for number, text in enumerate(texts):
            await trio.sleep(0.001)
            yield Delta(text, [number], FinishReason.STOP if number == 19 else None)

    running = await serve(paced)
    stream = await running.connect()
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    await stream.send_all(running.post(stream=True).replace(b"HTTP/1.1", b"HTTP/" + version))
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    body = bytearray()
    with trio.fail_after(120):
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                client.receive_data(await stream.receive_some(1 << 15))
            elif isinstance(event, h11.Data):
                body += event.data
    assert all(line.startswith(b"data: ") for line in body.split(b"\n\n")[:-1])
    events = [event.data for event in parse_events(bytes(body))]
    assert events.pop() == DONE_DATA.decode()
    chunks = [msgspec.json.decode(event, type=ChatChunk) for event in events]
    assert [chunk.choices[0].delta.content for chunk in chunks] == texts
    await stream.aclose()
    await running.wait_quiet()


async def test_an_answer_that_comes_before_the_body_s_end_says_that_it_is_the_last(
    serve: Any,
) -> None:
    running = await serve()
    async with await running.connect() as stream:
        await stream.send_all(
            b"POST /live HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\nhe"
        )
        received = await read_to_end(stream)
    assert received.startswith(b"HTTP/1.1 405 ")
    assert b"connection: close\r\n" in received
    await running.wait_quiet()
