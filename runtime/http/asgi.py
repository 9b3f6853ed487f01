"""An `HttpExchange` over any ASGI server: at most one task that writes, and one that watches.

An ASGI server tells nobody that the client has left but who waits in `receive()`, and a `send` may
wait as long as the client likes. What this file does not do: know what is asked (`chat.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

import trio

from ..nurseries import open_nursery
from .bodies import Body, check_length
from .exchanges import JSON_TYPE, ClientGoneError, Handler, Headers, HttpExchange, find_header
from .status import ErrorAnswer

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ExchangeApp:
    """An ASGI application that lets `handler` answer each request, and waits until all is sent.

    `backlog_bytes_max` is `http.backlog_bytes_max`.
    """

    def __init__(self, handler: Handler, *, backlog_bytes_max: int) -> None:
        self._handler = handler
        self._backlog_bytes_max = backlog_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with open_nursery() as nursery:
            exchange = AsgiExchange(
                scope, receive, send, nursery, backlog_bytes_max=self._backlog_bytes_max
            )
            await self._handler(exchange)
            await exchange.sent()
            nursery.cancel_scope.cancel()


class AsgiExchange(HttpExchange):
    """One request of an ASGI server. `send` says by an `OSError` that the client is gone.

    Its tasks run in `nursery`: the one that watches from `on_gone` on, and the one that writes from
    the first `write` on. An answer of one piece is sent by `sent`, without that task.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        nursery: trio.Nursery,
        *,
        backlog_bytes_max: int,
    ) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._nursery = nursery
        self._bytes_max = backlog_bytes_max
        self._head: MutableMapping[str, Any] | None = None
        self._status = 0
        self._pieces: list[bytes] = []
        self._unsent_bytes = 0
        self._is_full = False
        self._is_finished = False
        self._is_handed_over = False
        self._is_writing = False
        self._is_gone = False
        self._gone: Callable[[], None] | None = None
        self._room: Callable[[], None] | None = None
        self._to_write = trio.lowlevel.ParkingLot()
        self._written = trio.lowlevel.ParkingLot()

    @property
    def method(self) -> bytes:
        return str(self._scope["method"]).encode("latin-1")

    @property
    def path(self) -> bytes:
        return str(self._scope["path"]).encode()

    @property
    def headers(self) -> Headers:
        found: Headers = self._scope["headers"]
        return found

    @property
    def address(self) -> str:
        client = self._scope.get("client")
        return str(client[0]) if client else ""

    async def read_body(self, body: Body, *, bytes_max: int, timeout_s: float) -> bytearray:
        length = find_header(self.headers, b"content-length")
        if length is not None and length.isdigit():
            check_length(int(length), bytes_max)
            body.check(int(length))
        data = bytearray()
        with body.arriving(timeout_s):
            while True:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    self._is_gone = True
                    raise ClientGoneError
                piece = message.get("body", b"")
                check_length(len(data) + len(piece), bytes_max)
                body.hold(len(data) + len(piece))
                data += piece
                if not message.get("more_body", False):
                    break
        return data

    # --- the client --------------------------------------------------------------------------

    @property
    def is_gone(self) -> bool:
        return self._is_gone

    def on_gone(self, listener: Callable[[], None]) -> None:
        is_watched = self._gone is not None
        self._gone = listener
        if self._is_gone:
            listener()
        elif not is_watched:
            self._nursery.start_soon(self._watch)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        # Servers say the same when an answer is complete.
        if not self._is_handed_over:
            self._leave()

    def _leave(self) -> None:
        if self._is_gone:
            return
        self._is_gone = True
        self._pieces.clear()
        self._to_write.unpark_all()
        self._written.unpark_all()
        if self._gone is not None:
            self._gone()

    # --- the answer --------------------------------------------------------------------------

    @property
    def status(self) -> int:
        return self._status

    def start(self, status: int, headers: Headers) -> None:
        self._status = status
        self._head = {"type": "http.response.start", "status": status, "headers": headers}

    def write(self, data: bytes) -> bool:
        if self._is_gone or not data:
            return True
        self._add(data)
        if not self._is_writing:
            self._is_writing = True
            self._nursery.start_soon(self._write)
        self._is_full = self._unsent_bytes >= self._bytes_max
        return not self._is_full

    def on_room(self, listener: Callable[[], None]) -> None:
        self._room = listener

    def finish(self, data: bytes = b"") -> None:
        self._is_finished = True
        self._add(data)

    def respond(self, status: int, body: bytes, headers: Headers) -> None:
        own = [(b"content-length", str(len(body)).encode())]
        if find_header(headers, b"content-type") is None:
            own.append((b"content-type", JSON_TYPE))
        self.start(status, own + headers)
        self.finish(body)

    def _add(self, data: bytes) -> None:
        self._pieces.append(data)
        self._unsent_bytes += len(data)
        self._to_write.unpark_all()

    async def sent(self) -> None:
        if not self._is_writing:
            await self._flush()
        while self._has_unsent():
            await self._written.park()

    def _has_unsent(self) -> bool:
        return bool(self._unsent_bytes or (self._is_finished and not self._is_handed_over)) and (
            not self._is_gone
        )

    async def _write(self) -> None:
        while not self._is_over():
            await self._flush()
            self._written.unpark_all()
            if not (self._has_unsent() or self._is_over()):
                await self._to_write.park()

    def _is_over(self) -> bool:
        return self._is_gone or self._is_handed_over

    async def _flush(self) -> None:
        """Send all that there is, in as few messages as that takes."""
        try:
            while self._has_unsent():
                data = b"".join(self._pieces)
                self._pieces.clear()
                if self._head is not None:
                    head, self._head = self._head, None
                    await self._send(head)
                self._is_handed_over = self._is_finished and not self._pieces
                is_last = self._is_handed_over
                await self._send(
                    {"type": "http.response.body", "body": data, "more_body": not is_last}
                )
                self._take_off(len(data))
        except OSError:
            self._leave()

    def _take_off(self, size: int) -> None:
        self._unsent_bytes -= size
        if self._is_full and self._unsent_bytes * 2 <= self._bytes_max:
            self._is_full = False
            if self._room is not None:
                self._room()


async def send_error(send: Send, answer: ErrorAnswer, more: Headers | None = None) -> None:
    """Send an error, with its headers or `more`, as the whole answer of what no application sees."""
    body = answer.to_body()
    own = [(b"content-type", JSON_TYPE), (b"content-length", str(len(body)).encode())]
    headers = own + (answer.headers if more is None else more)
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
