"""A connection that stays on the host is not paced by a timer; others keep what the machine chose."""

from __future__ import annotations

import socket as stdlib_socket
from collections.abc import AsyncIterator

import pytest
import trio

from tests import needs
from trinamo.transports.tcp.transfer.link import is_loopback, send_unpaced

OPTION = (stdlib_socket.IPPROTO_TCP, stdlib_socket.TCP_CONGESTION)


@pytest.fixture
async def stream() -> AsyncIterator[trio.SocketStream]:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener, await trio.testing.open_stream_to_socket_listener(listener) as stream:
        assert isinstance(stream, trio.SocketStream)
        yield stream


def congestion_control(stream: trio.SocketStream) -> str:
    found = stream.getsockopt(*OPTION, 16)
    assert isinstance(found, bytes)
    return found.rstrip(b"\0").decode()


@pytest.mark.parametrize(
    ("chosen", "used"), [("bbr", "reno"), ("cubic", "cubic"), ("reno", "reno")]
)
async def test_only_what_paces_is_replaced(
    stream: trio.SocketStream, chosen: str, used: str
) -> None:
    try:
        stream.setsockopt(*OPTION, chosen.encode())
    except OSError:
        needs.CONGESTION_CONTROL.lacking()
    send_unpaced(stream.socket)
    assert congestion_control(stream) == used


async def test_a_connection_that_is_over_is_left_alone(stream: trio.SocketStream) -> None:
    await stream.aclose()
    send_unpaced(stream.socket)


@pytest.mark.parametrize(
    ("ours", "theirs", "stays_here"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.2", True),
        ("::1", "::1", True),
        ("10.0.0.7", "10.0.0.7", True),
        ("fe80::1%eth0", "fe80::1%eth0", True),
        ("10.0.0.7", "10.0.0.8", False),
        ("fe80::1%eth0", "fe80::2%eth0", False),
        ("10.0.0.7", "no address", False),
    ],
)
def test_equal_or_loopback_addresses_stay_on_the_host(
    ours: str, theirs: str, stays_here: bool
) -> None:
    assert is_loopback(ours, theirs) is stays_here
