"""Connections to one upstream: kept while they are idle, used by one request at a time."""

from __future__ import annotations

import contextlib
import math
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Final

import attrs
import trio

from trinamo.runtime.errors import ConnectError, DisconnectedError, TrinamoError

from .address import Address
from .response import Response

_READ_BYTES: Final = 1 << 16
_IDLE_MAX: Final = 256
_DRAIN_S: Final = 1.0
"""How long the end of a body may follow the end of an answer."""
_IDLE_S: Final = 4.0
"""Uvicorn and llama.cpp close idle connections after five seconds."""
_AT_ONCE_S: Final = 0.1
"""Who closes a connection later than this behind a request has read the request."""
_PROBES: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_USER_TIMEOUT": 30_000}
"""A machine that has vanished sends no end. One that is busy answers these, whatever its server does."""


class Connection:
    """One open connection. Without TLS it is read without trio's checkpoints: once a token."""

    __slots__ = ("_stream", "idle_since", "is_used", "plain", "sent_at")

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream: trio.abc.Stream | None = stream
        self.plain: socket.socket | None = None
        """The socket itself, where it is the kernel's and not TLS's."""
        self.idle_since = 0.0
        self.is_used = False
        """Whether it has carried a request already, so that its peer may have closed it since."""
        self.sent_at = math.inf
        """When all of the request was the kernel's."""
        if isinstance(stream, trio.SocketStream) and not hasattr(stream.socket, "send_nowait"):
            # The kernel's own: what else trio does for each read costs more than the system call.
            given = stream.socket
            kind = given.family, given.type, given.proto
            self.plain, self._stream = socket.socket(*kind, fileno=given.detach()), None

    async def send(self, data: bytes) -> None:
        """Send a request; `DisconnectedError` if that fails."""
        try:
            if self.plain is not None:
                await _send_all(self.plain, data)
            elif self._stream is not None:
                await self._stream.send_all(data)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise DisconnectedError("the upstream closed the connection") from error

    async def receive(self) -> bytes:
        """The next bytes; empty at the end. `DisconnectedError` if it breaks."""
        plain = self.plain
        try:
            if plain is None:
                assert self._stream is not None
                return bytes(await self._stream.receive_some(_READ_BYTES))
            while True:
                await trio.lowlevel.wait_readable(plain)
                try:
                    return plain.recv(_READ_BYTES)
                except BlockingIOError:
                    pass
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise DisconnectedError(f"the connection to the upstream broke: {error}") from error

    @property
    def is_quiet(self) -> bool:
        """Whether nothing has come since its last answer, such as the end."""
        if self.plain is None:
            return True
        try:
            self.plain.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        """Close at once: what is still under way is not wanted. No checkpoint."""
        if self.plain is not None:
            trio.lowlevel.notify_closing(self.plain)
            self.plain.close()
        stream = self._stream
        if isinstance(stream, trio.SSLStream):
            stream = stream.transport_stream
        if isinstance(stream, trio.SocketStream):
            stream.socket.close()


async def _send_all(plain: socket.socket, data: bytes) -> None:
    try:
        sent = plain.send(data)
    except BlockingIOError:
        sent = 0
    rest = memoryview(data)[sent:]
    while rest:
        await trio.lowlevel.wait_writable(plain)
        with contextlib.suppress(BlockingIOError):
            rest = rest[plain.send(rest) :]


@attrs.define(eq=False)
class Connections:
    """Opens connections to `address`, and takes back those that can be used again."""

    address: Address
    _connect_timeout_s: float
    _nursery: trio.Nursery
    _idle: list[Connection] = attrs.field(factory=list, init=False)
    """The one used last at the end."""

    def __len__(self) -> int:
        return len(self._idle)

    async def take(self) -> Connection:
        """A connection, an idle one if there is any. Raises `ConnectError`."""
        oldest = trio.current_time() - _IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since >= oldest and connection.is_quiet:
                connection.is_used = True
                return connection
            connection.close()
        return await self.open()

    async def open(self) -> Connection:
        """A new connection; `ConnectError` with the reason, or after the time for it."""
        address = self.address
        with trio.move_on_after(self._connect_timeout_s):
            try:
                return Connection(await self._open())
            except (OSError, trio.BrokenResourceError, ssl.SSLError) as error:
                why = error.__cause__ if isinstance(error, trio.BrokenResourceError) else error
                raise ConnectError(
                    f"the upstream {address.url} cannot be reached: {why}"
                ) from error
        raise ConnectError(
            f"the upstream {address.url} did not accept a connection within"
            f" {self._connect_timeout_s:g} s"
        )

    async def _open(self) -> trio.abc.Stream:
        address = self.address
        stream = await trio.open_tcp_stream(address.host, address.port)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES.items():
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if address.tls is None:
            return stream
        secured = trio.SSLStream(
            stream, address.tls, server_hostname=address.host, https_compatible=True
        )
        try:
            await secured.do_handshake()
        except BaseException:
            stream.socket.close()
            raise
        return secured

    def give(self, connection: Connection, response: Response) -> None:
        """Take a connection back, or close it if it cannot be used again."""
        if response.is_reusable and len(self._idle) < _IDLE_MAX:
            connection.idle_since = trio.current_time()
            self._idle.append(connection)
        else:
            connection.close()

    def take_back(self, connection: Connection, response: Response) -> None:
        """As `give`, of an answer whose end is known, though the end of its body may follow."""
        if response.is_complete:
            self.give(connection, response)
        else:
            self._nursery.start_soon(self._drain, connection, response)

    async def _drain(self, connection: Connection, response: Response) -> None:
        try:
            with trio.move_on_after(_DRAIN_S):
                while not response.is_complete:
                    data = await connection.receive()
                    if not data:
                        break
                    response.feed(data)
        except TrinamoError:
            pass
        finally:
            self.give(connection, response)

    def close(self) -> None:
        """Close those that are idle."""
        while self._idle:
            self._idle.pop().close()

    async def request(
        self,
        head: bytes,
        body: bytes,
        *,
        heard: Callable[[], None] = lambda: None,
    ) -> tuple[Connection, Response, bytes]:
        """Send a request; returns once the head of its answer is there, with the body's beginning.

        A connection that was used before, and ends at once, is replaced, once: it was closed as idle,
        while the request was on its way. One that ends later had the request in work, and whoever
        chooses among upstreams counts that as an attempt (RFC 9110, 9.2.2, lets nobody repeat it
        unasked). Raises `ConnectError`, `DisconnectedError` or `RemoteProtocolError`.
        """
        connection = await self.take()
        try:
            try:
                return await _exchange(connection, head, body, heard)
            except DisconnectedError:
                waited_s = trio.current_time() - connection.sent_at
                if not connection.is_used or waited_s > _AT_ONCE_S:
                    raise
            connection.close()
            connection = await self.open()
            return await _exchange(connection, head, body, heard)
        except BaseException:
            connection.close()
            raise


async def _exchange(
    connection: Connection, head: bytes, body: bytes, heard: Callable[[], None]
) -> tuple[Connection, Response, bytes]:
    await connection.send(head + body)
    connection.sent_at = trio.current_time()
    response, begun = Response(), b""
    while not response.is_head_complete:
        data = await connection.receive()
        if not data:
            response.end()
        heard()
        connection.is_used = False
        begun = response.feed(data)
    return connection, response, begun


def request_head(
    address: Address, method: str, path: str, length: int, extra: Mapping[str, str]
) -> bytes:
    """The head of a request; no value of `extra` may hold a line's end."""
    lines = [f"{method} {path} HTTP/1.1", f"host: {address.host_header}"]
    if length:
        lines += ["content-type: application/json", f"content-length: {length}"]
    if address.authorization:
        lines.append(f"authorization: {address.authorization}")
    lines += [f"{name}: {value}" for name, value in extra.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")
