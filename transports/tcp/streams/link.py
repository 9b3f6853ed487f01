"""A link: one connection between two processes, the streams on it, and the requests for them.

Both its ends are alike, but one asks and one serves: the caller's sends requests, the worker's opens
streams and answers. Who has dialled is another matter: the caller, or, for requests over NATS, the
worker that calls home.

Two tasks, whatever the number of streams: the reader gives what one `recv` brings to each stream's
driver, in plain calls; the writer wakes once for all that was put meanwhile, and sends it in one
piece. A third wakes now and then to see whether the link is idle, or its peer takes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from math import inf

import trio

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.protocol.streams.control import Control, Refused
from trinamo.runtime.protocol.streams.link_frames import (
    Credit,
    Kind,
    LinkMessage,
    Opening,
    encode_event,
)
from trinamo.runtime.protocol.streams.multiplex import (
    Arrival,
    Demultiplexer,
    Multiplexer,
    StreamIds,
)
from trinamo.runtime.sinks import Changes, Sleeper
from trinamo.transports.sockets.wire import Wire, send_all

from ..sockets import TcpOptions
from .lane import Driver, LinkLane

_log = logging.getLogger("trinamo.tcp")


class Link:
    """One end of a link: the caller's if it is told what to do when a stream is `opened`, else the worker's.

    It closes its connection at the end of `run`.

    `taken` gets the messages of the other end, as `(header, payload)`: a worker's the requests, a
    caller's the answers; an end without it takes none. What it raises is the peer's fault. Without a
    stream for `idle_s` the link is closed.
    """

    def __init__(
        self,
        wire: Wire,
        options: TcpOptions,
        opened: Callable[[Link, int, Opening], None] | None = None,
        *,
        taken: Callable[[bytes, bytes], None] | None = None,
        idle_s: float = inf,
    ) -> None:
        self._wire = wire
        self._options = options
        self._opened = opened
        self._taken = taken
        self._sends, self._takes = (
            (Kind.ANSWER, Kind.REQUEST) if opened is None else (Kind.REQUEST, Kind.ANSWER)
        )
        self.idle_s = idle_s
        self.fault: RemoteProtocolError | None = None
        """What the peer did to end it, if it did something wrong."""
        self.ids = StreamIds()
        self.lanes: dict[int, LinkLane] = {}
        """The streams that are open."""
        self.is_closed = False
        """Nothing more is sent: it is lost, or was closed."""
        self._mux = Multiplexer()
        self._demux = Demultiplexer(
            self.lanes,
            self.ids,
            item_bytes_max=options.data_bytes_max,
            header_bytes_max=options.header_bytes_max,
        )
        self._waiting: dict[LinkLane, None] = {}
        """Streams that were told that there is no room."""
        self._room = Changes()
        """Who waits for messages to be sent."""
        self._writer = Sleeper()
        self._sending_since = inf
        self._idle_since = trio.current_time()
        self._is_ending = False
        self._is_turned_away = False
        """The peer has said what was wrong with our frames, and wants to hear nothing more."""
        self._scope = trio.CancelScope()

    # --- streams ---

    @property
    def takes_streams(self) -> bool:
        """Whether another stream may be opened on it."""
        return not (self.is_closed or self._is_ending or self.ids.is_exhausted)

    def add(self, stream: int, window_bytes: int) -> LinkLane:
        """A lane for a new stream, on which so much may be sent; set its `driver` at once."""
        lane = self.lanes[stream] = LinkLane(self, stream, window_bytes)
        return lane

    def forget(self, stream: int) -> None:
        """A stream is over; what still comes for it is dropped."""
        lane = self.lanes.pop(stream, None)
        if lane is not None:
            self._waiting.pop(lane, None)
            self._demux.forget(stream)
            if not self.lanes:
                self._idle_since = trio.current_time()
                if self._is_ending:
                    self._writer.wake()

    # --- what goes out: plain functions ---

    @property
    def has_room(self) -> bool:
        """Whether the bytes that wait for the socket are below their bound."""
        return self._mux.queued_bytes < self._options.queue_bytes_max

    def send_item(self, stream: int, item: bytes) -> bool:
        """Send a short item; whether there is room for more."""
        self._mux.add_item(stream, item)
        self._writer.wake()
        return self._mux.queued_bytes < self._options.queue_bytes_max

    def send_frame(self, frame: bytes) -> None:
        """Send a frame."""
        if not self.is_closed:
            self._mux.add(frame)
            self._writer.wake()

    def send_in_parts(self, stream: int, item: bytes) -> None:
        """Send a long item; its lane is told when it is out."""
        self._mux.add_in_parts(stream, item)
        self._writer.wake()

    def drop_parts(self, stream: int) -> None:
        """Nobody wants the rest of a long item."""
        self._mux.drop(stream)

    def on_room(self, lane: LinkLane) -> None:
        """Tell `lane` once, when the writer has sent what waits."""
        self._waiting[lane] = None

    def send_message(self, header: bytes, payload: bytes) -> int:
        """Send a request, or an answer; the number of a long one, to `drop_message` it by, else 0."""
        if self.is_closed:
            return 0
        number = self._mux.add_message(self._sends, header, payload)
        self._writer.wake()
        return number

    def drop_message(self, number: int) -> bool:
        """Nobody wants the rest of a message; whether it was still on its way, so that it never arrives."""
        is_dropped = not self.is_closed and self._mux.drop_message(number)
        if is_dropped:
            self._writer.wake()
        return is_dropped

    @property
    def has_room_for_messages(self) -> bool:
        """Whether one may be sent now, be it a long one."""
        mux = self._mux
        return mux.queued_bytes < self._options.queue_bytes_max and mux.takes_messages

    async def wait_room_for_messages(self) -> None:
        """Return once there is, or the link is over. Safe to cancel."""
        while not (self.has_room_for_messages or self.is_closed):
            await self._room.wait()

    # --- its life ---

    def close(self) -> None:
        """Close it once its streams are over and all is sent."""
        self._is_ending = True
        self._writer.wake()

    def cancel(self) -> None:
        """End it now."""
        self._scope.cancel()

    async def run(self) -> None:
        """Serve it to its end; then no stream of it is left. Never raises on peer input."""
        with closing(self._wire.socket):
            why = "this end of the link closed"
            try:
                with self._scope:
                    async with open_nursery() as nursery:
                        nursery.start_soon(self._write)
                        nursery.start_soon(self._watch)
                        await self._read()
                        why = "the other end of the link closed"
                        nursery.cancel_scope.cancel()
            except RemoteProtocolError as error:
                _log.warning("a link broke the protocol: %s", error)
                self.fault = error
            except (OSError, trio.ClosedResourceError):
                why = "the link broke"
            finally:
                self._lost(why, self.fault)
            if self.fault is not None and self._sending_since == inf:
                await self._say_last(self.fault)

    def _lost(self, why: str, fault: RemoteProtocolError | None) -> None:
        """Its streams are lost with it, each by itself."""
        for lane in tuple(self.lanes.values()):
            driver = lane.driver
            assert driver is not None
            if fault is not None:
                driver.broken(fault)
            else:
                driver.lost(why)
            lane.discard()
        self.is_closed = True
        if self._demux.skipped_count:
            _log.info("a link skipped %d frames of a newer minor", self._demux.skipped_count)
        self._waiting.clear()
        self._room.notify()

    async def _say_last(self, fault: RemoteProtocolError) -> None:
        """What the streams had to say about the fault, and what it was."""
        if not self._is_turned_away:
            self._mux.add(encode_event(0, Refused("bad_link", fault.message)))
        data, _ = self._mux.take()
        wire = self._wire
        if wire.seal is not None:
            data = wire.seal(data)
        try:
            with trio.move_on_after(self._options.linger_s):
                await send_all(wire, data)
                wire.socket.shutdown(trio.socket.SHUT_WR)
                while await wire.receive(self._options.buffer_bytes):
                    pass
        except (OSError, trio.ClosedResourceError):
            pass

    # --- its tasks ---

    async def _write(self) -> None:
        mux = self._mux
        while True:
            if mux.is_empty:
                if self._is_ending and not self.lanes:
                    self._wire.socket.shutdown(trio.socket.SHUT_WR)
                    self._scope.deadline = trio.current_time() + self._options.linger_s
                    return
                await self._writer.sleep()
                continue
            data, finished = mux.take()
            await self._send(data)
            for stream in finished:
                lane = self.lanes.get(stream)
                if lane is not None:
                    lane.parts_sent()
            self._make_room()
            if not mux.is_empty:
                # Long items would keep the socket, and the loop, to themselves.
                await trio.lowlevel.checkpoint()

    async def _send(self, data: bytes) -> None:
        wire = self._wire
        if wire.seal is not None:
            data = wire.seal(data)
        sent = wire.send(data)
        while sent < len(data):
            self._sending_since = trio.current_time()
            await wire.wait_room()
            with memoryview(data)[sent:] as rest:
                sent += wire.send(rest)
        self._sending_since = inf

    def _make_room(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            for lane in waiting:
                lane.room_again()
        self._room.notify()

    async def _read(self) -> None:
        wire, buffer_bytes = self._wire, self._options.buffer_bytes
        demux = self._demux
        unfinished = self._options.unfinished(demux)
        answer_bytes_max = self._options.queue_bytes_max
        try:
            while True:
                if demux.pending_bytes or unfinished.is_held:
                    data = await unfinished.receive(wire)
                else:
                    data = await wire.receive(buffer_bytes)
                if not data:
                    return
                for arrival in demux.feed(data):
                    self._deliver(arrival)
                while self._opened is None and self._mux.message_bytes >= answer_bytes_max:
                    # Whoever asks on without reading its answers must not fill our memory.
                    await self._room.wait()
        finally:
            unfinished.close()

    def _deliver(self, arrival: Arrival) -> None:
        stream, what = arrival
        lane = self.lanes.get(stream)
        if lane is None:
            if isinstance(what, LinkMessage):
                self._take(what)
            elif isinstance(what, Opening):
                self._open(stream, what)
            elif isinstance(what, Refused):
                self._is_turned_away = True
                raise RemoteProtocolError(f"turned away: {what.message}")
            return
        driver = lane.driver
        assert driver is not None
        try:
            # First what comes for every token.
            if type(what) is list:
                driver.take(what)
            else:
                self._tell(lane, driver, what)
        except RemoteProtocolError as error:
            driver.broken(error)
            lane.hang_up()

    def _tell(
        self,
        lane: LinkLane,
        driver: Driver,
        what: list[bytes] | Control | Opening | Credit | LinkMessage | RemoteProtocolError,
    ) -> None:
        if isinstance(what, Credit):
            lane.grant(what.given_bytes)
        elif isinstance(what, RemoteProtocolError):
            raise what
        else:
            assert not isinstance(what, (Opening, LinkMessage, list))
            driver.receive(what)

    def _open(self, stream: int, opening: Opening) -> None:
        if self._opened is None:
            raise RemoteProtocolError("a caller opens a stream")
        self._opened(self, stream, opening)

    def _take(self, message: LinkMessage) -> None:
        if message.kind is not self._takes or self._taken is None:
            raise RemoteProtocolError(f"a link that takes no {message.kind.name.lower()}s")
        self._taken(message.header, message.payload)

    async def _watch(self) -> None:
        """End it if its peer takes nothing; close it if it is idle."""
        options = self._options
        while True:
            now = trio.current_time()
            idle_at = inf
            if not self.lanes and not self._is_ending:
                idle_at = self._idle_since + self.idle_s
            stalled_at = self._sending_since + options.send_timeout_s
            if stalled_at <= now:
                _log.warning(
                    "a peer took nothing for %g s; its link is ended", options.send_timeout_s
                )
                self.cancel()
            if idle_at <= now:
                self.close()
                idle_at = inf
            soon = now + min(options.send_timeout_s, self.idle_s)
            await trio.sleep_until(min(idle_at, stalled_at, soon))
