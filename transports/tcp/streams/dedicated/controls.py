"""Stop and Kill from a place that must not wait: queued now, sent by a task of the server."""

from __future__ import annotations

import trio


class ControlWriter:
    """Sends the rare control frames of one connection, in order, then at `finish` half-closes.

    There is no standing task: `put` starts one when none is running. Sending is bounded by
    `linger_s`, because a peer that reads nothing may never take the bytes.
    """

    __slots__ = ("_finishing", "_frames", "_linger_s", "_nursery", "_running", "_stream")

    def __init__(
        self,
        stream: trio.SocketStream,
        nursery: trio.Nursery,
        *,
        linger_s: float,
    ) -> None:
        self._stream = stream
        self._nursery = nursery
        self._linger_s = linger_s
        self._frames: list[bytes] = []
        self._finishing = False
        self._running: trio.Event | None = None

    def put(self, frame: bytes) -> None:
        """Queue one control frame."""
        self._frames.append(frame)
        self._start()

    def finish(self) -> None:
        """Half-close once everything queued is sent."""
        self._finishing = True
        self._start()

    def _start(self) -> None:
        if self._running is None:
            self._running = trio.Event()
            self._nursery.start_soon(self._run)

    async def _run(self) -> None:
        running = self._running
        assert running is not None
        try:
            with trio.move_on_after(self._linger_s):
                while self._frames:
                    data = b"".join(self._frames)
                    self._frames.clear()
                    await self._stream.send_all(data)
                if self._finishing:
                    await self._stream.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            # The peer is gone, so it needs no telling; the reader reports it.
            pass
        finally:
            self._frames.clear()
            self._running = None
            running.set()

    async def wait_finished(self) -> None:
        """Return once nothing is being sent. Safe to cancel."""
        if self._running is not None:
            await self._running.wait()
