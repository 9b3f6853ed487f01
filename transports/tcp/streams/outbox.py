"""The writing half of a connection: many small frames, few system calls.

`put_nowait` appends and wakes the writer; the writer joins all that is queued into one send. So
an idle connection sends at once, and a busy one sends batches, without a timer. An item that comes
alone costs the writer one step: it sends, and waits for the next.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from ..sending import send_promptly


class Outbox:
    """Bytes waiting for one connection's writer, bounded by `bytes_max`.

    The bound is soft by one `put_nowait`: it returns False once reached, and well-behaved callers
    then await `drain`, or wait to be told by `on_room`. Counted are all bytes not yet taken by the kernel.
    """

    __slots__ = (
        "_bytes",
        "_bytes_max",
        "_closed",
        "_discarding",
        "_drained",
        "_idle",
        "_is_full",
        "_listener",
        "_parts",
    )

    def __init__(self, bytes_max: int) -> None:
        self._parts: list[bytes] = []
        self._bytes = 0
        self._bytes_max = bytes_max
        self._idle: trio.lowlevel.Task | None = None
        self._drained: trio.Event | None = None
        self._listener: Callable[[], None] | None = None
        self._is_full = False
        """Since the bound was reached, until the listener has been told that there is room."""
        self._closed = False
        self._discarding = False

    @property
    def queued_bytes(self) -> int:
        """How many bytes the kernel has not taken yet."""
        return self._bytes

    @property
    def is_closed(self) -> bool:
        """Whether nothing more may be put."""
        return self._closed

    def put_nowait(self, *parts: bytes) -> bool:
        """Queue bytes; whether there is room for more. After `discard` they are dropped."""
        if self._discarding:
            return True
        assert not self._closed, "put after close"
        self._parts += parts
        for part in parts:
            self._bytes += len(part)
        if self._idle is not None:
            self._wake()
        if self._bytes < self._bytes_max:
            return True
        self._is_full = True
        return False

    def on_room(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever at most half of `bytes_max` is queued, after a put that was False."""
        self._listener = listener

    def close(self) -> None:
        """Nothing more will come: `run` returns once all is sent."""
        self._closed = True
        self._wake()

    def discard(self) -> None:
        """Drop what is queued and what may still come; `run` returns, drainers go on."""
        self._discarding = self._closed = True
        self._parts.clear()
        self._bytes = 0
        self._wake()
        self._release()

    def _wake(self) -> None:
        if self._idle is not None:
            task, self._idle = self._idle, None
            trio.lowlevel.reschedule(task)

    def _release(self) -> None:
        if self._bytes * 2 > self._bytes_max:
            return
        if self._drained is not None:
            self._drained.set()
            self._drained = None
        if self._is_full:
            self._is_full = False
            if self._listener is not None and not self._discarding:
                self._listener()

    async def drain(self) -> None:
        """Wait until at most half of `bytes_max` is queued. Safe to cancel."""
        if self._bytes * 2 <= self._bytes_max:
            await trio.lowlevel.checkpoint()
            return
        if self._drained is None:
            self._drained = trio.Event()
        await self._drained.wait()

    async def run(self, stream: trio.SocketStream) -> None:
        """Send what is queued, for as long as there may be more.

        It gives way after every send: while one was taken at once nobody else ran, so nothing more
        is queued, and it waits.

        Cancelled while sending, half a frame may be on the wire: the connection must be closed.
        Raises `trio.BrokenResourceError` when the peer is gone.
        """
        while True:
            if self._parts:
                data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
                self._parts.clear()
                await send_promptly(stream.socket, data)
                if not self._discarding:
                    self._bytes -= len(data)
                self._release()
            elif self._closed:
                return
            else:
                self._idle = trio.lowlevel.current_task()
                await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
        self._idle = None
        return trio.lowlevel.Abort.SUCCEEDED
