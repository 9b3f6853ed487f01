"""The books of the one Watch stream, sans-IO: which watch is where, and what a reply means.

Every watch has its own next revision. When the stream is lost, each is created again on the next stream, so that
nothing is lost and nothing comes twice:

* events move it past the revision of the last one; all events of a revision come in one reply, or
  in fragments that are held until the last has come, so a resume never cuts a revision in two;
* a progress reply (no events) moves it past the revision the reply names;
* a `created` reply does not move it.

A reader that lags is not allowed to hold up the others or to fill the memory: above `pending_max`
waiting events its watch is cancelled on the server, and created again at its next revision once
half of them are read.

Behind a new stream there may be a store that was restored from a backup: its history is another one from some
revision on, and revisions do not tell, for new writes have soon made up for the lost ones. Cluster, member and term
may be those of before as well. So a watch is created again at the revision of the last change that it knows, and goes
on only if the server tells that very change again, and no other one up to the watch's next revision. A watch for
which the history is not proven so (there was no change yet, it was compacted, or it does not come), must be listed
again and then tells a `Resync`, deletions included.

Requests to send collect in `take_requests`; who waits for a watch is told by its `wake`.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import attrs

from trinamo.runtime.errors import ControlPlaneError
from trinamo.runtime.planes import Delete, Entry, Put, Resync, Snapshot, WatchEvent

from . import wire_pb2 as wire

PENDING_MAX: Final = 1024

# A key nobody writes: a watch on it is a question that the server answers at once.
_PROBE_KEY: Final = b"\0"
# A server answers with this id when it cannot say which watch is meant.
_NO_WATCH: Final = -1
_DENIALS_MAX: Final = 2
_PROOF_MAX: Final = 64


class WatchPhase(enum.Enum):
    """What a watch waits for."""

    LISTING = "its reader must list the prefix"
    STREAMING = "the server sends its changes"
    LAGGING = "its reader must catch up"
    FAILED = "nothing more comes"


@attrs.define(eq=False)
class Watch:
    """One watch as its reader sees it."""

    prefix: str
    wake: Callable[[], object]
    phase: WatchPhase = WatchPhase.LISTING
    error: ControlPlaneError | None = None
    next_revision: int = 0
    ready: deque[WatchEvent] = attrs.field(factory=deque)
    # Its number on the current stream; 0 while it is on none. A number is never used twice, so a
    # late reply to a watch that is gone is told by its number.
    wire_id: int = 0
    fragments: list[wire.Event] = attrs.field(factory=list)
    denials: int = 0
    last: list[Put | Delete] = attrs.field(factory=list)
    """The last changes known, from the newest put on; see `_proof_of`."""
    is_proven: bool = True
    """The server's history is known to be that which was told so far."""


class WatchTable:
    """Every watch of one plane.

    Args:
        pending_max: More waiting events than this make a reader lag. One reply may exceed it.
        key_prefix: Stands before each key in etcd, and before no other.
    """

    def __init__(self, *, pending_max: int = PENDING_MAX, key_prefix: str = "") -> None:
        self._pending_max, self._key_prefix = pending_max, key_prefix
        # In the order they came: what is sent must not depend on addresses.
        self._watches: dict[Watch, None] = {}
        self._on_wire: dict[int, Watch] = {}
        self._requests: deque[wire.WatchRequest] = deque()
        self._last_wire_id = 0
        self._probe_id = 0
        self._is_connected = False
        self.resyncs = 0

    def __len__(self) -> int:
        return len(self._watches)

    # --- what readers do -----------------------------------------------------------------------

    def add(self, prefix: str, wake: Callable[[], object]) -> Watch:
        """A new watch, which its reader has to list first. `wake` is called when it changes."""
        watch = Watch(prefix, wake)
        self._watches[watch] = None
        return watch

    def remove(self, watch: Watch) -> None:
        """Forget a watch, and tell the server to."""
        self._leave_wire(watch)
        self._watches.pop(watch, None)
        watch.ready.clear()

    def listed(self, watch: Watch, snapshot: Snapshot) -> None:
        """The reader has listed the prefix; its changes follow from there on."""
        is_first = watch.next_revision == 0
        self.resyncs += not is_first
        watch.ready.append(snapshot if is_first else Resync(snapshot.revision, snapshot.entries))
        watch.next_revision = snapshot.revision + 1
        watch.last = _proof_of([Put(each) for each in snapshot.entries])
        # As long as no stream is lost after it: one that cannot be opened counts.
        watch.is_proven = True
        watch.phase = WatchPhase.STREAMING
        self._join_wire(watch)

    def take(self, watch: Watch) -> WatchEvent | None:
        """The next event, or None if the reader has to do or to await something."""
        if not watch.ready:
            return None
        event = watch.ready.popleft()
        if watch.phase is WatchPhase.LAGGING and len(watch.ready) <= self._pending_max // 2:
            watch.phase = WatchPhase.STREAMING
            if watch.is_proven:
                self._join_wire(watch)
            else:
                # The proofs of this stream may be over already.
                self._list_again(watch)
        return event

    # --- what the stream does ------------------------------------------------------------------

    def connected(self) -> None:
        """A new stream is open: create every watch on it, each at its own next revision."""
        self._is_connected = True
        for watch in sorted(self._watches, key=lambda watch: watch.next_revision):
            if watch.phase is WatchPhase.STREAMING:
                self._join_wire(watch)

    def disconnected(self) -> None:
        """The stream is gone, and with it everything it had not finished saying."""
        self._is_connected = False
        self._requests.clear()
        self._probe_id = 0
        for watch in self._watches:
            watch.wire_id = 0
            watch.fragments.clear()
            watch.is_proven = False
        self._on_wire.clear()

    def end_proofs(self) -> None:
        """What proves the history to a watch should have come by now: list those for which it did not."""
        for watch in list(self._on_wire.values()):
            if not watch.is_proven:
                self._list_again(watch)

    def list_all(self) -> None:
        """Go on behind what is now, whatever came before."""
        for watch in self._watches:
            if watch.phase is WatchPhase.STREAMING:
                self._list_again(watch)

    def take_requests(self) -> Iterable[wire.WatchRequest]:
        """What is to be sent now, in order."""
        while self._requests:
            yield self._requests.popleft()

    def probe(self) -> None:
        """Ask the server something it answers at once, to hear whether it is alive.

        It is not an on-demand progress request: releases before 3.4.25 and 3.5.8 answer those
        with revisions that they have not delivered yet (etcd issues 15220 and 17566).
        """
        # To cancel a watch is such a question too, so every second one ends what the first began.
        if self._probe_id:
            self._cancel(self._probe_id)
            return
        self._probe_id = self._next_wire_id()
        self._requests.append(
            wire.WatchRequest(
                create_request=wire.WatchCreateRequest(key=_PROBE_KEY, watch_id=self._probe_id)
            )
        )

    def receive(self, reply: wire.WatchResponse) -> bool:
        """Take in one reply. False means that the stream is of no more use: open another."""
        if self._probe_id and reply.watch_id == self._probe_id:
            if reply.canceled:
                self._probe_id = 0
            return True
        watch = self._on_wire.get(reply.watch_id)
        # `canceled` is looked at before `created`: a watch that is refused for its token comes
        # back with both, and whoever looks at `created` first waits for ever.
        if reply.canceled:
            return self._canceled(watch, reply)
        if watch is None:
            return True
        if reply.created:
            self._created(watch, reply)
        elif reply.events:
            self._changed(watch, reply)
        elif not watch.is_proven:
            # Told of progress before the last change: there was no such change.
            self._list_again(watch)
        elif not watch.fragments:
            watch.next_revision = max(watch.next_revision, reply.header.revision + 1)
        return True

    def _created(self, watch: Watch, reply: wire.WatchResponse) -> None:
        watch.denials = 0
        # A follower that is behind may answer with an old revision as well; listing once more
        # for nothing is the price.
        if reply.header.revision + 1 < watch.next_revision:
            self._list_again(watch)

    def _changed(self, watch: Watch, reply: wire.WatchResponse) -> None:
        watch.fragments.extend(reply.events)
        if reply.fragment:
            return
        events, watch.fragments = (
            [_event_of(each, self._key_prefix) for each in watch.fragments],
            [],
        )
        if not watch.is_proven:
            told = [each for each in events if _revision_of(each) < watch.next_revision]
            if sorted(told, key=_place_of) != sorted(watch.last, key=_place_of):
                self._list_again(watch)
                return
            watch.is_proven = True
        new = [each for each in events if _revision_of(each) >= watch.next_revision]
        if not new:
            return
        watch.ready.extend(new)
        watch.last = _proof_of(watch.last + new)
        watch.next_revision = _revision_of(new[-1]) + 1
        if len(watch.ready) > self._pending_max:
            self._leave_wire(watch)
            watch.phase = WatchPhase.LAGGING
        watch.wake()

    def _canceled(self, watch: Watch | None, reply: wire.WatchResponse) -> bool:
        if watch is None:
            # Unless it is the echo of a cancel of ours, some watch was refused and nobody says
            # which one.
            return reply.watch_id != _NO_WATCH
        del self._on_wire[watch.wire_id]
        watch.wire_id = 0
        watch.fragments.clear()
        if reply.compact_revision > 0:
            self._list_again(watch)
            return True
        watch.denials += 1
        if watch.denials < _DENIALS_MAX:
            # A token that ended with a restart looks like this; the next stream has a new one.
            return False
        watch.phase = WatchPhase.FAILED
        watch.error = ControlPlaneError(
            f"etcd refuses to watch {watch.prefix!r}: {reply.cancel_reason or 'no reason given'}",
            definite=True,
        )
        watch.wake()
        return True

    # --- inside --------------------------------------------------------------------------------

    def _list_again(self, watch: Watch) -> None:
        self._leave_wire(watch)
        watch.phase = WatchPhase.LISTING
        watch.wake()

    def _join_wire(self, watch: Watch) -> None:
        if not self._is_connected or watch.wire_id:
            return
        start_revision = watch.next_revision
        if not watch.is_proven:
            if not watch.last:
                self._list_again(watch)
                return
            start_revision = _revision_of(watch.last[0])
        watch.wire_id = self._next_wire_id()
        self._on_wire[watch.wire_id] = watch
        key, range_end = prefix_range(self._key_prefix + watch.prefix)
        self._requests.append(
            wire.WatchRequest(
                create_request=wire.WatchCreateRequest(
                    key=key,
                    range_end=range_end,
                    start_revision=start_revision,
                    progress_notify=True,
                    watch_id=watch.wire_id,
                    fragment=True,
                )
            )
        )

    def _leave_wire(self, watch: Watch) -> None:
        if watch.wire_id:
            del self._on_wire[watch.wire_id]
            self._cancel(watch.wire_id)
        watch.wire_id = 0
        watch.fragments.clear()

    def _cancel(self, wire_id: int) -> None:
        self._requests.append(
            wire.WatchRequest(cancel_request=wire.WatchCancelRequest(watch_id=wire_id))
        )

    def _next_wire_id(self) -> int:
        self._last_wire_id += 1
        return self._last_wire_id


def prefix_range(prefix: str) -> tuple[bytes, bytes]:
    """The half-open range of keys that start with `prefix`, as etcd wants it.

    A range end of one zero byte means: to the last key.
    """
    key = prefix.encode()
    if not key:
        return b"\0", b"\0"
    # UTF-8 never holds the byte 0xff, so the last byte can always be counted up.
    return key, key[:-1] + bytes([key[-1] + 1])


def entry_of(kv: wire.KeyValue, key_prefix: str = "") -> Entry:
    """An `Entry` from etcd's own, whose key begins with `key_prefix`."""
    return Entry(
        key=_text_of(kv.key, key_prefix),
        value=kv.value,
        mod_revision=kv.mod_revision,
        create_revision=kv.create_revision,
        lease_id=kv.lease,
    )


def _text_of(key: bytes, key_prefix: str) -> str:
    # Other programs may write keys that are no text; they are shown, never written by us.
    return key.decode(errors="backslashreplace")[len(key_prefix) :]


def _event_of(event: wire.Event, key_prefix: str) -> Put | Delete:
    if event.type == wire.Event.DELETE:
        return Delete(_text_of(event.kv.key, key_prefix), event.kv.mod_revision)
    return Put(entry_of(event.kv, key_prefix))


def _proof_of(changes: list[Put | Delete]) -> list[Put | Delete]:
    """What a server must tell again, of changes in order: those from the revision of the newest put on.

    A put has a value, a lease and a revision of creation, which are not the same in two histories; a
    deletion may be, where a worker died before the backup. None if there is no put, or too much since.
    """
    newest = max((each.entry.mod_revision for each in changes if isinstance(each, Put)), default=0)
    found = [each for each in changes if _revision_of(each) >= newest]
    return found if newest and len(found) <= _PROOF_MAX else []


def _revision_of(event: Put | Delete) -> int:
    return event.entry.mod_revision if isinstance(event, Put) else event.revision


def _place_of(event: Put | Delete) -> tuple[int, str]:
    return _revision_of(event), event.entry.key if isinstance(event, Put) else event.key
