"""A small HTTP/1.1 client on trio and h11, for the questions of our own processes.

One connection a request, plain or TLS. No redirects, no cookies, no pool: whoever needs those
takes a real client. `chat` streams through it; `status` and `up` read metrics.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Final
from urllib.parse import SplitResult, urlsplit

import attrs
import h11
import trio

from trinamo.runtime.errors import (
    ConfigError,
    ConnectError,
    DisconnectedError,
    OverloadedError,
    RemoteProtocolError,
)
from trinamo.runtime.logs.text import cut, reason

READ_BYTES: Final = 65_536
BODY_BYTES_MAX: Final = 8 << 20


@attrs.define
class Response:
    """An answer whose body is still to be read, once, with `chunks` or `body`."""

    status: int
    _connection: h11.Connection
    _stream: trio.abc.Stream

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Pieces of the body as they arrive; `DisconnectedError` if it ends early."""
        while True:
            event = await _next(self._connection, self._stream)
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return

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
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    connect_timeout_s: float = 5.0,
) -> AsyncIterator[Response]:
    """Send a GET, or a POST if there is a `body`, and yield the answer once its head is here.

    Leaving closes the connection at once, which is how an answer is cancelled. Raises
    `ConfigError` for a URL that cannot be used, `ConnectError`, `DisconnectedError` and
    `RemoteProtocolError`.
    """
    parts = _split(url)
    stream = await _connect(parts, connect_timeout_s)
    async with stream:
        connection = h11.Connection(h11.CLIENT)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        fields = {
            "Host": parts.netloc.rpartition("@")[2],
            "User-Agent": "trinamo",
            "Accept": "*/*",
            "Connection": "close",
            **({} if body is None else {"Content-Length": str(len(body))}),
            **({} if headers is None else headers),
        }
        try:
            request = h11.Request(
                method="GET" if body is None else "POST",
                target=target,
                headers=[(name.encode(), value.encode()) for name, value in fields.items()],
            )
        except (ValueError, h11.LocalProtocolError) as error:
            raise _no_address(url) from error
        events: list[h11.Event] = [request]
        if body is not None:
            events.append(h11.Data(data=body))
        events.append(h11.EndOfMessage())
        data = b"".join(connection.send(event) or b"" for event in events)
        try:
            await stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise DisconnectedError(f"{url} closed the connection: {error}") from error
        head = await _next(connection, stream)
        while not isinstance(head, h11.Response):
            head = await _next(connection, stream)
        yield Response(head.status_code, connection, stream)


async def fetch(
    url: str, *, timeout_s: float = 3.0, bytes_max: int = BODY_BYTES_MAX, key: str = ""
) -> tuple[int, bytes]:
    """GET a URL, with a client's `key` if there is one: status and body.

    Raises `ConnectError` if there is no whole answer in time.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else None
    with trio.move_on_after(timeout_s):
        async with open_request(url, headers=headers, connect_timeout_s=timeout_s) as response:
            return response.status, await response.body(bytes_max=bytes_max)
    raise ConnectError(f"{url} did not answer within {timeout_s:g} s")


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
        parts = SplitResult("", "", "", "", "")
    if not usable:
        raise _no_address(url)
    return parts


def _no_address(url: str) -> ConfigError:
    return ConfigError(f"{cut(url, 200)!r} is no address; write one such as http://127.0.0.1:8787")


async def _connect(parts: SplitResult, timeout_s: float) -> trio.abc.Stream:
    assert parts.hostname is not None, "checked by _split"
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    name = cut(parts.hostname, 200)
    where = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
    with trio.move_on_after(timeout_s):
        try:
            if secure:
                tls = await trio.open_ssl_over_tcp_stream(
                    parts.hostname, port, https_compatible=True
                )
                try:
                    await tls.do_handshake()
                except BaseException:
                    await trio.aclose_forcefully(tls)
                    raise
                return tls
            return await trio.open_tcp_stream(parts.hostname, port)
        except (OSError, ssl.SSLError, trio.BrokenResourceError, ValueError) as error:
            if isinstance(error.__cause__, ssl.SSLCertVerificationError):
                raise ConnectError(
                    f"the certificate of {where} is not to be trusted"
                    f" ({error.__cause__.verify_message}); SSL_CERT_FILE names an authority's"
                ) from error
            # A `ValueError`: a host that no name can be, such as one of 64 letters without a dot.
            raise ConnectError(f"cannot be reached at {where}: {reason(error)}") from error
    raise ConnectError(f"cannot be reached at {where}: no answer within {timeout_s:g} s")


async def _next(connection: h11.Connection, stream: trio.abc.Stream) -> h11.Event:
    is_over = False
    while True:
        try:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                data = bytes(await stream.receive_some(READ_BYTES))
                is_over = not data
                connection.receive_data(data)
                continue
        except h11.RemoteProtocolError as error:
            if is_over:
                raise DisconnectedError("the connection ended before the answer did") from error
            raise RemoteProtocolError(f"not an HTTP answer: {error}") from error
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise DisconnectedError("the connection ended before the answer did") from error
        if isinstance(event, h11.ConnectionClosed):
            raise DisconnectedError("the connection ended before the answer did")
        assert not isinstance(event, type), "a client is never paused"
        return event
