"""Speaking HTTP with hypercorn's trio server, and TLS. The only file that imports hypercorn.

hypercorn's own `worker_serve` makes its sockets itself and cannot be simulated, so its `TCPServer`
is driven here, over our `Connection`, which mends what hypercorn lacks. It speaks HTTP/1 alone;
who agrees on HTTP/2 in the TLS handshake is served by `http2/`. What this file does not do: listen
and accept (`../server.py`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import h11
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, RawData
from hypercorn.protocol.events import Response
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr
from starlette.types import ASGIApp

from ....config.http import HttpConfig
from ....nurseries import open_nursery
from ...asgi import Receive, Scope, Send, send_error
from ...exchanges import find_header
from ...shares import Budget
from ..hosts import HostPolicy
from ..refusals import HOST_ANSWER, Refusals
from ..tls.certificates import Certificates
from ..tls.session import TlsSession
from .connection import Connection
from .http2.protocol import Http2
from .http2.streams import Http2Stream
from .parser import StrictParser

GONE_GRACE_S: Final = 1.0

log = logging.getLogger("trinamo.http")


class HypercornDriver:
    """Serves `app` with hypercorn; `changed` is told of connections that may have changed phase."""

    def __init__(
        self,
        app: ASGIApp,
        config: HttpConfig,
        hosts: HostPolicy,
        refusals: Refusals,
        changed: Callable[[Connection], None],
        certificates: Certificates | None,
    ) -> None:
        self._app = app
        self._config = config
        self._hosts = hosts
        self._refusals = refusals
        self._changed = changed
        self._backlogs = Budget("http.backlogs_bytes_max", config.backlogs_bytes_max)
        self._certificates = certificates
        self._hypercorn = _make_config(config.header_bytes_max, config.keep_alive_s)
        self._context = WorkerContext(None)
        self._closing = trio.Event()

    def open(self, stream: trio.SocketStream) -> Connection:
        """See `Driver`."""
        certificates = self._certificates
        return Connection(
            stream,
            write_timeout_s=self._config.write_timeout_s,
            tls=None if certificates is None else TlsSession(certificates.context),
        )

    async def close_idle(self) -> None:
        """See `Driver`."""
        self._closing.set()
        await self._context.terminated.set()

    async def drive(self, connection: Connection) -> None:
        """See `Driver`."""
        if self._certificates is None:
            await self._drive_http1(connection)
            return
        protocol = await connection.shake_hands(
            self._config.tls.handshake_timeout_s,
            lambda fault: self._refusals.fault(fault, fault.status),
        )
        self._changed(connection)
        if protocol == "h2":
            await self._drive_http2(connection)
        elif protocol is not None:
            await self._drive_http1(connection)

    async def _drive_http1(self, connection: Connection) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            has_body = any(find_header(scope["headers"], name) for name in _BODY_HEADERS)
            await self._answer(connection, scope, receive, send, has_body=has_body)

        # hypercorn's types ask for its own ASGI dictionaries and for a TLS stream.
        framework: Any = app
        stream: Any = connection
        server = _Http1Server(ASGIWrapper(framework), self._hypercorn, self._context, {}, stream)
        lock: Any = _SendLock()
        server.send_lock = lock
        server.is_secure = self._certificates is not None
        server.refusals = self._refusals
        async with open_nursery() as nursery:
            connection.start(nursery)
            with trio.CancelScope() as scope:
                nursery.start_soon(_end_when_gone, connection, server, scope)
                await server
            await connection.linger(has_unread=server.has_refused)
            nursery.cancel_scope.cancel()

    async def _drive_http2(self, connection: Connection) -> None:
        async def app(stream: Http2Stream, receive: Receive, send: Send) -> None:
            has_body = not stream.is_input_over
            await self._answer(connection, stream.scope, receive, send, has_body=has_body)

        socket = connection.socket
        server = Http2(
            connection,
            app,
            header_bytes_max=self._config.header_bytes_max,
            keep_alive_s=self._config.keep_alive_s,
            write_timeout_s=self._config.write_timeout_s,
            base={
                "scheme": "https",
                "client": parse_socket_addr(socket.family, socket.getpeername()),
                "server": parse_socket_addr(socket.family, socket.getsockname()),
                "state": {},
            },
            own_headers=partial(self._hypercorn.response_headers, "h2"),
            backlogs=self._backlogs,
        )
        async with open_nursery() as nursery:
            connection.start(nursery)
            nursery.start_soon(self._leave_at_the_end, server)
            await server.serve()
            # What it says last is to be read, not to be lost in a reset.
            await connection.linger(has_unread=True)
            nursery.cancel_scope.cancel()

    async def _leave_at_the_end(self, server: Http2) -> None:
        await self._closing.wait()
        server.leave()

    async def _answer(
        self, connection: Connection, scope: Scope, receive: Receive, send: Send, *, has_body: bool
    ) -> None:
        is_arriving = has_body

        async def send_checked(message: MutableMapping[str, Any]) -> None:
            await send(message)
            if connection.is_cut:
                # As ASGI has it; hypercorn itself tells nobody.
                raise BrokenPipeError("the client does not have the whole answer")

        async def receive_watched() -> Any:
            nonlocal is_arriving
            message = await receive()
            if is_arriving and not message.get("more_body", False):
                is_arriving = False
                connection.body_ended()
                self._changed(connection)
            return message

        connection.request_started(has_body=has_body)
        self._changed(connection)
        try:
            if scope["type"] == "http" and not self._hosts.allows(
                find_header(scope["headers"], b"host")
            ):
                more = self._refusals.tell(
                    HOST_ANSWER, scope["method"], scope["path"], scope["headers"]
                )
                await send_error(send, HOST_ANSWER, more)
            else:
                with contextlib.suppress(BrokenPipeError):
                    await self._app(scope, receive_watched, send_checked)
        finally:
            if is_arriving and scope.get("http_version") == "2":
                connection.body_ended()
            connection.request_ended()
            self._changed(connection)


_BODY_HEADERS: Final = (b"content-length", b"transfer-encoding")


class _Http1Server(TCPServer):  # type: ignore[misc]  # hypercorn is untyped here
    """hypercorn's server of one connection without its HTTP/2, whose `run` this replaces."""

    is_secure = False
    refusals: Refusals

    @property
    def has_refused(self) -> bool:
        """A head was refused, so that what follows it was not read."""
        protocol: _Http1 | None = getattr(self, "protocol", None)
        return protocol is not None and protocol.has_refused

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
                    ssl=self.is_secure,
                    client=client,
                    server=server,
                    send=self.protocol_send,
                )
                self.protocol = protocol
                protocol.refusals = self.refusals
                await self.idle_task.restart(self._task_group, self._idle_timeout)
                await self._read_data()
        except OSError:
            pass
        finally:
            await self._close()


class _Http1(H11Protocol):  # type: ignore[misc]  # hypercorn is untyped here
    """hypercorn's HTTP/1, which reads heads strictly, upgrades to nothing, and explains refusals."""

    refusals: Refusals

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.connection = self._parser = StrictParser(
            header_bytes_max=self.config.h11_max_incomplete_size
        )
        self.has_refused = False

    async def _check_protocol(self, event: h11.Request) -> None:
        """Take no upgrade: a request that offers one is answered as it is (RFC 9110, 7.8)."""

    async def _create_stream(self, request: h11.Request) -> None:
        """See to it that hypercorn finds no offer of a websocket, which is one of an upgrade."""
        kept = [(name, value) for name, value in request.headers if name != b"upgrade"]
        plain = h11.Request(
            method=request.method,
            target=request.target,
            headers=kept,
            http_version=request.http_version,
        )
        await super()._create_stream(plain)

    async def stream_send(self, event: Any) -> None:
        """Say so, if the answer begins before its request has ended: hypercorn closes after it.

        A client that keeps its connections would else send its next request into the close.
        """
        closing = (b"connection", b"close")
        is_early = isinstance(event, Response) and self._parser.their_state is h11.SEND_BODY
        if is_early and closing not in event.headers:
            event = replace(event, headers=[*event.headers, closing])
        await super().stream_send(event)

    async def _send_error_response(self, status_code: int) -> None:
        self.has_refused = True
        if self.stream is not None and self._parser.trailing_data[1]:
            # A body that broke off: nobody waits for an answer, and whoever reads it tells of it.
            return
        await self.send(RawData(self.refusals.fault(self._parser.fault, status_code)))


class _SendLock:
    """In place of hypercorn's `trio.Lock`, which yields to every other task even when it is free.

    A cancelled task does not get it, so it sends nothing; hypercorn shields the send itself.
    """

    def __init__(self) -> None:
        self._lock = trio.Lock()

    async def __aenter__(self) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            self._lock.acquire_nowait()
        except trio.WouldBlock:
            await self._lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()


async def _end_when_gone(
    connection: Connection, server: TCPServer, scope: trio.CancelScope
) -> None:
    """Once one side has ended the connection, tell the application, and end what hypercorn forgets.

    hypercorn leaves its reader parked behind a pipelined request or an unread body, and its idle
    timer running, after the connection is gone.
    """
    await connection.wait_gone()
    protocol = getattr(server, "protocol", None)
    if protocol is None:
        # The peer was gone before hypercorn had asked for its address.
        return
    await protocol.handle(Closed())
    with trio.move_on_after(GONE_GRACE_S):
        await connection.wait_idle()
    if connection.requests_in_flight:
        connection.abort()
        await connection.wait_idle()
    scope.cancel()


def _make_config(header_bytes_max: int, keep_alive_s: float) -> Config:
    config = Config()
    config.accesslog = None
    config.errorlog = log
    config.h11_max_incomplete_size = header_bytes_max
    config.keep_alive_timeout = keep_alive_s
    config.keep_alive_max_requests = 100_000
    config.include_server_header = False
    return config
