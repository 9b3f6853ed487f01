"""Serving an ASGI application with hypercorn's trio server. The only file that imports hypercorn.

hypercorn's own `worker_serve` makes its sockets itself and cannot be simulated, so its `TCPServer`
is driven here, through trio's listeners and over our `Connection`, which mends what hypercorn
lacks. What this file does not do: routes (`app.py`) and the drain of requests (`service.py`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from functools import partial
from typing import Any, Final

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from starlette.types import ASGIApp

from ..errors import ConfigError, OverloadedError
from ..metrics import Metrics
from ..nurseries import open_nursery
from .connection import Connection, configure_socket
from .exchange import SEND_NOW, Receive, Scope, Send, find_header, send_error
from .status import HttpVersionError, answer_error

__all__ = ["Server", "open_listeners"]

BACKLOG: Final = 1024
REFUSALS_MAX: Final = 64
"""How many connections over the limit are answered at a time; the rest is just closed."""
REFUSAL_S: Final = 1.0
GONE_GRACE_S: Final = 1.0
CLOSE_GRACE_S: Final = 0.25

log = logging.getLogger("trinamo.http")


async def open_listeners(host: str, port: int) -> list[trio.SocketListener]:
    """Listen on every address of `host`, on one port; port 0 is chosen by the system.

    Raises `ConfigError` with a sentence that says what to do.
    """
    listeners: list[trio.SocketListener] = []
    try:
        found = await trio.socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for address in dict.fromkeys(str(info[4][0]) for info in found):
            listeners += await trio.open_tcp_listeners(port, host=address, backlog=BACKLOG)
            port = listeners[0].socket.getsockname()[1]
    except OSError as error:
        for listener in listeners:
            listener.socket.close()
        raise _explain(error, host, port) from error
    return listeners


def _explain(error: OSError, host: str, port: int) -> ConfigError:
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if isinstance(error, socket.gaierror):
        return ConfigError(f"cannot listen on {where}: the host '{host}' is not known here")
    match error.errno:
        case errno.EADDRINUSE:
            advice = (
                f"port {port} is in use; stop the program that has it, "
                "or choose another port (0 takes any free one)"
            )
        case errno.EACCES:
            advice = f"port {port} needs privileges; choose one above 1023"
        case errno.EADDRNOTAVAIL:
            advice = f"'{host}' is no address of this machine; try 127.0.0.1 or 0.0.0.0"
        case _:
            advice = error.strerror or str(error)
    return ConfigError(f"cannot listen on {where}: {advice}")


class Server:
    """Serves `app` until `close()`. One object serves once.

    `header_bytes_max` bounds a request's head (431), `connections_max` the open connections (503
    with OpenAI's body, then close), `keep_alive_s` an idle connection and a head that does not
    come, `write_timeout_s` a client that does not read, `peer_timeout_s` a peer that vanished.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        host: str = "127.0.0.1",
        port: int = 0,
        connections_max: int = 2048,
        header_bytes_max: int = 32 << 10,
        keep_alive_s: float = 60.0,
        write_timeout_s: float = 30.0,
        peer_timeout_s: float = 20.0,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._host, self._port = host, port
        self._connections_max = connections_max
        self._write_timeout_s, self._peer_timeout_s = write_timeout_s, peer_timeout_s
        self._config = _make_config(header_bytes_max, keep_alive_s)
        self._context = WorkerContext(None)
        self._connections: dict[Connection, None] = {}
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
        listeners = await open_listeners(self._host, self._port)
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
        if len(self._connections) >= self._connections_max:
            await self._refuse(stream)
            return
        connection = Connection(stream, write_timeout_s=self._write_timeout_s)
        self._connections[connection] = None
        self._metrics.connection_opened("http")
        try:
            with contextlib.suppress(OSError):
                configure_socket(connection.socket, peer_timeout_s=self._peer_timeout_s)
            await self._drive(connection)
        except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            # The peer went away in the middle of something. It knows.
            pass
        except* Exception as errors:
            # Nothing a peer sends may end the process.
            log.exception("an HTTP connection failed", exc_info=errors)
        finally:
            connection.socket.close()
            del self._connections[connection]
            self._metrics.connection_closed("http")
            if self._closing.is_set() and not self._connections:
                self._drained.set()

    async def _drive(self, connection: Connection) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            has_body = any(find_header(scope, name) for name in _BODY_HEADERS)
            connection.request_started(has_body=has_body)

            def send_now(body: bytes) -> bool:
                # An empty chunk would end the body.
                return not body or connection.send_now(b"%x\r\n%b\r\n" % (len(body), body))

            async def receive_watched() -> Any:
                message = await receive()
                if not message.get("more_body", False):
                    connection.body_ended()
                return message

            try:
                if scope["type"] == "http" and scope.get("http_version") == "1.1":
                    # h11 frames a body of unknown length as chunks, and counts nothing in them.
                    scope.setdefault("extensions", {})[SEND_NOW] = {"send_now": send_now}
                if scope.get("http_version") in _VERSIONS:
                    await self._app(scope, receive_watched, send)
                else:
                    with trio.move_on_after(self._write_timeout_s):
                        await send_error(send, _VERSION_ANSWER, [])
            finally:
                connection.request_ended()

        # hypercorn's types ask for its own ASGI dictionaries and for a TLS stream.
        framework: Any = app
        stream: Any = connection
        server = TCPServer(ASGIWrapper(framework), self._config, self._context, {}, stream)
        lock: Any = _SendLock()
        server.send_lock = lock
        async with open_nursery() as nursery:
            connection.attend(nursery)
            with trio.CancelScope() as scope:
                nursery.start_soon(_end_when_gone, connection, server, scope)
                await server
            await connection.linger()
            nursery.cancel_scope.cancel()

    async def _refuse(self, stream: trio.SocketStream) -> None:
        """Say 503 to a connection over the limit."""
        if self._refusals >= REFUSALS_MAX:
            await trio.aclose_forcefully(stream)
            return
        self._refusals += 1
        try:
            with trio.move_on_after(REFUSAL_S):
                await stream.send_all(_overload_response(self._connections_max))
                await stream.send_eof()
                while await stream.receive_some():
                    pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self._refusals -= 1
            stream.socket.close()


# hypercorn speaks HTTP/2 on the same port, but buffers without a bound for a client that grants no
# window: a push waits for an event that reading nothing sets as well.
_VERSIONS: Final = ("1.0", "1.1")
_VERSION_ANSWER: Final = answer_error(
    HttpVersionError("HTTP/2 is not supported here; use HTTP/1.1, or a proxy that does")
)
_BODY_HEADERS: Final = (b"content-length", b"transfer-encoding")


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
    answer = answer_error(
        OverloadedError(
            f"{connections_max} connections are open, which is the limit",
            bound="connections_max",
            value=connections_max,
        )
    )
    body = answer.to_body()
    return (
        f"HTTP/1.1 {answer.status} Service Unavailable\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        f"retry-after: {answer.retry_after_s}\r\nconnection: close\r\n\r\n"
    ).encode() + body
