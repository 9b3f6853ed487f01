"""HTTP/1.1 in clear text: an ASGI application, and handlers that are given the exchange itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final

import trio
from starlette.types import ASGIApp

from ....config.http import HttpConfig
from ...exchanges import Handler
from ...shares import Budget
from ...status import answer_error
from ..hosts import HostPolicy
from ..refusals import HOST_ANSWER, Refusals
from .asgi import AsgiCall
from .connection import NativeConnection
from .exchange import NativeExchange
from .wire import open_wire

HOSTS_KNOWN_MAX: Final = 256

log = logging.getLogger("trinamo.http")


class NativeDriver:
    """See `Driver`. `handlers` are found by method and path, exactly; the rest is `app`'s."""

    def __init__(
        self,
        app: ASGIApp,
        handlers: Mapping[tuple[bytes, bytes], Handler],
        config: HttpConfig,
        hosts: HostPolicy,
        refusals: Refusals,
        on_phase: Callable[[NativeConnection], None],
    ) -> None:
        self._app, self._handlers = app, handlers
        self._config, self._hosts, self._on_phase = config, hosts, on_phase
        self._refusals = refusals
        self._backlogs = Budget("http.backlogs_bytes_max", config.backlogs_bytes_max)
        self._known: set[bytes | None] = set()
        self._open: dict[NativeConnection, None] = {}

    def open(self, stream: trio.SocketStream) -> NativeConnection:
        """See `Driver`."""
        return NativeConnection(
            open_wire(stream),
            self._config,
            self._refusals,
            self._answer,
            self._on_phase,
            self._backlogs,
        )

    async def drive(self, connection: NativeConnection) -> None:
        """See `Driver`."""
        self._open[connection] = None
        try:
            await connection.serve()
        finally:
            del self._open[connection]

    async def close_idle(self) -> None:
        """See `Driver`."""
        for connection in self._open:
            connection.close_when_idle()

    async def _answer(self, exchange: NativeExchange, socket: trio.socket.SocketType) -> None:
        """Answer one request, whatever the application does. Raises nothing but its cancellation."""
        try:
            if not self._allows(exchange.head.host):
                head = exchange.head
                more = self._refusals.tell(HOST_ANSWER, head.method, head.path, head.headers)
                exchange.respond(HOST_ANSWER.status, HOST_ANSWER.to_body(), more)
                return
            handler = self._handlers.get((exchange.method, exchange.path))
            if handler is not None:
                await handler(exchange)
            else:
                call = AsgiCall(exchange, socket)
                await self._app(call.scope, call.receive, call.send)
            exchange.check_finished()
        except* Exception as errors:
            log.exception("a request failed", exc_info=errors)
            if not (exchange.has_begun or exchange.is_gone):
                answer = answer_error(errors)
                exchange.respond(answer.status, answer.to_body(), answer.headers)

    def _allows(self, host: bytes | None) -> bool:
        """What the policy says, which costs more than all else that is done for a head."""
        if host in self._known:
            return True
        if not self._hosts.allows(host):
            return False
        if len(self._known) >= HOSTS_KNOWN_MAX:
            self._known.clear()
        self._known.add(host)
        return True
