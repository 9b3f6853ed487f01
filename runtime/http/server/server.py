"""Serving an ASGI application with hypercorn's trio server. The only file that imports hypercorn.

hypercorn's own `worker_serve` makes its sockets itself and cannot be simulated, so its `TCPServer`
is driven here, through trio's listeners and over our `Connection`, which mends what hypercorn
lacks. It speaks HTTP/1 alone: hypercorn's HTTP/2 buffers without a bound for a client that grants
no window. What this file does not do: routes (`http/app.py`) and the drain of requests
(`http/service.py`).
"""

from __future__ import annotations

import contextlib
import http
import logging
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

from ...config.config import HttpConfig
from ...errors import OverloadedError
from ...metrics.metrics import Metrics
from ...nurseries import open_nursery
from ...protocol.openai.http_head import HeadFault
from ..exchange import CONNECTION, Receive, Scope, Send, find_header, send_error
from ..status import ErrorAnswer, HostNotAllowedError, answer_error, answer_head_fault
from .connection import Connection, configure_socket
from .connections import ConnectionTable
from .hosts import HostPolicy
from .listening import open_listeners
from .parser import StrictParser

__all__ = ["Server"]

REFUSALS_MAX: Final = 64
"""How many connections over the limit are answered at a time; the rest is just closed."""
REFUSAL_S: Final = 1.0
GONE_GRACE_S: Final = 1.0
CLOSE_GRACE_S: Final = 0.25

log = logging.getLogger("trinamo.http")


class Server:
    """Serves `app` until `close()`. One object serves once.

    Of `config`, `header_bytes_max` bounds a request's head (431), `connections_max` the open
    connections (one more takes the place of the oldest idle one; it is a 503 with OpenAI's body
    while every request is being answered), `keep_alive_s` an idle connection and a head that does
    not come, `write_timeout_s` a client that does not take its answer, `peer_timeout_s` a peer that
    vanished while nothing was on its way to it. `hosts` are the names that it is called by: see
    `hosts.py`.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: HttpConfig,
        *,
        metrics: Metrics,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._config = config
        self._hosts = HostPolicy.make(config.host, config.hosts)
        self._hypercorn = _make_config(config.header_bytes_max, config.keep_alive_s)
        self._context = WorkerContext(None)
        self._connections = ConnectionTable(config.connections_max)
        self._refusals = 0
        self._closing = trio.Event()
        self._drained = trio.Event()

    def close(self) -> None:
        """Accept no more, close idle connections at once and the others after a short grace."""
        self._closing.set()

    async def serve(self, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen and serve; reports the bound port when connections are accepted.

        Returns within a quarter of a second after `close()`, whatever the clients do. Cancelled,
        it leaves no connection either. Raises `ConfigError` if it cannot listen.
        """
        listeners = await open_listeners(self._config.host, self._config.port)
        port: int = listeners[0].socket.getsockname()[1]
        async with open_nursery() as connections:
            try:
                async with open_nursery() as accepting:
                    await accepting.start(
                        partial(
                            trio.serve_listeners,
                            self._serve_connection,
                            listeners,
                            handler_nursery=connections,
                        )
                    )
                    task_status.started(port)
                    await self._closing.wait()
                    accepting.cancel_scope.cancel()
                await self._context.terminated.set()
                with trio.move_on_after(CLOSE_GRACE_S):
                    if self._connections:
                        await self._drained.wait()
            finally:
                # Cancelling alone would wait for hypercorn's shielded sends.
                for connection in self._connections:
                    connection.abort()
                connections.cancel_scope.cancel()

    async def _serve_connection(self, stream: trio.SocketStream) -> None:
        if not self._make_room():
            await self._refuse(stream)
            return
        connection = Connection(stream, write_timeout_s=self._config.write_timeout_s)
        self._connections.add(connection)
        self._metrics.connection_opened("http")
        try:
            with contextlib.suppress(OSError):
                configure_socket(
                    connection.socket,
                    peer_timeout_s=self._config.peer_timeout_s,
                    write_timeout_s=self._config.write_timeout_s,
                )
            await self._drive(connection)
        except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            # The peer went away in the middle of something. It knows.
            pass
        except* Exception as errors:
            # Nothing a peer sends may end the process.
            log.exception("an HTTP connection failed", exc_info=errors)
        finally:
            connection.socket.close()
            self._connections.remove(connection)
            self._metrics.connection_closed("http")
            if self._closing.is_set() and not self._connections:
                self._drained.set()

    def _make_room(self) -> bool:
        if not self._connections.is_full:
            return True
        taken = self._connections.take()
        if taken is None:
            return False
        self._metrics.connection_taken()
        taken.abort()
        return True

    async def _drive(self, connection: Connection) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            has_body = any(find_header(scope, name) for name in _BODY_HEADERS)
            connection.request_started(has_body=has_body)
            self._connections.update(connection)
            try:
                await self._answer(connection, scope, receive, send)
            finally:
                connection.request_ended()
                self._connections.update(connection)

        # hypercorn's types ask for its own ASGI dictionaries and for a TLS stream.
        framework: Any = app
        stream: Any = connection
        server = _Http1Server(ASGIWrapper(framework), self._hypercorn, self._context, {}, stream)
        lock: Any = _SendLock()
        server.send_lock = lock
        async with open_nursery() as nursery:
            connection.start(nursery)
            with trio.CancelScope() as scope:
                nursery.start_soon(_end_when_gone, connection, server, scope)
                await server
            await connection.linger(has_unread=server.has_refused)
            nursery.cancel_scope.cancel()

    async def _answer(
        self, connection: Connection, scope: Scope, receive: Receive, send: Send
    ) -> None:
        def send_now(body: bytes) -> bool:
            # An empty chunk would end the body.
            return not body or connection.send_now(b"%x\r\n%b\r\n" % (len(body), body))

        async def receive_watched() -> Any:
            message = await receive()
            if not message.get("more_body", False):
                connection.body_ended()
                self._connections.update(connection)
            return message

        if scope["type"] == "http":
            scope.setdefault("extensions", {})[CONNECTION] = {
                # h11 frames a body of unknown length as chunks, and counts nothing in them.
                "send_now": send_now if scope.get("http_version") == "1.1" else None,
                "is_cut": lambda: connection.is_cut,
            }
            if not self._hosts.allows(find_header(scope, b"host")):
                await send_error(send, _HOST_ANSWER, [])
                return
        await self._app(scope, receive_watched, send)

    async def _refuse(self, stream: trio.SocketStream) -> None:
        """Say 503 to a connection over the limit, none of which is idle."""
        if self._refusals >= REFUSALS_MAX:
            await trio.aclose_forcefully(stream)
            return
        self._refusals += 1
        try:
            with trio.move_on_after(REFUSAL_S):
                await stream.send_all(_overload_response(self._config.connections_max))
                await stream.send_eof()
                while await stream.receive_some():
                    pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self._refusals -= 1
            stream.socket.close()


_HOST_ANSWER: Final = answer_error(
    HostNotAllowedError(
        "the Host header names another server; call this one by its address or by localhost, or"
        " add the name to 'http.hosts' of its configuration"
    )
)
_BODY_HEADERS: Final = (b"content-length", b"transfer-encoding")


class _Http1Server(TCPServer):  # type: ignore[misc]  # hypercorn is untyped here
    """hypercorn's server of one connection without its HTTP/2, whose `run` this replaces."""

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
    """hypercorn's HTTP/1, which reads heads strictly, upgrades to nothing, and explains refusals."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.connection = self._parser = StrictParser(
            header_bytes_max=self.config.h11_max_incomplete_size
        )
        self.has_refused = False

    async def _check_protocol(self, event: h11.Request) -> None:
        """Take no upgrade: a request that offers one is answered as it is (RFC 9110, 7.8)."""

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
        fault = self._parser.fault or HeadFault(
            status_code, f"this is no HTTP request: {http.HTTPStatus(status_code).phrase.lower()}"
        )
        answer = answer_head_fault(fault)
        await self.send(RawData(_closing_response(answer)))


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


def _overload_response(connections_max: int) -> bytes:
    return _closing_response(
        answer_error(
            OverloadedError(
                f"{connections_max} connections are open, which is the limit",
                bound="connections_max",
                value=connections_max,
            )
        )
    )


def _closing_response(answer: ErrorAnswer) -> bytes:
    """An error as the whole and last answer of a connection, without an application."""
    body = answer.to_body()
    retry = "" if answer.retry_after_s is None else f"retry-after: {answer.retry_after_s}\r\n"
    return (
        f"HTTP/1.1 {answer.status} {http.HTTPStatus(answer.status).phrase}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        f"{retry}connection: close\r\n\r\n"
    ).encode() + body
