"""An exchange as ASGI has it, for what no handler answers; and a request of an ASGI server as an exchange."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final
from urllib.parse import unquote

import trio

from trinamo.runtime.http.exchanges import ClientGoneError, Headers, HttpExchange
from trinamo.runtime.http.transport import Receive, Scope, Send
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.sinks import Changes

from .carried import CarriedExchange, CarriedHead
from .http1.connection import READ_AHEAD_BYTES_MAX
from .refusals import Dates

SENDS_PER_CHECKPOINT: Final = 16
"""So an application that never waits, for a client that always reads, does not hold up others."""


class AsgiCall:
    """The three arguments of an application: `scope`, `receive`, `send`.

    As other servers do, it drops what is sent to a client that has gone, and `receive` says
    `http.disconnect` also when the answer is complete.
    """

    def __init__(self, exchange: HttpExchange, scheme: str, socket: trio.socket.SocketType) -> None:
        head = exchange.head
        path = head.path.decode("ascii")
        self.scope: MutableMapping[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.version,
            "method": head.method.decode("ascii"),
            "scheme": scheme,
            "path": unquote(path) if "%" in path else path,
            "raw_path": head.path,
            "query_string": head.query,
            "root_path": "",
            "headers": head.headers,
            "client": _address(socket.getpeername),
            "server": _address(socket.getsockname),
        }
        self._exchange = exchange
        self._is_body_over = False
        self._sends = 0

    async def receive(self) -> MutableMapping[str, Any]:
        exchange = self._exchange
        if not self._is_body_over:
            try:
                piece = await exchange.receive_body()
            except ClientGoneError:
                return {"type": "http.disconnect"}
            self._is_body_over = exchange.is_body_complete
            return {"type": "http.request", "body": piece, "more_body": not self._is_body_over}
        await exchange.wait_over()
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """The next event of the answer; waits while the client takes too little of it.

        After the last it returns when the kernel has everything, or the client is gone.
        """
        exchange = self._exchange
        if message["type"] == "http.response.start":
            exchange.start(message["status"], list(message.get("headers", ())))
            return
        if message["type"] != "http.response.body":
            raise ValueError(f"{message['type']} is no event of an answer")
        body = bytes(message.get("body", b""))
        if not message.get("more_body", False):
            exchange.finish(body)
            await exchange.sent()
        elif not exchange.write(body):
            await exchange.wait_room()
        else:
            self._sends += 1
            if self._sends % SENDS_PER_CHECKPOINT == 0:
                await trio.lowlevel.checkpoint()


def _address(ask: Callable[[], tuple[str, int]]) -> tuple[str, int] | None:
    """Of a socket; None if the peer has been faster."""
    with contextlib.suppress(OSError):
        host, port = ask()[:2]
        return host, port
    return None


# --- a request of any ASGI server, as an exchange ---


async def answer_over_asgi(
    answer: Callable[[HttpExchange], Awaitable[None]],
    call: tuple[Scope, Receive, Send],
    dates: Dates,
    *,
    backlog_bytes_max: int,
) -> None:
    """Let `answer` answer the request, and return once all is sent, or the client is gone.

    An ASGI server tells nobody that the client has left but who waits in `receive()`, and a `send`
    may wait as long as the client likes; it says by an `OSError` that the client is gone. So one
    task reads and another one writes.
    """
    scope = call[0]
    path = scope.get("raw_path") or str(scope["path"]).encode()
    query = scope.get("query_string", b"")
    head = CarriedHead(
        str(scope["method"]).encode("latin-1"),
        path + (b"?" + query if query else b""),
        list(scope["headers"]),
        "1.1",
    )
    carrier = _AsgiCarrier(call, dates)
    exchange = CarriedExchange(
        1, head, carrier, lambda _, __: None, backlog_bytes_max=backlog_bytes_max
    )
    async with open_nursery() as nursery:
        nursery.start_soon(carrier.read, exchange)
        nursery.start_soon(carrier.write, exchange)
        try:
            await answer(exchange)
            await exchange.sent()
        finally:
            exchange.release()
        nursery.cancel_scope.cancel()


class _AsgiCarrier:
    def __init__(self, call: tuple[Scope, Receive, Send], dates: Dates) -> None:
        scope, self._receive, self._send = call
        client = scope.get("client")
        self.address = str(client[0]) if client else ""
        self.dates = dates
        self._head: MutableMapping[str, Any] | None = None
        self._is_over = False
        """The server has the end of the answer: it says then, too, that the client has left."""
        self._changed = Changes()

    def send_head(self, _: int, status: int, headers: Headers) -> None:
        # It says itself that a body is asked for.
        if status >= 200:
            self._head = {"type": "http.response.start", "status": status, "headers": headers}
            self._changed.notify()

    def send_body(self, _: CarriedExchange) -> None:
        self._changed.notify()

    def grant(self, _: int, __: int) -> None:
        self._changed.notify()

    def reset(self, stream: CarriedExchange) -> None:
        stream.leave()

    async def read(self, exchange: CarriedExchange) -> None:
        """Take the body as fast as it is read, and then see the client leave."""
        while (message := await self._receive())["type"] != "http.disconnect":
            data = message.get("body", b"")
            exchange.put(data, len(data))
            if not message.get("more_body", False):
                exchange.end_input()
            while len(exchange.body) >= READ_AHEAD_BYTES_MAX:
                await self._changed.wait()
        if not self._is_over:
            exchange.leave()
            self._changed.notify()

    async def write(self, exchange: CarriedExchange) -> None:
        try:
            while not exchange.is_gone:
                if (head := self._head) is not None:
                    self._head = None
                    if exchange.is_last:
                        head["headers"].append((b"connection", b"close"))
                    await self._send(head)
                    continue
                data, self._is_over = bytes(exchange.outgoing), exchange.is_finished
                if not (data or self._is_over):
                    await self._changed.wait()
                    continue
                is_last = self._is_over
                body = {"type": "http.response.body", "body": data, "more_body": not is_last}
                await self._send(body)
                exchange.take_off(len(data))
                if is_last:
                    exchange.was_sent()
                    return
        except OSError:
            exchange.leave()
