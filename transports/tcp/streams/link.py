"""A link: one connection between two processes, the streams on it, and the requests for them.

Both its ends are alike, but one asks and one serves: the caller's sends requests, the worker's opens
streams and answers. Who has dialled is another matter: the caller, or, for requests over NATS, the
worker that calls home.

Two tasks, whatever the number of streams: the reader gives what one `recv` brings to each stream's
driver, in plain calls; the writer wakes once for all that was put meanwhile, and sends it in one
piece. A third wakes now and then to see whether the link is idle, or its peer takes nothing.

A *driver* is one end of one stream: it steps the table, and knows the request. It speaks into its
*lane*, and is told by the link what comes.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import closing
from math import inf

import trio

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.protocol.streams.control import Closed, Control, Kill, Refused
from trinamo.runtime.protocol.streams.credit import SendCredit
from trinamo.runtime.protocol.streams.link_frames import (
    Credit,
    Kind,
    LinkMessage,
    Opening,
    encode_credit,
    encode_event,
)
from trinamo.runtime.protocol.streams.multiplex import (
    PART_BYTES,
    Arrival,
    Demultiplexer,
    Multiplexer,
    StreamIds,
)
from trinamo.runtime.sinks import Changes, Sleeper
from trinamo.transports.sockets.wire import Wire, send_all

from ..sockets import TcpOptions

_log = logging.getLogger("trinamo.tcp")


class Driver(ABC):
    """One end of one stream, as its link sees it. No method waits."""

    __slots__ = ()

    @abstractmethod
    def take(self, items: list[bytes]) -> None:
        """Items came; `RemoteProtocolError` if they must not."""

    @abstractmethod
    def receive(self, event: Control) -> None:
        """The peer said something else; `RemoteProtocolError` if it must not."""

    @abstractmethod
    def lost(self, why: str) -> None:
        """The link has ended, and whatever was not said by then never will be."""

    @abstractmethod
    def broken(self, error: RemoteProtocolError) -> None:
        """The peer broke the protocol, of this stream or of its link: hang up."""


class LinkLane:
    """The way out of one stream of a link. After `hang_up` nothing more is sent.

    With credit an item goes to the link's writer at once. Without, it waits here, and so does what is
    said behind it; the sender was told that there is no room.
    """

    __slots__ = (
        "_backlog",
        "_credit",
        "_is_full",
        "_is_hanging_up",
        "_is_parted",
        "_link",
        "_listener",
        "_room",
        "driver",
        "is_open",
        "stream",
    )

    def __init__(self, link: Link, stream: int, window_bytes: int) -> None:
        self.stream = stream
        self.driver: Driver | None = None
        """What the link tells of what comes, as long as it is open."""
        self.is_open = True
        """Until nothing more is sent."""
        self._link = link
        self._credit = SendCredit(max(window_bytes, 1))
        self._backlog: deque[bytes | Control] | None = None
        """Items, and what was said behind them; None, not empty, where nothing waits."""
        self._is_parted = False
        """Whether an item is on its way in parts, which nothing may overtake."""
        self._is_full = False
        self._is_hanging_up = False
        self._listener: Callable[[], None] | None = None
        self._room = Changes()
        """For whoever waits for room, or for all to be sent."""

    # --- the driver's side ---

    def put(self, item: bytes) -> bool:
        """Send one item; whether there is room for another. Without room it is queued."""
        if not self.is_open:
            return False
        if self._backlog is None and self._credit.left_bytes > 0 and len(item) <= PART_BYTES:
            has_credit = self._credit.spend(len(item))
            if self._link.send_item(self.stream, item) and has_credit:
                return True
        else:
            self._queue(item)
        self._pause()
        return False

    def say(self, event: Control) -> None:
        """Send a word behind the items; a Kill, and the end without a mark, drop those that wait."""
        if not self.is_open:
            return
        if isinstance(event, (Kill, Closed)):
            self._drop()
        if self._backlog is not None:
            self._backlog.append(event)
        else:
            self._link.send_frame(encode_event(self.stream, event))

    def give(self, count: int) -> None:
        """The consumer has taken half a window or more."""
        if self.is_open:
            self._link.send_frame(encode_credit(self.stream, count))

    def hang_up(self) -> None:
        """The last word is said, and nothing of the peer's matters any more."""
        self._is_hanging_up = True
        if self._backlog is None:
            self._close()

    def discard(self) -> None:
        """Drop what is queued, and what may still be said: nobody wants it."""
        self._drop()
        self._close()

    def on_room(self, listener: Callable[[], None]) -> None:
        """Call `listener` each time there is room again after a `put` that was False."""
        self._listener = listener

    async def wait_room(self) -> None:
        """Wait until there is room. Safe to cancel."""
        if not self.is_open or self._has_room():
            await trio.lowlevel.checkpoint()
            return
        self._pause()
        await self._room.wait()

    @property
    def is_flushed(self) -> bool:
        """Whether all that was put and said is with the link's writer, or dropped."""
        return self._backlog is None

    async def wait_flushed(self) -> None:
        """Return once it is. Safe to cancel."""
        while self._backlog is not None:
            await self._room.wait()

    # --- the link's side ---

    def grant(self, given_bytes: int) -> None:
        """Credit came; `RemoteProtocolError` if more than was spent."""
        self._credit.grant(given_bytes)
        self._flush()

    def parts_sent(self) -> None:
        """The last part of the long item is out."""
        self._is_parted = False
        self._flush()

    def room_again(self) -> None:
        """Tell whoever waits, if there is room."""
        if not self._is_full:
            return
        if not self._has_room():
            self._pause()
            return
        self._is_full = False
        self._room.notify()
        if self._listener is not None:
            self._tell(self._listener)

    def _tell(self, listener: Callable[[], None]) -> None:
        """A source's mistake must end its own stream, not the link."""
        driver = self.driver
        assert driver is not None
        try:
            listener()
        except Exception:  # noqa: BLE001 -- whatever it is, it is this stream's alone
            _log.exception("the source of a stream failed")
            driver.lost("its source failed")

    def _pause(self) -> None:
        self._is_full = True
        if not self._link.has_room:
            self._link.on_room(self)

    def _has_room(self) -> bool:
        return self._backlog is None and self._credit.left_bytes > 0 and self._link.has_room

    def _queue(self, item: bytes) -> None:
        if self._backlog is None:
            self._backlog = deque()
        self._backlog.append(item)
        self._flush()

    def _flush(self) -> None:
        """Send what waits, as far as there is credit for it."""
        backlog = self._backlog
        while backlog and not self._is_parted:
            first = backlog[0]
            if isinstance(first, bytes):
                if self._credit.left_bytes <= 0:
                    return
                self._credit.spend(len(first))
                if len(first) > PART_BYTES:
                    self._is_parted = True
                    self._link.send_in_parts(self.stream, first)
                else:
                    self._link.send_item(self.stream, first)
            else:
                self._link.send_frame(encode_event(self.stream, first))
            backlog.popleft()
        if not self._is_parted:
            self._backlog = None
            if self._is_hanging_up:
                self._close()
            else:
                self.room_again()

    def _drop(self) -> None:
        if self._backlog is not None:
            self._link.drop_parts(self.stream)
            self._is_parted = False
            self._backlog = None

    def _close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.driver = self._listener = None
            self._room.notify()
            self._link.forget(self.stream)


class Link:
    """One end of a link: with `opened`, which takes a new stream, the caller's, without it the worker's.

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
            if driver is None:
                # It was closed by what one before it said to its request.
                continue
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
                if stream in self.lanes:
                    self.lanes[stream].parts_sent()
            if self._waiting:
                waiting, self._waiting = self._waiting, {}
                for lane in waiting:
                    lane.room_again()
            self._room.notify()
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
                if self._opened is None:
                    raise RemoteProtocolError("a caller opens a stream")
                self._opened(self, stream, what)
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
            elif isinstance(what, Credit):
                lane.grant(what.given_bytes)
            elif isinstance(what, RemoteProtocolError):
                driver.broken(what)
            else:
                assert not isinstance(what, (Opening, LinkMessage, list))
                driver.receive(what)
        except RemoteProtocolError as error:
            driver.broken(error)

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
