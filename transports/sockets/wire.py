"""An open socket without trio's checkpoints: waits only where the kernel has nothing, or no room.

trio's own sockets try first and yield after each success, which costs more than the system call.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Any, Protocol

import trio


class Wire(Protocol):
    """One open connection. All methods but `abort` raise `OSError` once it is broken."""

    socket: trio.socket.SocketType

    @property
    def seal(self) -> Callable[[bytes | memoryview], bytes] | None:
        """What makes of clear text the bytes to `send`; None where they are the same."""
        ...

    def farewell(self) -> bytes:
        """What to `send` before the end, so that the peer can tell it from a cut."""
        ...

    def send(self, data: bytes | memoryview) -> int:
        """Send what there is room for, now; how much that was."""
        ...

    async def receive(self, bytes_max: int) -> bytes:
        """The next bytes, in clear; empty at the end. Waits if there are none, and need not yield else.

        `trio.ClosedResourceError` if it is closed meanwhile.
        """
        ...

    async def wait_room(self) -> None:
        """Return once `send` may take something. `trio.ClosedResourceError` as above."""
        ...


def open_wire(stream: trio.SocketStream) -> Wire:
    """Take the socket over from a stream, which is of no use afterwards.

    A socket that is not the kernel's offers the same by methods of its own, as the simulator's does.
    """
    given = stream.socket
    if hasattr(given, "send_nowait"):
        return _OtherWire(given)
    return KernelWire(socket.socket(given.family, given.type, given.proto, fileno=given.detach()))


async def send_all(wire: Wire, data: bytes | memoryview) -> None:
    """Send all of `data`, as it is; waits only while there is no room. Cancelled, a part may have been sent."""
    rest = memoryview(data)[wire.send(data) :] if data else b""
    while rest:
        await wire.wait_room()
        rest = rest[wire.send(rest) :]


def peer_of(sock: trio.socket.SocketType) -> str:
    """The address at the other end; empty if the peer has been faster."""
    with contextlib.suppress(OSError):
        return str(sock.getpeername()[0])
    return ""


def abort(sock: trio.socket.SocketType) -> None:
    """Close with RST, now, dropping what is unsent; wakes whoever waits for it."""
    # An error here means that the peer has been faster.
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


class _Plain:
    __slots__ = ()
    seal = None

    def farewell(self) -> bytes:
        return b""


class KernelWire(_Plain):
    """See `Wire`. `plain` is the socket itself, for who waits for many at once."""

    __slots__ = ("plain", "socket")

    def __init__(self, plain: socket.socket) -> None:
        self.plain = plain
        self.socket = trio.socket.from_stdlib_socket(plain)

    def send(self, data: bytes | memoryview) -> int:
        try:
            return self.plain.send(data)
        except BlockingIOError:
            return 0

    async def receive(self, bytes_max: int) -> bytes:
        while True:
            self._check_open()
            await trio.lowlevel.wait_readable(self.plain)
            try:
                return self.plain.recv(bytes_max)
            except BlockingIOError:
                pass

    async def wait_room(self) -> None:
        self._check_open()
        await trio.lowlevel.wait_writable(self.plain)

    def _check_open(self) -> None:
        # A closed socket has no number, and trio would take the next such one for the same.
        if self.plain.fileno() < 0:
            raise trio.ClosedResourceError("the connection is closed")


class _OtherWire(_Plain):
    __slots__ = ("_other", "socket")

    def __init__(self, other: Any) -> None:
        self._other = other
        self.socket: trio.socket.SocketType = other

    def send(self, data: bytes | memoryview) -> int:
        sent: int = self._other.send_nowait(data)
        return sent

    async def receive(self, bytes_max: int) -> bytes:
        data: bytes = await self._other.recv_arrived(bytes_max)
        return data

    async def wait_room(self) -> None:
        await self._other.wait_writable()
