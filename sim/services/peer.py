"""One end of a connection between a client and a simulated service: frames in, frames out.

`post` is synchronous, so that a decision and the message that tells of it are one step; `run` does
the waiting. Bytes travel over trio's own streams, hence over the simulated network: they are torn,
cut, reset and held up like everybody's.

What this module does not do: say what a frame means (`services/wire.py`), connect again (`etcd/channel.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import trio

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.protocol.streams.codec import FrameDecoder, encode_frame

if TYPE_CHECKING:
    from ..net.sockets import SimSocket

READ_BYTES_MAX: Final = 65_536
FRAME_PART_BYTES_MAX: Final = 64 << 20
OUTBOX_BYTES_MAX: Final = 1 << 20
T = TypeVar("T")


class StreamPeer:
    """The other side, as seen over one stream.

    `post` takes everything: who posts without `wait_room` bounds what it posts in another way.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self.is_lost = False
        self.heard_s = trio.current_time()
        """When the last bytes came."""
        self._stream = stream
        # Or that of `conformance/world.py`, which has the same two methods.
        self._socket = cast("SimSocket", stream.socket)
        self._outbox: deque[bytes] = deque()
        self._held: list[bytes] | None = None
        """While what has come is taken in: the answers, which go in one piece."""
        self.waiting_bytes = 0
        """How much was sent and is not in the kernel's hands yet."""
        self._posted = trio.lowlevel.ParkingLot()
        self._flushed = trio.lowlevel.ParkingLot()
        self._scope = trio.CancelScope()

    def post(self, header: bytes, data: bytes = b"") -> None:
        """Send a frame after those posted before it; after the loss it goes nowhere."""
        self.send(encode_frame(header, data))

    def send(self, data: bytes) -> None:
        """Send bytes after all that was sent before them; after the loss they go nowhere."""
        if self._held is not None:
            self._held.append(data)
        else:
            self._post(data)

    def post_all(self, header: bytes, parts: Sequence[bytes]) -> None:
        """Send a frame for each of these data, in one piece."""
        if self._held is None:
            self._post(b"".join(encode_frame(header, data) for data in parts))
        else:
            self._held += [encode_frame(header, data) for data in parts]

    def _post(self, frames: bytes) -> None:
        if self.is_lost:
            return
        if not self.waiting_bytes:
            # Nothing is before it: it goes at once, and the writer is only woken by a full window.
            try:
                while sent := self._socket.send_nowait(frames):
                    if sent == len(frames):
                        return
                    frames = frames[sent:]
            except OSError:
                self.close()
                return
        self._outbox.append(frames)
        self.waiting_bytes += len(frames)
        self._posted.unpark_all()

    async def wait_room(self) -> None:
        """Wait until less than `OUTBOX_BYTES_MAX` is waiting, or the connection is lost."""
        while self.waiting_bytes >= OUTBOX_BYTES_MAX and not self.is_lost:
            await self._flushed.park()

    async def run(
        self,
        receive: Callable[[T], None],
        feed: Callable[[bytes], Iterable[T]] | None = None,
    ) -> None:
        """Pump until the connection is lost; call `receive` for each frame. Closes the stream.

        `feed` makes of bytes what is received, if that is not frames. A reset, a malformed frame and
        the end of the stream all end it without an error.
        """
        decoder: Any = FrameDecoder(
            header_bytes_max=FRAME_PART_BYTES_MAX, data_bytes_max=FRAME_PART_BYTES_MAX
        )
        try:
            async with self._stream:
                with self._scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._write)
                        await self._read(receive, feed or decoder.feed)
                        nursery.cancel_scope.cancel()
        finally:
            self.close()

    async def _read(
        self, receive: Callable[[T], None], feed: Callable[[bytes], Iterable[T]]
    ) -> None:
        try:
            while data := await self._socket.recv_arrived(READ_BYTES_MAX):
                self.heard_s = trio.current_time()
                held: list[bytes] = []
                self._held = held
                try:
                    for each in feed(data):
                        receive(each)
                finally:
                    self._held = None
                    if held:
                        self._post(b"".join(held))
        except (OSError, RemoteProtocolError):
            pass
        self.close()

    async def _write(self) -> None:
        try:
            while True:
                while not self._outbox:
                    await self._posted.park()
                chunk = b"".join(self._outbox)
                self._outbox.clear()
                # The only writer: a step of the world less than `send_all`, which looks out for others.
                rest = memoryview(chunk)
                while rest:
                    rest = rest[await self._socket.send(rest) :]
                self.waiting_bytes -= len(chunk)
                self._flushed.unpark_all()
        except OSError:
            self.close()

    def close(self) -> None:
        """Give the connection up; `run` ends."""
        self.is_lost = True
        self._outbox.clear()
        self._scope.cancel()
        self._flushed.unpark_all()
