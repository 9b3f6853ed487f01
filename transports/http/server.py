"""Listening, the bound of connections, and the end: what every server of HTTP here has in common.

Who speaks HTTP on an accepted connection is a matter of `driver.py`. What this file does not do:
routes (`runtime/http/app.py`) and the drain of requests (`runtime/http/service.py`).
"""

from __future__ import annotations

import logging
import random
import socket
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from types import MappingProxyType
from typing import Any, Final

import trio

from trinamo.runtime.config.http import HttpConfig
from trinamo.runtime.http.exchanges import Handler
from trinamo.runtime.http.transport import AsgiApp
from trinamo.runtime.metrics.metrics import Metrics
from trinamo.runtime.nurseries import open_nursery
from trinamo.transports.sockets.certificates import keep_renewed, key_faults

from .certificates import Certificates
from .connections import ConnectionTable, Phase
from .driver import HostPolicy, NativeDriver
from .listening import configure_socket, open_listeners
from .refusals import Refusals

REFUSALS_MAX: Final = 64
"""How many connections over the limit are answered at a time; the rest is just closed."""
REFUSAL_S: Final = 1.0
CLOSE_GRACE_S: Final = 0.25
ANSWER_TURNS: Final = 4
"""From the event that a request has arrived to the first step of its answer, and a turn more."""

log = logging.getLogger("trinamo.http")


class Server:
    """Serves `app` until `close()`. One object serves once.

    Of `config`, `header_bytes_max` bounds a request's head (431), `connections_max` the open
    connections (one more takes the place of one that is not being answered: `ConnectionTable.take`; it
    is a 503 with OpenAI's body while all are), `keep_alive_s` an idle connection and a head that does
    not come, `write_timeout_s` a client that does not take its answer, `peer_timeout_s` a peer that
    vanished while nothing was on its way to it. `hosts` are the names that it is called by: see
    `driver.py`. `handlers` answer their method and path in place of `app`.
    """

    def __init__(
        self,
        app: AsgiApp,
        config: HttpConfig,
        *,
        metrics: Metrics,
        rng: random.Random,
        handlers: Mapping[tuple[bytes, bytes], Handler] = MappingProxyType({}),
    ) -> None:
        self._metrics = metrics
        self._refusals = Refusals(metrics.clock, rng, config.request_id_headers)
        self._open = metrics.counts("connections", "Open connections", "kind", may_fall=True).tally(
            "http"
        )
        self._taken = metrics.count(
            "connections_taken", "HTTP connections closed for new ones, at the bound"
        )
        self._config = config
        self._connections = ConnectionTable(config.connections_max)
        hosts = HostPolicy.make(config.host, config.hosts)
        has_tls = config.tls.certificate_file is not None
        self._certificates = Certificates(config.tls) if has_tls else None
        changed = self._connections.update
        self._driver = NativeDriver(
            app, handlers, config, hosts, self._refusals, changed, self._certificates
        )
        self._refusing = 0
        self._is_retiring = False
        self._sharing = trio.CancelScope()
        self._closing = trio.Event()
        self._drained = trio.Event()

    def retire(self) -> None:
        self._is_retiring = True
        for connection in self._connections:
            connection.retire()

    def hand_over(self) -> None:
        self._sharing.cancel()

    async def close_idle(self) -> None:
        for connection in self._connections:
            if connection.phase is Phase.IDLE:
                connection.close_when_idle()
        # Readers to whom the kernel gives a request go on in the next turn of the loop, and in the one after
        # it those who answer, which must ask for admission before the caller refuses new work.
        for _ in range(ANSWER_TURNS):
            await trio.lowlevel.checkpoint()

    def close(self) -> None:
        self._closing.set()

    async def serve(self, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
        config = self._config
        listeners = await open_listeners(config.host, config.port, reuse_port=config.reuse_port)
        port: int = listeners[0].socket.getsockname()[1]
        async with open_nursery() as connections:
            try:
                async with open_nursery() as accepting:
                    await accepting.start(self._accept, listeners, connections)
                    if self._certificates is not None:
                        accepting.start_soon(self._renew, self._certificates)
                    task_status.started(port)
                    await self._closing.wait()
                    accepting.cancel_scope.cancel()
                for connection in self._connections:
                    connection.close_when_idle()
                with trio.move_on_after(CLOSE_GRACE_S):
                    if self._connections:
                        await self._drained.wait()
            finally:
                # Cancelling alone would wait for hypercorn's shielded sends.
                for connection in self._connections:
                    connection.abort()
                connections.cancel_scope.cancel()

    async def _accept(
        self,
        listeners: list[trio.SocketListener],
        connections: trio.Nursery,
        *,
        task_status: trio.TaskStatus[Any],
    ) -> None:
        """Serve who connects, until cancelled or until `hand_over`."""
        with ExitStack() as stack:
            kept: list[socket.socket] = []
            if self._config.reuse_port:
                # Closing a listener resets whom the kernel has connected to it and nobody has accepted.
                kept += [stack.enter_context(_duplicate(each)) for each in listeners]
            with self._sharing:
                await trio.serve_listeners(
                    self._serve_connection,
                    listeners,
                    handler_nursery=connections,
                    task_status=task_status,
                )
            for each in kept:
                # Until nobody is left, or no descriptor.
                with suppress(OSError):
                    while True:
                        stream = trio.SocketStream(trio.socket.from_stdlib_socket(each.accept()[0]))
                        connections.start_soon(self._serve_connection, stream)

    async def _serve_connection(self, stream: trio.SocketStream) -> None:
        if self._connections.is_full:
            taken = self._connections.take()
            if taken is None:
                await self._refuse(stream)
                return
            self._taken.value += 1
            taken.abort()
        connection = self._driver.open(stream)
        if self._is_retiring:
            connection.retire()
        self._connections.add(connection)
        self._open.value += 1
        try:
            with suppress(OSError):
                configure_socket(
                    connection.socket,
                    peer_timeout_s=self._config.peer_timeout_s,
                    write_timeout_s=self._config.write_timeout_s,
                )
            await connection.serve()
        except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            # The peer went away in the middle of something. It knows.
            pass
        except* Exception as errors:
            # Nothing a peer sends may end the process.
            log.exception("an HTTP connection failed", exc_info=errors)
        finally:
            connection.socket.close()
            self._connections.remove(connection)
            self._open.value -= 1
            if self._closing.is_set() and not self._connections:
                self._drained.set()

    async def _renew(self, certificates: Certificates) -> None:
        tls = self._config.tls
        for fault in key_faults("http.tls.key_file", tls.key_file):
            log.warning(fault)
        await keep_renewed(certificates, self._metrics, "http", tls.renewal_interval_s)

    async def _refuse(self, stream: trio.SocketStream) -> None:
        """Say 503 to a connection over the limit, all of which are being answered."""
        if self._certificates is not None or self._refusing >= REFUSALS_MAX:
            # Words would need a handshake, which is what there is too much of.
            await trio.aclose_forcefully(stream)
            return
        self._refusing += 1
        try:
            with trio.move_on_after(REFUSAL_S):
                await stream.send_all(self._refusals.overload(self._config.connections_max))
                await stream.send_eof()
                while await stream.receive_some():
                    pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self._refusing -= 1
            stream.socket.close()


def _duplicate(listener: trio.SocketListener) -> socket.socket:
    """Another handle of what listens, which does not block."""
    shared = listener.socket
    found = socket.fromfd(shared.fileno(), shared.family, shared.type)
    found.settimeout(0)
    return found
