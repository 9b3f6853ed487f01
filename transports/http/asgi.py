"""An exchange as ASGI has it, for everything that is not answered directly."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, MutableMapping
from typing import Any, Final
from urllib.parse import unquote

import trio

from trinamo.runtime.http.exchanges import ClientGoneError

from .exchange import Exchange

SENDS_PER_CHECKPOINT: Final = 16
"""So an application that never waits, for a client that always reads, does not hold up others."""


class AsgiCall:
    """The three arguments of an application: `scope`, `receive`, `send`.

    As other servers do, it drops what is sent to a client that has gone, and `receive` says
    `http.disconnect` also when the answer is complete.
    """

    def __init__(self, exchange: Exchange, scheme: str, socket: trio.socket.SocketType) -> None:
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
        """The next event of the request."""
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
