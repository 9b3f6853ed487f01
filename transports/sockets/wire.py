"""An open socket without trio's checkpoints, in clear or in TLS: waits only where the kernel has nothing, or no room.

trio's own sockets try first and yield after each success, which costs more than the system call.

TLS is sans-IO: bytes of the wire in, bytes of the wire out. Whoever owns the connection moves the bytes. So what is
sealed can be sent without a checkpoint, and a peer's end is seen whatever the application does, as without TLS. What
this file does not do: certificates.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import trio


class Wire(Protocol):
    """One open connection. All methods but `abort` raise `OSError` once it is broken."""

    socket: trio.socket.SocketType
    peer: Sequence[str]
    """What a member at the other end has proven to be; of strangers, and in clear, nothing."""

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
    peer: Sequence[str] = ()

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


READ_BYTES: Final = 1 << 16
HANDSHAKE_BYTES: Final = 1 << 14


class TlsSession:
    """The server's side, or, of one who knows its peer's name, the client's.

    After any `ssl.SSLError` the connection is to be closed.
    """

    def __init__(self, context: ssl.SSLContext, peer: str | None = None) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object = context.wrap_bio(
            self._incoming, self._outgoing, server_side=peer is None, server_hostname=peer
        )
        self.is_input_over = False
        """The peer said that nothing more comes."""

    @property
    def protocol(self) -> str:
        """What was agreed on, once the handshake is done."""
        return self._object.selected_alpn_protocol() or "http/1.1"

    def peer_certificate(self) -> dict[str, Any] | None:
        """What the peer has shown, as `ssl.SSLObject.getpeercert` says it, once the handshake is done."""
        return self._object.getpeercert()

    def shake(self, data: bytes) -> bool:
        """A step of the handshake with what came from the wire; whether it is done.

        Raises `ssl.SSLError`; `pending` has then what tells the peer why.
        """
        self._incoming.write(data)
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def pending(self) -> bytes:
        """What is to be sent before anything that is sealed later."""
        return self._outgoing.read()

    def open(self, data: bytes) -> bytes:
        """The clear text of what came from the wire, as far as it is whole. Raises `ssl.SSLError`."""
        incoming, tls = self._incoming, self._object
        incoming.write(data)
        pieces = []
        # OpenSSL takes whole records only, and to ask for more than there is costs an exception.
        while incoming.pending or tls.pending():
            try:
                piece = tls.read(READ_BYTES)
            except ssl.SSLWantReadError:
                break
            except ssl.SSLZeroReturnError:
                piece = b""
            if not piece:
                self.is_input_over = True
                break
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def seal(self, data: bytes | memoryview) -> bytes:
        """What to send for `data`. Raises `ssl.SSLError`."""
        if data:
            self._object.write(data)
        return self._outgoing.read()

    def close(self) -> bytes:
        """What tells the peer that nothing more comes."""
        with contextlib.suppress(ssl.SSLError):
            self._object.unwrap()
        return self._outgoing.read()


async def shake_hands(wire: Wire, session: TlsSession) -> None:
    """Shake hands over `wire`. Raises `ssl.SSLError`, or another `OSError` if the peer ended it."""
    data = b""
    while True:
        is_done = session.shake(data)
        await send_all(wire, session.pending())
        if is_done:
            return
        data = await wire.receive(HANDSHAKE_BYTES)
        if not data:
            raise ConnectionResetError("the connection ended in the TLS handshake")


class SealedWire:
    """See `Wire`: in clear on this side, once hands were shaken."""

    __slots__ = (
        "_first",
        "_session",
        "_wire",
        "farewell",
        "peer",
        "seal",
        "send",
        "socket",
        "wait_room",
    )

    def __init__(self, wire: Wire, session: TlsSession, peer: Sequence[str] = ()) -> None:
        self.peer = peer
        self.socket, self.send, self.wait_room = wire.socket, wire.send, wire.wait_room
        self.seal, self.farewell = session.seal, session.close
        self._wire, self._session = wire, session
        # What came together with the end of the handshake.
        self._first = session.open(b"")

    async def receive(self, bytes_max: int) -> bytes:
        opened, self._first = self._first, b""
        while not (opened or self._session.is_input_over):
            data = await self._wire.receive(bytes_max)
            if not data:
                break
            opened = self._session.open(data)
        return opened
