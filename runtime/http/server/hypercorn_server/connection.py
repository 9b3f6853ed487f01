"""One accepted connection, as hypercorn sees it: a stream that stays bounded and never goes deaf.

hypercorn 0.18 shields its sends, does not read while a pipelined request waits, and never times a
slow reader out. This stream mends that from below, without touching hypercorn:

* A task of ours reads ahead, up to 64 KiB, so a client's FIN or RST is seen whatever hypercorn is
  doing. A client that pipelines more than that, behind a request in flight, hides its FIN; it is
  cut off after `write_timeout_s`.
* `abort()` closes the socket under a blocked send, shielded or not. A write that makes no progress
  for `write_timeout_s` aborts the connection.
* A write that failed is remembered (`is_cut`), for hypercorn tells nobody.
* While a header is awaited, bytes are handed on in small pieces, so that the header limit holds.
* With a `TlsSession` it seals and opens what passes, so all this holds for TLS too.
* A connection that closes before the request's body was read goes on reading it for a while:
  else the kernel would answer with RST, and the client might never see the answer.

What this file does not do: HTTP, and who may connect (`../server.py`).
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Final

import trio

from ....protocol.openai.http_head import HeadFault
from ..phases import Phase
from ..sockets import open_sender
from ..tls.session import TlsSession

READ_BYTES: Final = 1 << 16
WRITE_BYTES: Final = 1 << 16
"""What must be written within `write_timeout_s`: the measure of progress."""
READ_AHEAD_BYTES_MAX: Final = 1 << 16
HEADER_PIECE_BYTES: Final = 1 << 12
LINGER_S: Final = 2.0
NO_TLS: Final = HeadFault(400, "this port speaks TLS, and you do not; use a URL with https://")


class Connection:
    """The stream given to hypercorn: `socket`, `receive_some`, `send_all`, `send_eof`, `aclose`.

    It takes the socket over from the accepted stream, which is of no use afterwards. `aclose` only
    marks it closed; whoever made the connection closes `socket`. The rest of the methods are for
    that owner.
    """

    def __init__(
        self,
        accepted: trio.SocketStream,
        *,
        write_timeout_s: float,
        tls: TlsSession | None = None,
    ) -> None:
        stream, self._send_nowait = open_sender(accepted)
        self.socket = stream.socket
        self.requests_in_flight = 0
        self.is_closed = False
        """hypercorn is done with it."""
        self.is_input_over = False
        """The peer sent FIN or RST."""
        self.is_input_taken = False
        """hypercorn knows that."""
        self.bodies_pending = 0
        """How many requests' bodies were not read to their end."""
        self.is_cut = False
        """A write failed or timed out: the peer does not have the whole answer."""
        self._stream = stream
        self._tls = tls
        self._is_shaking = tls is not None
        self._write_timeout_s = write_timeout_s
        self._is_sending = False
        self._is_output_over = False
        self._buffer = bytearray()
        self._waiters: list[tuple[Callable[[], bool], trio.Event]] = []

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
        """Send; raises `trio.ClosedResourceError` if it is aborted meanwhile.

        No checkpoint if the socket takes all of it at once: hypercorn shields this one in any
        case, and whoever sends much waits for what to send.
        """
        if self._is_output_over:
            self.is_cut = True
            raise trio.ClosedResourceError("nothing follows the end of what was sent")
        for start in range(0, len(data), WRITE_BYTES):
            piece = self._seal(data[start : start + WRITE_BYTES])
            try:
                sent = self._send_nowait(piece)
            except OSError:
                # It is full, or broken; `_send` will see which.
                sent = 0
            if sent < len(piece):
                await self._send(piece[sent:])

    def _seal(self, data: bytes) -> bytes:
        return data if self._tls is None else self._tls.seal(data)

    async def _send(self, data: bytes) -> None:
        self._is_sending = True
        try:
            for start in range(0, len(data), WRITE_BYTES):
                await self._send_in_time(data[start : start + WRITE_BYTES])
        except BaseException:
            self.is_cut = True
            raise
        finally:
            self._is_sending = False

    async def _send_in_time(self, piece: bytes) -> None:
        # hypercorn's shield is outside of this scope, so it does not stop the deadline.
        with trio.move_on_after(self._write_timeout_s) as scope:
            await self._stream.send_all(piece)
        if scope.cancelled_caught:
            self.abort()
            raise trio.ClosedResourceError("the peer does not read")

    async def send_eof(self) -> None:
        """Raises `trio.BusyResourceError` while something is being sent, and has then no effect."""
        if self._is_sending:
            raise trio.BusyResourceError("something is being sent")
        # hypercorn closes what the peer has ended while an application may be about to answer.
        self._is_output_over = True
        if self._tls is not None:
            # Without this a peer cannot tell the end from a cut.
            with contextlib.suppress(OSError):
                self._send_nowait(self._tls.close())
        await self._stream.send_eof()

    async def aclose(self) -> None:
        self.is_closed = True
        self._notify()
        await trio.lowlevel.checkpoint()

    # --- the owner's side --------------------------------------------------------------------

    async def shake_hands(
        self, timeout_s: float, refuse: Callable[[HeadFault], bytes]
    ) -> str | None:
        """Agree on TLS; the protocol to speak then, None if there is no agreement in time.

        `refuse` makes the answer to who speaks plain HTTP.
        """
        tls = self._tls
        assert tls is not None, "only a connection with TLS shakes hands"
        with trio.move_on_after(timeout_s):
            data = b""
            while data or not self.is_input_over:
                try:
                    is_done = tls.shake(data)
                except ssl.SSLError as error:
                    # A client that forgot the s of https can read why.
                    is_plain = error.reason == "HTTP_REQUEST"
                    self._send_nowait(refuse(NO_TLS) if is_plain else tls.pending())
                    return None
                if pending := tls.pending():
                    await self._stream.send_all(pending)
                if is_done:
                    self._is_shaking = False
                    self._buffer += tls.open(b"")
                    return tls.protocol
                data = bytes(await self._stream.receive_some(READ_BYTES))
                self.is_input_over = not data
        return None

    def start(self, nursery: trio.Nursery) -> None:
        """Read ahead, in `nursery`."""
        nursery.start_soon(self._read_ahead)

    @property
    def phase(self) -> Phase:
        """What it does now."""
        if not self.requests_in_flight:
            return Phase.SHAKING if self._is_shaking else Phase.IDLE
        is_waiting = self.bodies_pending >= self.requests_in_flight
        return Phase.ARRIVING if is_waiting else Phase.ANSWERING

    def request_started(self, *, has_body: bool) -> None:
        self.requests_in_flight += 1
        self.bodies_pending += has_body
        self._notify()

    def request_ended(self) -> None:
        self.requests_in_flight -= 1
        self._notify()

    def body_ended(self) -> None:
        self.bodies_pending -= 1

    def abort(self) -> None:
        """Close with RST, now, dropping what is unsent; wakes a send that is blocked."""
        # An error here means that the peer has been faster.
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    async def _read_ahead(self) -> None:
        """Read until the peer's FIN or RST, or until the socket is closed."""
        try:
            while True:
                if not self._has_room() and not await self._wait_room():
                    self.abort()
                    break
                data = bytes(await self._stream.receive_some(READ_BYTES))
                if not data:
                    break
                if self._tls is not None:
                    data = self._tls.open(data)
                if not self.is_closed:
                    self._buffer += data
                    self._notify()
                if self._tls is not None and self._tls.is_input_over:
                    break
        except ssl.SSLError:
            self.abort()
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

    async def linger(self, *, has_unread: bool) -> None:
        """Give a client that still sends the time to see the answer and stop."""
        if not (self.bodies_pending or has_unread):
            return
        self.is_closed = True
        self._buffer.clear()
        self._notify()
        with trio.move_on_after(LINGER_S):
            await self._wait_for(lambda: self.is_input_over)

    async def _wait_for(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            waiter = (is_so, trio.Event())
            self._waiters.append(waiter)
            try:
                await waiter[1].wait()
            finally:
                self._waiters.remove(waiter)

    def _notify(self) -> None:
        """Wake those whose condition has come true; the others need not look."""
        for is_so, event in self._waiters:
            if is_so():
                event.set()
