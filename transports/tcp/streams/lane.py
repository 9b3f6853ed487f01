"""One stream's place on a link: its credit, and what waits for it.

A *driver* is one end of one stream: it steps the table, and knows the request. It speaks into its
*lane*, and is told by the link what comes.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Protocol

import trio

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.protocol.streams.control import Closed, Control, Kill
from trinamo.runtime.protocol.streams.credit import SendCredit
from trinamo.runtime.protocol.streams.link_frames import encode_credit, encode_event
from trinamo.runtime.protocol.streams.multiplex import PART_BYTES
from trinamo.runtime.sinks import Changes

_log = logging.getLogger("trinamo.tcp")


class Sending(Protocol):
    """What a lane asks of its link. Nothing waits."""

    @property
    def has_room(self) -> bool:
        """Whether the bytes that wait for the socket are below their bound."""
        ...

    def send_item(self, stream: int, item: bytes) -> bool:
        """Send a short item; whether there is room for more."""
        ...

    def send_in_parts(self, stream: int, item: bytes) -> None:
        """Send a long item; its lane is told when it is out."""
        ...

    def drop_parts(self, stream: int) -> None:
        """Nobody wants the rest of a long item."""
        ...

    def send_frame(self, frame: bytes) -> None:
        """Send a frame."""
        ...

    def on_room(self, lane: LinkLane) -> None:
        """Tell `lane` once, when the writer has sent what waits."""
        ...

    def forget(self, stream: int) -> None:
        """A stream is over; what still comes for it is dropped."""
        ...


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
        """The peer broke the protocol, of this stream or of its link."""


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

    def __init__(self, link: Sending, stream: int, window_bytes: int) -> None:
        self.stream = stream
        self.driver: Driver | None = None
        """What the link tells of what comes."""
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
        try:
            listener()
        except Exception:  # noqa: BLE001 -- whatever it is, it is this stream's alone
            _log.exception("the source of a stream failed")
            assert self.driver is not None
            self.driver.lost("its source failed")

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
            self._room.notify()
            self._link.forget(self.stream)
