"""Both ends of the tcp planes for tests: the real ones, and raw ones that say whatever one wants.

`open_home` holds a stream server and a client and, when left, checks that every task, descriptor,
subject and connection is gone. A `RawEnd` speaks bytes over a socket of its own (`streams/raw_links.py`:
frames).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from tests.leftovers import open_descriptors
from trinamo.runtime.context import Context
from trinamo.runtime.env import RealEnv
from trinamo.runtime.protocol.streams.membership import Purpose
from trinamo.runtime.protocol.streams.request import ConnectionInfo
from trinamo.transports.sockets.wire import Wire, open_wire, send_all
from trinamo.transports.tcp import (
    TcpClient,
    TcpOptions,
    TcpStreamServer,
    open_client,
    open_stream_server,
)
from trinamo.transports.tcp.greeting import dial_member, welcome
from trinamo.transports.tcp.sockets import split_address
from trinamo.transports.tcp.streams.linked import TcpResponseSender

PATIENCE_S = 120.0
"""No test waits longer for anything; a hang is a failure with a traceback."""


async def eventually(condition: Callable[[], object]) -> None:
    """Poll until `condition()` is true: what the kernel does next is no event of ours."""
    with trio.fail_after(PATIENCE_S):
        while not condition():
            await trio.sleep(0.002)


def lone_client(using: TcpOptions | None = None) -> TcpClient:
    """A worker's end whose links would be tasks beside the test's own."""
    nursery = trio.lowlevel.current_task().parent_nursery
    assert nursery is not None
    return TcpClient(using or options(), RealEnv(), nursery)


def task_count(server: TcpStreamServer) -> int:
    """Connections being served."""
    return len(server.links) + server.gate.ungreeted_count


def options(**changes: Any) -> TcpOptions:
    """Return options for tests: short lingering, long time-outs, and defaults for all else.

    Any process may stall for some seconds on a busy machine. So only a test that waits for one of
    these time-outs sets a short one.
    """
    values: dict[str, Any] = {
        "linger_s": 0.3,
        "connect_timeout_s": 60.0,
        "ack_timeout_s": 60.0,
        "handshake_timeout_s": 60.0,
        **changes,
    }
    return TcpOptions(**values)


@attrs.frozen
class Home:
    """The caller's and the worker's side of the response plane."""

    server: TcpStreamServer
    client: TcpClient

    @asynccontextmanager
    async def call(
        self, connection: ConnectionInfo, context: Context | None = None
    ) -> AsyncIterator[TcpResponseSender]:
        """The real worker's end of one response stream, opened."""
        async with self.client.call_home(connection, context or Context("w")) as sender:
            sender.open()
            yield sender


@asynccontextmanager
async def open_home(**changes: Any) -> AsyncIterator[Home]:
    """Both sides over loopback; nothing may be left when the body is done."""
    with trio.fail_after(PATIENCE_S):
        before = open_descriptors()
        async with open_stream_server(options(**changes), RealEnv()) as server:
            opened = open_descriptors()
            async with open_client(options(**changes), RealEnv()) as client:
                yield Home(server, client)
                await eventually(lambda: server.stream_count == client.open_count == 0)
            await eventually(lambda: task_count(server) == 0)
            await eventually(lambda: open_descriptors() <= opened)
            assert (server.registered_count, len(server.links), len(client.links)) == (0, 0, 0)
        assert open_descriptors() <= before


class WireStream(trio.abc.HalfCloseableStream):
    """A connection that was greeted, sealed or not, as a stream of trio's."""

    def __init__(self, wire: Wire) -> None:
        self.wire, self.socket = wire, wire.socket
        self.setsockopt = wire.socket.setsockopt

    async def send_all(self, data: Any) -> None:
        await trio.lowlevel.checkpoint()
        try:
            await send_all(self.wire, data if self.wire.seal is None else self.wire.seal(data))
        except OSError as error:
            raise trio.BrokenResourceError from error

    async def wait_send_all_might_not_block(self) -> None:
        await self.wire.wait_room()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        try:
            return await self.wire.receive(max_bytes or 65536)
        except OSError as error:
            raise trio.BrokenResourceError from error

    async def send_eof(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        self.socket.close()
        await trio.lowlevel.checkpoint()


async def dialled(address: str, purpose: Purpose, secret: bytes = b"") -> WireStream:
    """A connection to a standing port, greeted."""
    wire, _ = await dial_member(address, options(secret=secret), RealEnv(), purpose)
    return WireStream(wire)


async def welcomed(
    stream: trio.SocketStream, purpose: Purpose, name: str, secret: bytes = b""
) -> WireStream:
    """The listener's end of a connection, greeted."""
    using = options(secret=secret)
    return WireStream(await welcome(open_wire(stream), using, RealEnv(), purpose, name))


class RawEnd:
    """One end of a connection that says whatever bytes one wants."""

    def __init__(self, stream: trio.SocketStream | WireStream) -> None:
        self.stream = stream

    async def say(self, *data: bytes) -> None:
        """Send bytes as they are, in one piece."""
        await self.stream.send_all(b"".join(data))

    async def hear_all(self) -> bytes:
        """What comes until the peer's FIN or RST."""
        heard = b""
        try:
            async for data in self.stream:
                heard += data
        except trio.BrokenResourceError:
            pass
        return heard

    async def wait_gone(self) -> None:
        """Return once the peer has closed its end."""
        await self.hear_all()

    def reset(self) -> None:
        """Close with a RST: what the peer's kernel sends for a process that was shot."""
        self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.stream.socket.close()


@asynccontextmanager
async def raw_connection(address: str) -> AsyncIterator[RawEnd]:
    """A connection to a port under test."""
    async with await trio.open_tcp_stream(*split_address(address)) as stream:
        yield RawEnd(stream)


@asynccontextmanager
async def raw_member(
    address: str, purpose: Purpose = Purpose.REQUESTS, secret: bytes = b""
) -> AsyncIterator[RawEnd]:
    """A connection to a standing port that has greeted."""
    async with await dialled(address, purpose, secret) as stream:
        yield RawEnd(stream)


async def accept_member(
    listener: trio.SocketListener, instance_id: str = "", purpose: Purpose = Purpose.REQUESTS
) -> RawEnd:
    """The next connection to a standing port of ours, greeted."""
    return RawEnd(await welcomed(await listener.accept(), purpose, instance_id))
