"""TLS on one connection, sans-IO: bytes of the wire in, bytes of the wire out.

Whoever owns the connection moves the bytes. So what is sealed can be sent without a checkpoint, and
a peer's end is seen whatever the application does, as without TLS. What this file does not do:
certificates (`certificates.py`).
"""

from __future__ import annotations

import contextlib
import ssl
from typing import Final

READ_BYTES: Final = 1 << 16


class TlsSession:
    """The server's side. After any `ssl.SSLError` the connection is to be closed."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self.is_input_over = False
        """The peer said that nothing more comes."""

    @property
    def protocol(self) -> str:
        """What was agreed on, once the handshake is done."""
        return self._object.selected_alpn_protocol() or "http/1.1"

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
        opened = b""
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
            opened += piece
        return opened

    def seal(self, data: bytes) -> bytes:
        """What to send for `data`. Raises `ssl.SSLError`."""
        if data:
            self._object.write(data)
        return self._outgoing.read()

    def close(self) -> bytes:
        """What tells the peer that nothing more comes."""
        with contextlib.suppress(ssl.SSLError):
            self._object.unwrap()
        return self._outgoing.read()
