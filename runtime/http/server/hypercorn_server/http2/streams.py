"""One request of HTTP/2 and its answer, as ASGI, with a bound on what it keeps in either direction.

What the application does not read is not granted anew to the client, so a body waits with the
client; what the client does not take waits here up to `BACKLOG_BYTES`, and then the application
waits. What this file does not do: frames and whose turn it is (`protocol.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol
from urllib.parse import unquote

import trio

from ....asgi import Scope
from ....exchanges import Headers

BACKLOG_BYTES: Final = 1 << 16
STREAM_BYTES: Final = 1 << 14
"""What a stream costs that waits for its client, beside its answer."""
NO_CONTENT: Final = 204
NOT_MODIFIED: Final = 304
# What one connection says to itself has no place in HTTP/2 (RFC 9113, section 8.2.2).
_HOP_HEADERS: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)


class Frames(Protocol):
    """What a stream asks of its connection. None of it waits."""

    def send_head(self, stream_id: int, status: int, headers: Headers) -> None:
        """Send a head; dropped if the stream is over."""
        ...

    def send_body(self, stream: Http2Stream) -> None:
        """The stream has something to send, or has come to its end."""
        ...

    def grant(self, stream_id: int, size: int) -> None:
        """The client may send as much again."""
        ...

    def reset(self, stream: Http2Stream) -> None:
        """End the stream before its time."""
        ...


class Http2Stream:
    """`receive` and `send` are ASGI's, for one task; the rest is for the connection."""

    def __init__(
        self,
        stream_id: int,
        scope: Scope,
        frames: Frames,
        hold: Callable[[Http2Stream, int], None],
        *,
        write_timeout_s: float,
    ) -> None:
        self.stream_id = stream_id
        self.scope = scope
        self.outgoing = bytearray()
        self.is_answered = False
        """The application has given its whole answer."""
        self.is_sent = False
        """The whole answer is the kernel's."""
        self.is_gone = False
        """The client left, or was cut off: what comes now is dropped."""
        self.is_input_over = False
        self.unsent_bytes = 0
        """Of the answer so far: `outgoing`, and what there is no room for in it."""
        self._frames, self._hold = frames, hold
        self._write_timeout_s = write_timeout_s
        self._received: deque[tuple[bytes, int]] = deque()
        self._is_told = False
        self.has_head = False
        """The answer has begun."""
        self._is_bodiless = scope["method"] == "HEAD"
        self._expects = any(
            name == b"expect" and value.lower() == b"100-continue"
            for name, value in scope["headers"]
        )
        self._changed = trio.Event()

    # --- the application's side ---------------------------------------------------------------

    async def receive(self) -> dict[str, Any]:
        """The next piece of the body; after its end, `http.disconnect` once the client is gone."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._expects and not self._received and not self.has_head:
            self._frames.send_head(self.stream_id, 100, [])
        self._expects = False
        await self._wait_for(lambda: self.is_gone or bool(self._received) or self._has_end())
        if self.is_gone:
            return {"type": "http.disconnect"}
        if self._has_end():
            self._is_told = True
            return {"type": "http.request", "body": b"", "more_body": False}
        data, size = self._received.popleft()
        self._frames.grant(self.stream_id, size)
        more = bool(self._received) or not self.is_input_over
        self._is_told = not more
        return {"type": "http.request", "body": data, "more_body": more}

    def _has_end(self) -> bool:
        return self.is_input_over and not self._received and not self._is_told

    async def send(self, message: Any) -> None:
        """Send a head or a piece; waits for room, and at the end until the client has it all.

        Raises `BrokenPipeError` if the client is gone, or is cut off for not taking it in time.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if message["type"] == "http.response.start":
            self._start(message["status"], list(message.get("headers", ())))
        elif message["type"] == "http.response.body":
            body = b"" if self._is_bodiless else message.get("body", b"")
            self.unsent_bytes += len(body)
            self.count()
            for start in range(0, len(body), BACKLOG_BYTES):
                await self._wait_in_time(lambda: len(self.outgoing) < BACKLOG_BYTES)
                if not self.is_gone:
                    self.outgoing += body[start : start + BACKLOG_BYTES]
                    self._frames.send_body(self)
            if not message.get("more_body", False):
                self.is_answered = True
                self.count()
                self._frames.send_body(self)
                await self._wait_in_time(lambda: self.is_sent)
        if self.is_gone and not self.is_sent:
            raise BrokenPipeError("the client does not have the whole answer")

    def _start(self, status: int, headers: Headers) -> None:
        self.has_head = True
        self._is_bodiless = self._is_bodiless or status in (NO_CONTENT, NOT_MODIFIED)
        kept = [(name.lower(), value) for name, value in headers]
        kept = [(name, value) for name, value in kept if name not in _HOP_HEADERS]
        self._frames.send_head(self.stream_id, status, kept)

    async def _wait_in_time(self, is_so: Callable[[], bool]) -> None:
        if is_so() or self.is_gone:
            return
        with trio.move_on_after(self._write_timeout_s):
            await self._wait_for(lambda: self.is_gone or is_so())
            return
        # As in HTTP/1: whoever does not take 64 KiB in time is cut off.
        self._frames.reset(self)

    async def _wait_for(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await self._changed.wait()

    # --- the connection's side ----------------------------------------------------------------

    def count(self) -> None:
        """What is kept for the client has changed."""
        is_waiting = self.unsent_bytes or self.is_answered
        is_over = self.is_sent or self.is_gone
        self._hold(self, STREAM_BYTES + self.unsent_bytes if is_waiting and not is_over else 0)

    def give_way(self) -> None:
        """See `Holder`."""
        self._frames.reset(self)

    def put(self, data: bytes, size: int) -> None:
        """A piece of the body came; it took `size` of what the client may send."""
        self._received.append((data, size))
        self.notify()

    def end_input(self) -> None:
        """The body is complete."""
        self.is_input_over = True
        self.notify()

    def leave(self) -> None:
        """The client is gone, or cut off: forget what was kept for it."""
        self.is_gone = True
        self.count()
        self.outgoing.clear()
        for _, size in self._received:
            self._frames.grant(self.stream_id, size)
        self._received.clear()
        self.notify()

    def notify(self) -> None:
        """Something has changed that the application may wait for."""
        self._changed.set()
        self._changed = trio.Event()


def make_scope(base: Scope, fields: Headers) -> Scope | None:
    """ASGI's view of a request's head; None for one that HTTP/1 could not say.

    `base` has what all requests of a connection share.
    """
    pseudo = {name: value for name, value in fields if name.startswith(b":")}
    headers = [(name, value) for name, value in fields if not name.startswith(b":")]
    method, target = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
    authority = pseudo.get(b":authority")
    if authority is not None:
        headers = [(b"host", authority), *((n, v) for n, v in headers if n != b"host")]
    if not target.startswith((b"/", b"*")) or not (target + method).isascii():
        return None
    path, _, query = target.partition(b"?")
    return {
        **base,
        "type": "http",
        "http_version": "2",
        "asgi": {"spec_version": "2.1", "version": "3.0"},
        "method": method.decode("ascii").upper(),
        "path": unquote(path.decode("ascii")),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": headers,
        "extensions": {},
    }
