"""TLS on one connection, sans-IO: bytes of the wire in, bytes of the wire out.

Whoever owns the connection moves the bytes. So what is sealed can be sent without a checkpoint, and
a peer's end is seen whatever the application does, as without TLS. What this file does not do:
certificates.
"""

from __future__ import annotations

import contextlib
import ssl
from typing import Any, Final

from .wire import Wire, send_all

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

    __slots__ = ("_first", "_session", "_wire", "farewell", "seal", "send", "socket", "wait_room")

    def __init__(self, wire: Wire, session: TlsSession) -> None:
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
