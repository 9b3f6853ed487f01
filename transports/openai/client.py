"""The HTTP/1.1 client: a response, a connection, those that are kept for one upstream, a single request.

llhttp reads; a request is one `send`. Upstreams are asked over connections that are kept while they
are idle (`Connections`), processes of our own over one for each question (`fetch`, `open_request`).
"""

from __future__ import annotations

import contextlib
import math
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

import attrs
import httptools
import trio

from trinamo.runtime.errors import (
    ConfigError,
    ConnectError,
    DisconnectedError,
    OverloadedError,
    RemoteProtocolError,
    TrinamoError,
)
from trinamo.runtime.logs.text import cut, reason
from trinamo.transports.sockets.wire import (
    KernelWire,
    SealedWire,
    TlsSession,
    Wire,
    open_wire,
    send_all,
    shake_hands,
)

from .address import PORTS, Address

BODY_BYTES_MAX: Final = 8 << 20
_HEAD_BYTES_MAX: Final = 1 << 16
_FRAMING_BYTES_MAX: Final = 1 << 16
"""Trailers and chunks' extensions of a whole answer, which say nothing here."""
_CHUNK_FRAME_BYTES: Final = 20
"""A chunk's size in up to 16 digits, and two line ends."""
_READ_BYTES: Final = 1 << 16
_IDLE_MAX: Final = 256
_DRAIN_S: Final = 1.0
"""How long the end of a body may follow the end of an answer."""
_IDLE_S: Final = 4.0
"""Uvicorn and llama.cpp close idle connections after five seconds."""
_AT_ONCE_S: Final = 0.1
"""Who closes a connection later than this behind a request has read the request."""
_PROBES: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""A machine that has vanished sends no end. One that is busy answers these, whatever its server does."""
_UNACKNOWLEDGED_MS: Final = 30_000
"""For the same while a request is on its way, of which keep-alive sees nothing."""
_UNREAD_BYTES: Final = 1 << 15
"""So much of a request a machine takes for a server that does not read it yet. Behind that its window closes,
which the kernel does not tell from silence: longer ones have only the limits of their answers."""


@attrs.define(eq=False)
class Response:
    """Feed it what is received; it gives back what of it is body.

    Its head, and what is around the pieces of its body, are bounded here; how much of a body is kept,
    its reader bounds.
    """

    _who: str = "the upstream"
    """Whose it is, for sentences about what is wrong with it."""
    headers: dict[bytes, bytes] = attrs.field(factory=dict)
    """Names in lower case; of a repeated one the last."""
    status: int = 0
    is_head_complete: bool = False
    is_complete: bool = False
    is_reusable: bool = False
    """Whether the connection may take another request."""
    _parser: httptools.HttpResponseParser = attrs.field(
        default=attrs.Factory(httptools.HttpResponseParser, takes_self=True)
    )
    _pieces: list[bytes] = attrs.field(factory=list)
    _head_bytes: int = 0
    _framing_bytes: int = 0
    _is_framed: bool = False

    def feed(self, data: bytes) -> bytes:
        """The part of the body in `data`; `RemoteProtocolError` for what is no HTTP."""
        was_head_complete = self.is_head_complete
        if not was_head_complete:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise RemoteProtocolError(f"not an HTTP answer of {self._who}: {error}") from error
        except httptools.HttpParserUpgrade as error:
            raise RemoteProtocolError(f"{self._who} wants another protocol than HTTP") from error
        if not self.is_head_complete and self._head_bytes > _HEAD_BYTES_MAX:
            raise RemoteProtocolError(f"the head of the answer of {self._who} is too long")
        pieces, self._pieces = self._pieces, []
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if was_head_complete:
            # The parser keeps a trailer whole, and copies it again for each read: one without an end
            # fills the memory and the loop.
            framing = len(data) - len(body) - _CHUNK_FRAME_BYTES * len(pieces)
            self._framing_bytes = max(self._framing_bytes + framing, 0)
            if self._framing_bytes > _FRAMING_BYTES_MAX:
                raise RemoteProtocolError(f"the trailers of the answer of {self._who} are too long")
        return body

    def end(self) -> bytes:
        """The connection has ended, and brings nothing; `DisconnectedError` if the response had not."""
        if self.is_head_complete and not self._is_framed:
            self.is_complete = True
        if not self.is_complete:
            raise DisconnectedError(f"{self._who} ended the connection in the middle of its answer")
        return b""

    def cut(self) -> None:
        """The connection has ended; whether the answer is whole, its own end says better."""
        self.is_complete, self.is_reusable = True, False

    # --- called by httptools ---

    def on_header(self, name: bytes, value: bytes) -> None:
        """One field of the head, or behind the last chunk, where it says nothing."""
        if not self.is_head_complete:
            self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """The head is over; one that announces another is passed over."""
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.headers.clear()
            return
        self.is_head_complete = True
        self._is_framed = (
            b"content-length" in self.headers
            or b"chunked" in self.headers.get(b"transfer-encoding", b"").lower()
            or self.status in (204, 304)
        )

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        """The response is over, unless it was an interim one."""
        self.is_complete = self.is_head_complete
        # Only here does the parser know it.
        self.is_reusable = self.is_complete and bool(self._parser.should_keep_alive())


class UpstreamConnection:
    """One open connection, over which one request after the other goes."""

    __slots__ = ("_wire", "idle_since", "is_used", "plain", "sent_at", "who")

    def __init__(self, wire: Wire, who: str) -> None:
        self._wire, self.who = wire, who
        self.plain = wire.plain if isinstance(wire, KernelWire) else None
        """The socket itself, where it is the kernel's and not TLS's."""
        self.idle_since = 0.0
        self.is_used = False
        """Whether it has carried a request already, so that its peer may have closed it since."""
        self.sent_at = math.inf
        """When all of the request was the kernel's."""

    async def send(self, data: bytes) -> None:
        """Send a request; `DisconnectedError` if that fails."""
        wire, patience_ms = self._wire, _UNACKNOWLEDGED_MS if len(data) <= _UNREAD_BYTES else 0
        try:
            wire.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_ms)
            await send_all(wire, data if wire.seal is None else wire.seal(data))
        except (OSError, trio.ClosedResourceError) as error:
            raise DisconnectedError(f"{self.who} closed the connection") from error

    async def receive(self) -> bytes:
        """The next bytes; empty at the end. `DisconnectedError` if it breaks."""
        try:
            return await self._wire.receive(_READ_BYTES)
        except (OSError, trio.ClosedResourceError) as error:
            raise DisconnectedError(f"the connection to {self.who} broke: {error}") from error

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
        self._wire.socket.close()


async def dial(
    host: str, port: int, tls: ssl.SSLContext | None, timeout_s: float, who: str
) -> UpstreamConnection:
    """A new connection; `ConnectError` with the reason, or after the time for it."""
    name = cut(host, 200)
    where = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
    with trio.move_on_after(timeout_s):
        try:
            return UpstreamConnection(await _open(host, port, tls), who)
        except (OSError, trio.ClosedResourceError, ValueError) as error:
            if isinstance(error, ssl.SSLCertVerificationError):
                raise ConnectError(
                    f"the certificate of {where} is not to be trusted"
                    f" ({error.verify_message}); SSL_CERT_FILE names an authority's"
                ) from error
            # A `ValueError`: a host that no name can be, such as one of 64 letters without a dot.
            raise ConnectError(f"cannot be reached at {where}: {reason(error)}") from error
    raise ConnectError(f"cannot be reached at {where}: no answer within {timeout_s:g} s")


async def _open(host: str, port: int, tls: ssl.SSLContext | None) -> Wire:
    stream = await trio.open_tcp_stream(host, port)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _PROBES.items():
        stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    wire = open_wire(stream)
    if tls is None:
        return wire
    session = TlsSession(tls, host)
    try:
        await shake_hands(wire, session)
    except BaseException:
        wire.socket.close()
        raise
    return SealedWire(wire, session)


@attrs.define(eq=False)
class Connections:
    """Opens connections to `address`, and takes back those that can be used again."""

    address: Address
    _connect_timeout_s: float
    _nursery: trio.Nursery
    _idle: list[UpstreamConnection] = attrs.field(factory=list, init=False)
    """The one used last at the end."""

    def __len__(self) -> int:
        return len(self._idle)

    async def take(self) -> UpstreamConnection:
        """A connection, an idle one if there is any. Raises `ConnectError`."""
        self.close_old()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_quiet:
                connection.is_used = True
                return connection
            connection.close()
        return await self.open()

    async def open(self) -> UpstreamConnection:
        """A new connection; `ConnectError` with the reason, or after the time for it."""
        address = self.address
        try:
            return await dial(
                address.host, address.port, address.tls, self._connect_timeout_s, "the upstream"
            )
        except ConnectError as error:
            raise ConnectError(f"the upstream: {error.message}") from error

    def give(self, connection: UpstreamConnection, response: Response) -> None:
        """Take a connection back, or close it if it cannot be used again."""
        if response.is_reusable and len(self._idle) < _IDLE_MAX:
            connection.idle_since = trio.current_time()
            self._idle.append(connection)
        else:
            connection.close()

    def take_back(self, connection: UpstreamConnection, response: Response) -> None:
        """As `give`, of an answer whose end is known, though the end of its body may follow."""
        if response.is_complete:
            self.give(connection, response)
        else:
            self._nursery.start_soon(self._drain, connection, response)

    async def _drain(self, connection: UpstreamConnection, response: Response) -> None:
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

    def close_old(self) -> None:
        """Close those that nobody takes any more: a burst leaves many, of which a trickle uses one."""
        oldest = trio.current_time() - _IDLE_S
        while self._idle and self._idle[0].idle_since < oldest:
            self._idle.pop(0).close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def request(
        self,
        method: str,
        path: str,
        body: bytes,
        fields: Mapping[str, str],
        *,
        heard: Callable[[], None] = lambda: None,
    ) -> tuple[UpstreamConnection, Response, bytes]:
        """Send a request; returns once the head of its answer is there, with the body's beginning.

        A connection that was used before, and ends at once, is replaced, once: it was closed as idle,
        while the request was on its way. One that ends later had the request in work, and whoever
        chooses among upstreams counts that as an attempt (RFC 9110, 9.2.2, lets nobody repeat it
        unasked). Raises `ConnectError`, `DisconnectedError` or `RemoteProtocolError`.
        """
        address = self.address
        if address.authorization:
            fields = {"authorization": address.authorization, **fields}
        head = _request_head(method, path, address.host_header, len(body), fields)
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
    connection: UpstreamConnection,
    head: bytes,
    body: bytes,
    heard: Callable[[], None] = lambda: None,
) -> tuple[UpstreamConnection, Response, bytes]:
    connection.sent_at = math.inf
    # Who refuses a long body need not read it to its end: it answers, and closes behind that.
    with contextlib.suppress(DisconnectedError):
        await connection.send(head + body)
        connection.sent_at = trio.current_time()
    response, begun = Response(connection.who), b""
    while not response.is_head_complete:
        data = await connection.receive()
        if not data:
            response.end()
        heard()
        connection.is_used = False
        begun = response.feed(data)
    return connection, response, begun


def _request_head(
    method: str, path: str, host: str, length: int, fields: Mapping[str, str]
) -> bytes:
    """The head of a request; nothing of it may hold a line's end."""
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}"]
    if length:
        lines += ["content-type: application/json", f"content-length: {length}"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return "\r\n".join([*lines, "", ""]).encode()


# --- one request, on a connection of its own ---


@attrs.define
class HttpReply:
    """An answer whose body is still to be read, once, with `chunks` or `body`."""

    status: int
    _connection: UpstreamConnection
    _response: Response
    _begun: bytes

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Pieces of the body as they arrive; `DisconnectedError` if it ends early."""
        data, response = self._begun, self._response
        while True:
            if data:
                yield data
            if response.is_complete:
                return
            received = await self._connection.receive()
            data = response.feed(received) if received else response.end()

    async def body(self, *, bytes_max: int = BODY_BYTES_MAX) -> bytes:
        """The whole body; `OverloadedError` if it is longer than `bytes_max`."""
        body = bytearray()
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                body += chunk
                if len(body) > bytes_max:
                    raise OverloadedError(f"an answer of more than {bytes_max} bytes")
        return bytes(body)


@asynccontextmanager
async def open_request(
    url: str,
    *,
    body: bytes = b"",
    headers: Mapping[str, str] = MappingProxyType({}),
    connect_timeout_s: float = 5.0,
) -> AsyncIterator[HttpReply]:
    """Send a GET, or a POST of JSON if there is a `body`, and yield the answer once its head is here.

    Leaving closes the connection at once, which is how an answer is cancelled. No redirects and no
    cookies. Raises `ConfigError` for a URL or headers that cannot be used, `ConnectError`,
    `DisconnectedError` and `RemoteProtocolError`.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = urlsplit(""), None, None
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    is_plain = target.isascii() and target.isprintable() and " " not in target
    is_sendable = is_plain and parts.netloc.isprintable()
    if parts.scheme not in PORTS or not host or port == 0 or not is_sendable:
        raise ConfigError(
            f"{cut(url, 200)!r} is no address; write one such as http://127.0.0.1:8787"
        )
    fields = {"user-agent": "trinamo", "accept": "*/*", "connection": "close", **headers}
    if any(set(value) & set("\r\n\0") for value in fields.values()):
        raise ConfigError("a header of the request, such as its key, holds a line's end")
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    head = _request_head(
        "POST" if body else "GET", target, parts.netloc.rpartition("@")[2], len(body), fields
    )
    connection = await dial(host, port or PORTS[parts.scheme], tls, connect_timeout_s, "the server")
    try:
        _, response, begun = await _exchange(connection, head, body)
        yield HttpReply(response.status, connection, response, begun)
    finally:
        connection.close()


async def fetch(
    url: str, *, timeout_s: float = 3.0, bytes_max: int = BODY_BYTES_MAX, key: str = ""
) -> tuple[int, bytes]:
    """GET a URL, with a client's `key` if there is one: status and body. See `Fetch`."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with trio.move_on_after(timeout_s):
        async with open_request(url, headers=headers, connect_timeout_s=timeout_s) as reply:
            return reply.status, await reply.body(bytes_max=bytes_max)
    raise ConnectError(f"{url} did not answer within {timeout_s:g} s")
