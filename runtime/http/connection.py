"""One accepted connection, as hypercorn sees it: a stream that stays bounded and never goes deaf.

hypercorn 0.18 shields its sends, does not read while a pipelined request waits, and never times a
slow reader out. This stream mends that from below, without touching hypercorn:

* A task of ours reads ahead, up to 64 KiB, so a client's FIN or RST is seen whatever hypercorn is
  doing. A client that pipelines more than that, behind a request in flight, hides its FIN; it is
  cut off after `write_timeout_s`.
* `abort()` closes the socket under a blocked send, shielded or not. Writes that make no progress
  for `write_timeout_s` abort the connection; it is noticed within twice that time.
* While a header is awaited, bytes are handed on in small pieces, so that the header limit holds.
* A connection that closes before the request's body was read goes on reading it for a while:
  else the kernel would answer with RST, and the client might never see the answer.

What this file does not do: HTTP, and who may connect (`server.py`).
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Final

import trio

__all__ = ["Connection", "configure_socket"]

READ_BYTES: Final = 1 << 16
WRITE_BYTES: Final = 1 << 18
"""What must be written within `write_timeout_s`: the measure of progress."""
READ_AHEAD_BYTES_MAX: Final = 1 << 16
HEADER_PIECE_BYTES: Final = 1 << 12
LINGER_S: Final = 2.0


def configure_socket(sock: trio.socket.SocketType, *, peer_timeout_s: float) -> None:
    """Make a peer that vanished without a FIN fail within about `peer_timeout_s`.

    Keep-alive finds it while we are silent, TCP_USER_TIMEOUT while data is unacknowledged; each
    is blind to the other's case.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval_s = max(1, int(peer_timeout_s / 4))
    for name, value in (
        ("TCP_KEEPIDLE", interval_s),
        ("TCP_KEEPINTVL", interval_s),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", int(peer_timeout_s * 1000)),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Connection:
    """The stream given to hypercorn: `socket`, `receive_some`, `send_all`, `send_eof`, `aclose`.

    `aclose` only marks it closed; the socket is closed by who owns the accepted stream. The rest
    of the methods are for that owner.
    """

    def __init__(self, stream: trio.SocketStream, *, write_timeout_s: float) -> None:
        self.socket = stream.socket
        self.requests_in_flight = 0
        self.is_closed = False
        """hypercorn is done with it."""
        self.is_input_over = False
        """The peer sent FIN or RST."""
        self.is_input_taken = False
        """hypercorn knows that."""
        self.has_body_pending = False
        """A request's body was not read to its end."""
        self._stream = stream
        self._write_timeout_s = write_timeout_s
        self._sending_since: float | None = None
        self._buffer = bytearray()
        self._changed = trio.Event()

    # --- hypercorn's side --------------------------------------------------------------------

    async def receive_some(self, max_bytes: int = READ_BYTES) -> bytes:
        """The next bytes; empty at the end. Raises `trio.ClosedResourceError` once closed."""
        if not self.requests_in_flight:
            max_bytes = min(max_bytes, HEADER_PIECE_BYTES)
        await trio.lowlevel.checkpoint_if_cancelled()
        await self._wait_for(lambda: bool(self._buffer) or self.is_input_over or self.is_closed)
        if self.is_closed:
            raise trio.ClosedResourceError
        piece = bytes(self._buffer[:max_bytes])
        del self._buffer[:max_bytes]
        self.is_input_taken = not piece
        self._notify()
        return piece

    async def send_all(self, data: bytes) -> None:
        """Send; raises `trio.ClosedResourceError` if it is aborted meanwhile."""
        try:
            for start in range(0, len(data), WRITE_BYTES):
                self._sending_since = trio.current_time()
                await self._stream.send_all(data[start : start + WRITE_BYTES])
        finally:
            self._sending_since = None

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        self.is_closed = True
        self._notify()
        await trio.lowlevel.checkpoint()

    # --- the owner's side --------------------------------------------------------------------

    def request_started(self, *, has_body: bool) -> None:
        self.requests_in_flight += 1
        self.has_body_pending = has_body
        self._notify()

    def request_ended(self) -> None:
        self.requests_in_flight -= 1
        self._notify()

    def body_ended(self) -> None:
        self.has_body_pending = False

    def abort(self) -> None:
        """Close with RST, now, dropping what is unsent; wakes a send that is blocked."""
        # An error here means that the peer has been faster.
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    async def read_ahead(self) -> None:
        """Read until the peer's FIN or RST, or until the socket is closed."""
        try:
            while True:
                if not self._has_room() and not await self._wait_room():
                    self.abort()
                    break
                data = await self._stream.receive_some(READ_BYTES)
                if not data:
                    break
                if not self.is_closed:
                    self._buffer += data
                    self._notify()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self.is_input_over = True
        self._notify()

    def _has_room(self) -> bool:
        # What arrives after the close is read only to be dropped: see `linger`.
        return self.is_closed or len(self._buffer) < READ_AHEAD_BYTES_MAX

    async def _wait_room(self) -> bool:
        with trio.move_on_after(self._write_timeout_s):
            await self._wait_for(self._has_room)
        return self._has_room()

    async def watch_writes(self) -> None:
        """Abort once a write has made no progress for `write_timeout_s`; then return."""
        while True:
            since = self._sending_since
            wake_at = (trio.current_time() if since is None else since) + self._write_timeout_s
            await trio.sleep_until(wake_at)
            if self._sending_since is not None and self._sending_since == since:
                self.abort()
                return

    async def wait_gone(self) -> None:
        """Return once the peer or hypercorn has ended it, and hypercorn could know its requests.

        A FIN that follows a request at once is no end until that request has started.
        """
        await self._wait_for(
            lambda: (
                self.is_closed
                or self.is_input_taken
                or (self.is_input_over and self.requests_in_flight > 0)
            )
        )

    async def wait_idle(self) -> None:
        """Return once no request is in flight."""
        await self._wait_for(lambda: not self.requests_in_flight)

    async def linger(self) -> None:
        """Give a client that still sends its body the time to see the answer and stop."""
        if not self.has_body_pending:
            return
        self.is_closed = True
        self._buffer.clear()
        self._notify()
        with trio.move_on_after(LINGER_S):
            await self._wait_for(lambda: self.is_input_over)

    async def _wait_for(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
