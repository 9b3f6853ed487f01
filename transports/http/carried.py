"""A request and its answer that wait here for their carrier: a connection of HTTP/2, or an ASGI server.

What nobody takes of a body is not granted anew to the client, so it waits with the client; what the
client does not take of an answer waits here. What this file does not do: frames and whose turn it
is (`http2/connection.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from trinamo.runtime.errors import LocalProtocolError
from trinamo.runtime.http.exchanges import Headers, HttpExchange

from .refusals import Dates

STREAM_BYTES: Final = 1 << 14
"""What a stream costs that waits for its client, beside its answer."""


class CarriedHead:
    def __init__(self, method: bytes, target: bytes, headers: Headers, version: str) -> None:
        self.method, self.headers, self.version = method.upper(), headers, version
        self.path, _, self.query = target.partition(b"?")
        known = dict(headers)
        self.host = known.get(b"host")
        # The carrier has looked at it.
        self.length = int(known.get(b"content-length", b"0"))
        self.expects_continue = known.get(b"expect", b"").lower() == b"100-continue"


class ExchangeCarrier(Protocol):
    """What an exchange asks of whoever carries it. None of it waits."""

    address: str
    """The peer's."""
    dates: Dates

    def send_head(self, stream_id: int, status: int, headers: Headers, /) -> None:
        """Send a head; dropped if the stream is over."""
        ...

    def send_body(self, stream: CarriedExchange, /) -> None:
        """The stream has something to send, or has come to its end."""
        ...

    def grant(self, stream_id: int, size: int, /) -> None:
        """The client may send as much again."""
        ...

    def reset(self, stream: CarriedExchange) -> None:
        """End the stream before its time."""
        ...


class CarriedExchange(HttpExchange):
    """See `HttpExchange`. `hold` counts what is kept for the client."""

    def __init__(
        self,
        stream_id: int,
        head: CarriedHead,
        carrier: ExchangeCarrier,
        hold: Callable[[CarriedExchange, int], None],
        *,
        backlog_bytes_max: int,
    ) -> None:
        super().__init__(head, carrier.address)
        self.stream_id = stream_id
        self.outgoing = bytearray()
        self.taken_bytes = 0
        """Of the answer, by the client."""
        self.is_sent = False
        """The whole answer is the kernel's."""
        self._carrier, self._hold_unsent = carrier, hold
        self._backlog_bytes_max = backlog_bytes_max
        self._is_full = False
        self._ungranted = 0
        self._on_room: Callable[[], None] | None = None

    # --- the request ---------------------------------------------------------------------------

    def put(self, data: bytes, size: int) -> None:
        """A piece of the body came; it took `size` of what the client may send."""
        self.body += data
        self._ungranted += size
        self._changed.notify()

    def end_input(self) -> None:
        self.is_body_complete = True
        self._changed.notify()

    def _taken(self) -> None:
        size, self._ungranted = self._ungranted, 0
        self._carrier.grant(self.stream_id, size)

    def _ask_on(self) -> None:
        self._carrier.send_head(self.stream_id, 100, [])

    # --- the answer ----------------------------------------------------------------------------

    def write(self, data: bytes) -> bool:
        if not self.has_begun:
            self._send_head(None)
        self._keep(self._check(data))
        self._is_full = len(self.outgoing) >= self._backlog_bytes_max
        return not self._is_full

    def finish(self, data: bytes = b"") -> None:
        if self.is_finished:
            raise LocalProtocolError("an answer ends once")
        if not self.has_begun:
            self._send_head(len(data))
        data = self._check(data, is_last=True)
        self.is_finished = True
        self._keep(data)
        self._changed.notify()

    def _send_head(self, length: int | None) -> None:
        headers, length = self._open(length)
        if any(b"\n" in value or b"\r" in value for _, value in headers):
            raise LocalProtocolError("a header of an answer has a line end in it")
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        headers.append((b"date", self._carrier.dates.value()))
        self._carrier.send_head(self.stream_id, self.status, headers)
        self.has_begun = True

    def _keep(self, data: bytes) -> None:
        if self.is_gone or not (data or self.is_finished):
            return
        self.outgoing += data
        self._count()
        self._carrier.send_body(self)

    def on_room(self, listener: Callable[[], None]) -> None:
        self._on_room = listener

    def release(self) -> None:
        super().release()
        self._on_room = None

    async def sent(self) -> None:
        while not self.is_gone and (self.outgoing or (self.is_finished and not self.is_sent)):
            await self._changed.wait()

    async def wait_room(self) -> None:
        while not self.is_gone and len(self.outgoing) > self._backlog_bytes_max // 2:
            await self._changed.wait()

    # --- the connection's side ------------------------------------------------------------------

    def take_off(self, size: int) -> bytes:
        """The next `size` bytes of the answer, which the client has granted room for."""
        data = bytes(self.outgoing[:size])
        del self.outgoing[:size]
        self.taken_bytes += size
        self._count()
        if self._is_full and len(self.outgoing) * 2 <= self._backlog_bytes_max:
            self._is_full = False
            if self._on_room is not None:
                self._on_room()
        self._changed.notify()
        return data

    def was_sent(self) -> None:
        self.is_sent = True
        self._count()
        self._changed.notify()

    def leave(self) -> None:
        """The client is gone, or cut off: forget what was kept for it."""
        super().leave()
        self._count()
        self.outgoing.clear()
        self._taken()

    def give_way(self) -> None:
        self._carrier.reset(self)

    def _count(self) -> None:
        is_waiting = self.outgoing or self.is_finished
        is_over = self.is_sent or self.is_gone
        self._hold_unsent(
            self, STREAM_BYTES + len(self.outgoing) if is_waiting and not is_over else 0
        )
