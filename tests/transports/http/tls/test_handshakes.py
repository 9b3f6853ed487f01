"""TLS towards clients: who gets in, and what becomes of those who do not."""

from __future__ import annotations

import ssl
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from tests.certificates import Authority
from tests.runtime.http.running import Secured, with_tls
from trinamo.runtime.errors import ConnectError
from trinamo.transports.http import server
from trinamo.transports.openai.client import fetch

pytestmark = with_tls

LIVE = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def read_to_end(stream: Any) -> bytes:
    received = b""
    with trio.fail_after(120):
        try:
            while data := await stream.receive_some():
                received += data
        except trio.BrokenResourceError:
            pass
    return received


async def test_http1_and_http2_are_offered_and_the_client_s_choice_is_spoken(serve: Any) -> None:
    running = await serve()
    for http2, version in ((True, "HTTP/2"), (False, "HTTP/1.1")):
        async with running.client(http2=http2) as client:
            response = await client.get("/live")
        assert (response.http_version, response.json()) == (version, {"status": "live"})
    await running.wait_quiet()


async def test_a_client_that_speaks_http_is_told_of_tls(serve: Any) -> None:
    running = await serve()
    async with await trio.open_tcp_stream("127.0.0.1", running.port) as stream:
        await stream.send_all(LIVE)
        received = await read_to_end(stream)
    assert received.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"use a URL with https://" in received
    await running.wait_quiet()


@pytest.mark.parametrize("data", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["none", "half a hello"])
async def test_a_handshake_that_does_not_end_is_cut_off(
    serve: Any, authority: Authority, data: bytes
) -> None:
    section = serve.section | {"handshake_timeout_s": 0.05}
    running = await serve(tls=section)
    async with await trio.open_tcp_stream("127.0.0.1", running.port) as stream:
        await stream.send_all(data)
        assert await read_to_end(stream) == b""
    await running.wait_quiet()


async def test_who_shakes_hands_as_the_server_closes_is_told_nothing_that_is_no_http2(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a server says first is its settings (RFC 9113, section 3.4), and there is nothing to say."""
    monkeypatch.setattr(server, "CLOSE_GRACE_S", 60)
    running = await serve()
    running.trust.set_alpn_protocols(["h2"])
    async with await trio.open_tcp_stream("127.0.0.1", running.port) as plain:
        await running.wait_for(lambda: running.value("connections", kind="http") == 1)
        running.service.server.close()
        await trio.testing.wait_all_tasks_blocked(0.01)
        stream = Secured(plain, running.trust)
        await stream.shake_hands()
        assert await read_to_end(stream) == b""
    await running.wait_quiet()


async def test_a_crowd_that_shakes_hands_pushes_out_itself_alone(serve: Any) -> None:
    running = await serve(connections_max=8)
    served = await running.connect()
    await served.send_all(LIVE)
    assert b" 200 " in await served.receive_some()
    crowd = [await trio.open_tcp_stream("127.0.0.1", running.port) for _ in range(30)]
    await running.wait_for(lambda: running.value("connections_taken_total") >= 23)
    await served.send_all(LIVE)
    with trio.fail_after(120):
        received = b""
        while b" 200 " not in received:
            piece = await served.receive_some()
            assert piece
            received += piece
    for stream in (served, *crowd):
        await trio.aclose_forcefully(stream)
    await running.wait_quiet()


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
@pytest.mark.parametrize(
    ("least", "spoken", "is_taken"),
    [("1.2", "TLSv1_1", False), ("1.2", "TLSv1_2", True), ("1.3", "TLSv1_2", False)],
)
async def test_an_old_version_is_refused(
    serve: Any, least: str, spoken: str, *, is_taken: bool
) -> None:
    running = await serve(tls=serve.section | {"minimum_version": least})
    trust = running.trust
    trust.minimum_version = trust.maximum_version = ssl.TLSVersion[spoken]
    plain = await trio.open_tcp_stream("127.0.0.1", running.port)
    stream = Secured(plain, trust)
    if is_taken:
        await stream.shake_hands()
    else:
        with pytest.raises(trio.BrokenResourceError):
            await stream.shake_hands()
    await trio.aclose_forcefully(stream)
    await running.wait_quiet()


async def test_with_an_authority_for_clients_a_client_needs_a_certificate(
    serve: Any, authority: Authority
) -> None:
    running = await serve(tls=serve.section | {"client_ca_file": str(authority.ca_file)})
    async with running.client() as client:
        with pytest.raises(httpx.HTTPError):
            await client.get("/live")
    certificate, key = authority.sign("client")
    running.trust.load_cert_chain(certificate, key)
    async with running.client() as client:
        assert (await client.get("/live")).status_code == 200
    await running.wait_quiet()


async def test_the_end_is_told_so_that_it_is_no_cut(serve: Any) -> None:
    running = await serve()
    plain = await trio.open_tcp_stream("127.0.0.1", running.port)
    strict = trio.SSLStream(plain, running.trust, server_hostname="127.0.0.1")
    await strict.send_all(LIVE.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
    received = b""
    with trio.fail_after(120):
        while data := await strict.receive_some():
            received += data
    assert received.endswith(b'{"status":"live"}')
    await trio.aclose_forcefully(strict)
    await running.wait_quiet()


async def test_garbage_after_the_handshake_ends_the_connection(serve: Any) -> None:
    running = await serve()
    stream = await running.connect()
    await stream.send_all(LIVE)
    await stream.receive_some()
    await stream.plain.send_all(b"\x17\x03\x03\x00\x20" + bytes(32))
    await read_to_end(stream)
    await trio.aclose_forcefully(stream)
    await running.wait_quiet()


async def test_the_front_door_s_client_is_told_whom_to_trust_by_the_environment(
    serve: Any, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await serve()
    with pytest.raises(ConnectError, match="SSL_CERT_FILE"):
        await fetch(f"{running.url}/live")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca_file))
    assert await fetch(f"{running.url}/live") == (200, b'{"status":"live"}')
    await running.wait_quiet()
