"""What a stream and its carrier are to each other.

A *driver* is one end of one stream: it steps the table, and knows the request. A *carrier* is what
streams travel on: a connection of their own (`dedicated/`), or a link that they share
(`link.py`). A driver speaks into its *lane*, and is told by the carrier what comes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.protocol.streams.control import Control


class Lane(ABC):
    """One stream's way out. No method waits; after `hang_up` all are mute."""

    __slots__ = ()

    has_credit: bool
    """Whether the peer was told how much it may send."""

    @abstractmethod
    def say(self, event: Control) -> None:
        """Send a control frame behind the items; on a link a Kill overtakes those that wait."""

    @abstractmethod
    def give(self, count: int) -> None:
        """The consumer has taken half a window or more; 0: it wants nothing more."""

    @abstractmethod
    def hang_up(self) -> None:
        """The last word is said, and nothing of the peer's matters any more."""

    @abstractmethod
    def discard(self) -> None:
        """Drop what is queued, and what may still be said: nobody wants it."""


class ItemLane(Lane):
    """The lane of an end that sends items."""

    __slots__ = ()

    @abstractmethod
    def put(self, item: bytes) -> bool:
        """Send one item; whether there is room for another. Without room it is queued."""

    @abstractmethod
    def on_room(self, listener: Callable[[], None]) -> None:
        """Call `listener` each time there is room again after a `put` that was False."""

    @abstractmethod
    async def drain(self) -> None:
        """Wait until there is room. Safe to cancel."""


class Driver(ABC):
    """One end of one stream, as a carrier sees it. No method waits."""

    __slots__ = ()

    @abstractmethod
    def take(self, items: list[bytes]) -> None:
        """Items came; `RemoteProtocolError` if they must not."""

    @abstractmethod
    def receive(self, event: Control) -> None:
        """The peer said something else; `RemoteProtocolError` if it must not."""

    @abstractmethod
    def lost(self, why: str) -> None:
        """The carrier has ended, and whatever was not said by then never will be."""

    @abstractmethod
    def broken(self, error: RemoteProtocolError) -> None:
        """The peer broke the protocol, of this stream or of its carrier."""
