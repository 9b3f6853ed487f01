"""The client's side of watches over one connection that comes and goes.

The rules are those of `transports/etcd/watches.py`, which real etcd taught: the snapshot is read
first and the stream starts at the revision after it; after a loss each watch is created again at
its own next revision; a compacted history, or a store that is not the same or behind, means
listing again, and a `Resync`; a reader that lags is taken off the stream and put back.

What this module does not do: connect, or read the snapshot (`client.py`).
"""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Self

import trio

from trinamo.runtime.errors import DeadlineError, TransportError
from trinamo.runtime.planes import Put, Resync, Snapshot, WatchEvent

from ..peer import Peer
from ..wire import encode
from .wire import (
    Changed,
    Compacted,
    Created,
    Unwatch,
    WatchFrom,
    decode_changes,
)

__all__ = ["Watch", "Watches"]

PAUSE_S = 0.1


class Phase(enum.Enum):
    """What a watch waits for."""

    LISTING = "the reader must read what is there"
    STREAMING = "the store sends"
    LAGGING = "the reader has too much unread"


class Watches:
    """All watches of one plane. `pending_max` bounds what one of them holds unread."""

    def __init__(self, *, pending_max: int) -> None:
        self._pending_max = pending_max
        self._peer: Peer | None = None
        self._ids = itertools.count(1)
        self._on_wire: dict[int, Watch] = {}
        self._watches: list[Watch] = []

    @property
    def are_there_any(self) -> bool:
        """Whether anybody watches."""
        return bool(self._watches)

    def add(self, watch: Watch) -> None:
        """Take a watch in; it starts by listing."""
        self._watches.append(watch)

    def remove(self, watch: Watch) -> None:
        """Forget a watch."""
        self._leave(watch)
        self._watches.remove(watch)

    def opened(self, peer: Peer) -> None:
        """Create every watch again on a new connection."""
        self._peer = peer
        for watch in self._watches:
            if watch.phase is Phase.STREAMING:
                self.join(watch)

    def lost(self) -> None:
        """The connection is gone."""
        self._peer = None
        for watch in self._on_wire.values():
            watch.wire_id = 0
        self._on_wire.clear()

    def join(self, watch: Watch) -> None:
        """Have the store send from where the watch is; at once, or with the next connection."""
        watch.phase = Phase.STREAMING
        if self._peer is None or watch.wire_id:
            return
        watch.wire_id = next(self._ids)
        self._on_wire[watch.wire_id] = watch
        self._peer.post(encode(WatchFrom(watch.wire_id, watch.prefix, watch.next_revision)))

    def _leave(self, watch: Watch) -> None:
        if watch.wire_id:
            del self._on_wire[watch.wire_id]
            if self._peer is not None:
                self._peer.post(encode(Unwatch(watch.wire_id)))
            watch.wire_id = 0

    def receive(self, message: Created | Changed | Compacted, data: bytes) -> None:
        """What the store says about one watch; late words about one that has left are nothing."""
        watch = self._on_wire.get(message.id)
        if watch is None:
            return
        match message:
            case Created():
                is_same = watch.store_id in (0, message.store_id)
                watch.store_id = message.store_id
                if not is_same or message.revision + 1 < watch.next_revision:
                    self._list_again(watch)
            case Changed():
                # A repeated message brings nothing new.
                watch.ready.extend(
                    change
                    for change in decode_changes(data)
                    if (change.entry.mod_revision if isinstance(change, Put) else change.revision)
                    >= watch.next_revision
                )
                watch.next_revision = max(watch.next_revision, message.next_revision)
                if len(watch.ready) > self._pending_max:
                    self._leave(watch)
                    watch.phase = Phase.LAGGING
                watch.arrived.unpark_all()
            case Compacted():
                self._list_again(watch)

    def _list_again(self, watch: Watch) -> None:
        self._leave(watch)
        watch.phase = Phase.LISTING
        watch.arrived.unpark_all()


class Watch:
    """One watch, and the iterator its reader holds."""

    def __init__(
        self, watches: Watches, prefix: str, listing: Callable[[str], Awaitable[Snapshot]]
    ) -> None:
        self.prefix = prefix
        self.phase = Phase.LISTING
        self.next_revision = 0
        self.wire_id = 0
        self.store_id = 0
        self.ready: deque[WatchEvent] = deque()
        self.arrived = trio.lowlevel.ParkingLot()
        self._watches = watches
        self._listing = listing

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WatchEvent:
        # An event leaves the queue only after the last checkpoint, so a cancelled wait loses none.
        await trio.lowlevel.checkpoint()
        while not self.ready:
            if self.phase is Phase.LISTING:
                await self._list()
            elif self.phase is Phase.LAGGING:
                self._watches.join(self)
            else:
                await self.arrived.park()
        return self.ready.popleft()

    async def _list(self) -> None:
        try:
            found = await self._listing(self.prefix)
        except (TransportError, DeadlineError):
            await trio.sleep(PAUSE_S)
            return
        is_first = self.next_revision == 0
        self.ready.append(found if is_first else Resync(found.revision, found.entries))
        self.next_revision = found.revision + 1
        self._watches.join(self)
