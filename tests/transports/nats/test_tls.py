"""TLS to NATS cannot be stripped by whoever answers first on the wire."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import pytest
import trio
from msgspec.structs import replace

from tests.certificates import Authority
from tests.transports.nats.brokers import PATIENT, private_server, wait_away
from trinamo.runtime.config.keys import Secret
from trinamo.runtime.config.planes import NatsConfig
from trinamo.runtime.errors import ConnectError
from trinamo.transports.nats import open_nats
from trinamo.transports.servers.binaries import find_nats_server


@attrs.define
class Stripper:
    """Greets as a NATS server without TLS would, and keeps all that it is told."""

    port: int = 0
    told: bytearray = attrs.field(factory=bytearray)
    calls: int = 0

    async def answer(self, stream: trio.SocketStream) -> None:
        info = {"server_id": "x", "version": "2.11.0", "max_payload": 1 << 20, "headers": True}
        info |= {"auth_required": True, "tls_required": False, "tls_available": False}
        async with stream:
            await stream.send_all(b"INFO " + json.dumps(info).encode() + b"\r\n")
            async for data in stream:
                self.told += data
        self.calls += 1


@asynccontextmanager
async def open_stripper(port: int = 0) -> AsyncIterator[Stripper]:
    async with trio.open_nursery() as nursery:
        listener = (await trio.open_tcp_listeners(port, host="127.0.0.1"))[0]
        stripper = Stripper(listener.socket.getsockname()[1])
        nursery.start_soon(trio.serve_listeners, stripper.answer, [listener])
        yield stripper
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("scheme", ["nats", "tls"])
async def test_a_server_that_offers_no_tls_is_told_nothing(scheme: str) -> None:
    """By an address of `tls://` alone, or by a context alone: TLS is wanted, so no word in clear."""
    tls = ssl.create_default_context() if scheme == "nats" else None
    async with open_stripper() as stripper:
        url = f"{scheme}://127.0.0.1:{stripper.port}"
        with trio.fail_after(120), pytest.raises(ConnectError, match="offers none") as caught:
            async with open_nats([url], replace(PATIENT, token=Secret("the-token")), tls=tls):
                pass
    assert bytes(stripper.told) == b""
    assert caught.value.definite
    assert "the-token" not in str(caught.value)


async def test_without_tls_the_same_server_is_greeted() -> None:
    """The other test's proof: this server would have been told the token."""
    async with open_stripper() as stripper:
        url = f"nats://127.0.0.1:{stripper.port}"
        with trio.fail_after(120), pytest.raises(ConnectError):
            async with open_nats([url], NatsConfig(token=Secret("the-token"), connect_timeout_s=3)):
                pass
    assert b"the-token" in stripper.told


async def test_tls_is_not_given_up_on_a_reconnection(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path)
    certificate, key = authority.sign("server")
    flags = ("--tls", "--tlscert", str(certificate), "--tlskey", str(key), "--auth", "the-token")
    context = ssl.create_default_context(cafile=str(authority.ca_file))
    with private_server(find_nats_server(), *flags) as server:
        async with open_nats(
            [server.url], replace(PATIENT, token=Secret("the-token")), tls=context
        ) as plane:
            await plane.check_health()
            server.kill()
            await wait_away(plane)
            async with open_stripper(server.port) as stripper:
                with trio.fail_after(120):
                    while stripper.calls < 3:
                        await trio.sleep(0.005)
                assert not plane.is_connected
                assert bytes(stripper.told) == b""
