"""Speaking HTTP/1.1 with hypercorn, as it comes. The only file that imports it.

What hypercorn does not protect from is on the page of operations: it is for a second opinion on
loopback. What this file does not do: TLS and HTTP/2, which are our own listener's, requests as
exchanges (`asgi.py`), and what is answered (`driver.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

from trinamo.runtime.config.http import HttpConfig
from trinamo.runtime.http.exchanges import HttpExchange
from trinamo.runtime.http.transport import Receive, Scope, Send
from trinamo.transports.sockets.wire import abort

from .asgi import answer_over_asgi
from .connections import Phase
from .http1.connection import REQUESTS_MAX
from .refusals import Dates

log = logging.getLogger("trinamo.http")


class Hypercorn:
    """Opens connections that hypercorn serves; `answer` answers each request of theirs."""

    def __init__(
        self,
        config: HttpConfig,
        dates: Dates,
        answer: Callable[[HttpExchange, trio.socket.SocketType], Awaitable[None]],
    ) -> None:
        self._answer, self._dates = answer, dates
        self._bytes_max = config.backlog_bytes_max
        self._config = Config()
        self._config.accesslog = None
        self._config.errorlog = log
        self._config.h11_max_incomplete_size = config.header_bytes_max
        self._config.keep_alive_timeout = config.keep_alive_s
        self._config.keep_alive_max_requests = REQUESTS_MAX
        self._config.include_server_header = self._config.include_date_header = False
        self._context: Any = WorkerContext(None)
        # hypercorn's own event is set by a coroutine, which does nothing else.
        self._context.terminated = trio.Event()

    def open(self, stream: trio.SocketStream) -> HypercornConnection:
        # hypercorn's types ask for its own ASGI dictionaries and for a TLS stream.
        app: Any = partial(self._serve, stream.socket)
        plain: Any = stream
        server = _Server(ASGIWrapper(app), self._config, self._context, {}, plain)
        return HypercornConnection(stream.socket, server, self._context.terminated.set)

    async def _serve(
        self, socket: trio.socket.SocketType, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        await answer_over_asgi(
            lambda exchange: self._answer(exchange, socket),
            (scope, receive, send),
            self._dates,
            backlog_bytes_max=self._bytes_max,
        )


class HypercornConnection:
    """See `Connection`. What it does is not known, so it gives its place to nobody."""

    def __init__(
        self, socket: trio.socket.SocketType, server: TCPServer, terminate: Callable[[], None]
    ) -> None:
        self.socket, self.phase = socket, Phase.ANSWERING
        self._server = server
        self.close_when_idle = terminate
        """Hypercorn knows only all connections of a worker."""

    async def serve(self) -> None:
        await self._server

    def retire(self) -> None:
        """Nothing: its clients are on this machine, and no balancer is between."""

    def abort(self) -> None:
        abort(self.socket)


class _Server(TCPServer):  # type: ignore[misc]  # hypercorn is untyped here
    """hypercorn's server of one connection with its HTTP/1 alone, whatever a client offers."""

    async def run(self) -> None:
        socket = self.stream.socket
        try:
            client = parse_socket_addr(socket.family, socket.getpeername())
            server = parse_socket_addr(socket.family, socket.getsockname())
            async with TaskGroup() as self._task_group:
                # hypercorn's type asks for its wrapper of all versions of HTTP.
                protocol: Any = _Http1(
                    self.app,
                    self.config,
                    self.context,
                    self._task_group,
                    ConnectionState(self.state),
                    ssl=False,
                    client=client,
                    server=server,
                    send=self.protocol_send,
                )
                self.protocol = protocol
                await self.idle_task.restart(self._task_group, self._idle_timeout)
                await self._read_data()
        except OSError:
            pass
        finally:
            await self._close()


class _Http1(H11Protocol):  # type: ignore[misc]  # hypercorn is untyped here
    async def _check_protocol(self, event: object) -> None:
        """Take no upgrade: a request that offers one is answered as it is (RFC 9110, 7.8)."""
