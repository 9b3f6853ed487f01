"""One HTTP request and its answer, as the edge sees it: the same for every server.

The own server gives one for each request, without a detour; any ASGI server's is made from `scope`,
`receive` and `send`. Reading waits, writing does not: what the client does not take yet is kept by
its connection, up to `http.backlog_bytes_max`, and sent by the connection's own task, which cuts off
a client that takes nothing for `http.write_timeout_s`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from .bodies import Body

__all__ = ["Headers", "HttpExchange"]

Headers: TypeAlias = list[tuple[bytes, bytes]]
"""Names in lower case."""


class HttpExchange(Protocol):
    """One request and its answer. Used by one task, but for `on_gone`."""

    @property
    def method(self) -> bytes:
        """Such as `POST`."""
        ...

    @property
    def path(self) -> bytes:
        """Without the query."""
        ...

    @property
    def headers(self) -> Headers:
        """Of the request, in their order."""
        ...

    async def read_body(self, body: Body, *, bytes_max: int, timeout_s: float) -> bytearray:
        """The whole body, counted in `body` as it arrives; used once.

        Raises `BodyTooLargeError` as soon as the limit is passed and `OverloadedError` as soon as
        all bodies together are too many (before reading, if the length is announced),
        `BodyTimeoutError` if it is not complete in time, `ClientGoneError`.
        """
        ...

    def on_gone(self, listener: Callable[[], None]) -> None:
        """Call `listener`, once, when the client leaves before the answer is complete.

        By FIN, RST, a cut connection or a write that failed; at once if it has left already. It is
        called by the connection's reader and must not wait.
        """
        ...

    @property
    def is_gone(self) -> bool:
        """Whether the client has left, or was cut off, before it had the whole answer."""
        ...

    def start(self, status: int, headers: Headers) -> None:
        """The head of an answer whose length is not known; it goes out with the first `write`."""
        ...

    def write(self, data: bytes) -> bool:
        """Send a piece of the body; whether there is room for more.

        False from `http.backlog_bytes_max` unsent bytes on; `on_room` says when half of them are
        sent. What is written to a client that has gone is dropped, and True.
        """
        ...

    def on_room(self, listener: Callable[[], None]) -> None:
        """Call `listener` each time there is room again after a `write` that was False."""
        ...

    def finish(self, data: bytes = b"") -> None:
        """Send the last piece, and the end of the body."""
        ...

    def respond(self, status: int, body: bytes, headers: Headers) -> None:
        """Send a whole answer, with its length. `content-type` is JSON unless given."""
        ...

    async def sent(self) -> None:
        """Return once all that was written is the kernel's, or the client is gone. Safe to cancel."""
        ...
