"""Whatever happens to the stream, a watch shows the store's history without gap or repetition.

A model of etcd's watch server answers the books of `watching.py`; hypothesis writes, compacts,
breaks streams in the middle of a revision, lets readers lag, restores backups, and asks in between.
"""

from __future__ import annotations

from collections import deque

import attrs
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from trinamo.runtime.planes import Delete, Entry, Put, Resync, Snapshot
from trinamo.transports.etcd import wire_pb2 as wire
from trinamo.transports.etcd.watches import Watch, WatchPhase, WatchTable, entry_of

PENDING_MAX = 5
KEYS = st.sampled_from(["p/1", "p/2", "q/1"])
PREFIX = "p/"


@attrs.define
class ServerWatch:
    """A watch as the model of the server has it."""

    next_revision: int


class ServerModel:
    """A store with history, and the watch streams etcd would serve from it."""

    def __init__(self) -> None:
        self.revision = 1
        self.compacted = 0
        self.puts = 0
        """Never goes back: no two histories have the same put."""
        self.entries: dict[str, Entry] = {}
        self.history: dict[int, list[wire.Event]] = {}
        self.watches: dict[int, ServerWatch] = {}
        self.replies: deque[wire.WatchResponse] = deque()

    def write(self, puts: list[str], deletes: list[str]) -> None:
        """One revision of several changes."""
        deletes = [key for key in deletes if key in self.entries and key not in puts]
        if not puts and not deletes:
            return
        self.revision += 1
        events = []
        for key in puts:
            self.puts += 1
            kv = wire.KeyValue(
                key=key.encode(),
                value=b"%d" % self.puts,
                mod_revision=self.revision,
                create_revision=1,
            )
            self.entries[key] = entry_of(kv)
            events.append(wire.Event(type=wire.Event.PUT, kv=kv))
        for key in deletes:
            del self.entries[key]
            kv = wire.KeyValue(key=key.encode(), mod_revision=self.revision)
            events.append(wire.Event(type=wire.Event.DELETE, kv=kv))
        self.history[self.revision] = events

    def backup(self) -> tuple[int, int, dict[str, Entry], dict[int, list[wire.Event]]]:
        return self.revision, self.compacted, {**self.entries}, {**self.history}

    def snapshot(self) -> Snapshot:
        return Snapshot(self.revision, [e for k, e in self.entries.items() if k.startswith(PREFIX)])

    def take(self, request: wire.WatchRequest) -> None:
        if request.HasField("create_request"):
            create = request.create_request
            self.replies.append(self._reply(create.watch_id, created=True))
            self.watches[create.watch_id] = ServerWatch(create.start_revision)
        else:
            self.watches.pop(request.cancel_request.watch_id, None)
            self.replies.append(self._reply(request.cancel_request.watch_id, canceled=True))

    def serve(self, watch_id: int, revisions: int, fragments: int) -> None:
        """Say the next few revisions of a watch, or that they are compacted, or progress."""
        watch = self.watches[watch_id]
        if watch.next_revision <= self.compacted:
            del self.watches[watch_id]
            reply = self._reply(watch_id, canceled=True)
            reply.compact_revision = self.compacted
            self.replies.append(reply)
            return
        last = min(self.revision, watch.next_revision + revisions - 1)
        events = [
            event
            for revision in range(watch.next_revision, last + 1)
            for event in self.history[revision]
            if event.kv.key.startswith(PREFIX.encode())
        ]
        watch.next_revision = max(watch.next_revision, last + 1)
        size = max(1, -(-len(events) // fragments))
        for start in range(0, len(events), size):
            reply = self._reply(watch_id, fragment=start + size < len(events))
            reply.events.extend(events[start : start + size])
            self.replies.append(reply)
        if not events and watch.next_revision > self.revision:
            self.replies.append(self._reply(watch_id))

    def _reply(
        self,
        watch_id: int,
        *,
        created: bool = False,
        canceled: bool = False,
        fragment: bool = False,
    ) -> wire.WatchResponse:
        return wire.WatchResponse(
            header=wire.Header(revision=self.revision, cluster_id=1),
            watch_id=watch_id,
            created=created,
            canceled=canceled,
            fragment=fragment,
        )


class Reader:
    """What a watcher makes of its events: a state, and the changes since the last full one."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.since = 0
        self.state: dict[str, int] = {}
        self.changes: list[tuple[int, str]] = []
        self.is_behind = False
        """A backup was restored, and it may know what is no longer so."""

    def take(self, table: WatchTable) -> bool:
        match table.take(self.watch):
            case None:
                return False
            case Snapshot(revision, entries) | Resync(revision, entries):
                known = max([self.since, *(r for r, _ in self.changes)])
                assert self.is_behind or revision >= known
                self.is_behind = False
                self.since, self.changes = revision, []
                self.state = {entry.key: entry.mod_revision for entry in entries}
            case Put(entry):
                self.state[entry.key] = entry.mod_revision
                self.changes.append((entry.mod_revision, entry.key))
            case Delete(key, revision):
                assert self.is_behind or key in self.state
                self.state.pop(key, None)
                self.changes.append((revision, key))
        return True


class WatchHistory(RuleBasedStateMachine):
    """Writes, faults and readers in any order."""

    @initialize()
    def start(self) -> None:
        self.server = ServerModel()
        self.table = WatchTable(pending_max=PENDING_MAX)
        self.readers = [Reader(self.table.add(PREFIX, lambda: None)) for _ in range(2)]
        self.is_connected = False
        self.saved = self.server.backup()

    @rule()
    def back_up(self) -> None:
        self.saved = self.server.backup()

    @rule(others=st.integers(0, 6))
    def restore(self, others: int) -> None:
        """By a backup, after which others write: revisions may be as high as before."""
        self.disconnect()
        server = self.server
        server.revision, server.compacted, entries, history = self.saved
        server.entries, server.history = {**entries}, {**history}
        for _ in range(others):
            server.write(["q/1"], [])
        for which, reader in enumerate(self.readers):
            # A listing from before it may wait to be read.
            self.read(which, 1000)
            reader.is_behind = True

    @rule()
    def end_proofs(self) -> None:
        if self.is_connected:
            self.table.end_proofs()

    @rule(puts=st.lists(KEYS, max_size=3, unique=True), deletes=st.lists(KEYS, max_size=2))
    def write(self, puts: list[str], deletes: list[str]) -> None:
        self.server.write(puts, sorted(set(deletes)))

    @rule(back=st.integers(0, 4))
    def compact(self, back: int) -> None:
        self.server.compacted = max(self.server.compacted, self.server.revision - back)

    @rule()
    def connect(self) -> None:
        if not self.is_connected:
            self.is_connected = True
            self.table.connected()

    @rule()
    def disconnect(self) -> None:
        self.is_connected = False
        self.table.disconnected()
        self.server.watches.clear()
        self.server.replies.clear()

    @rule(count=st.integers(1, 5))
    def send(self, count: int) -> None:
        if self.is_connected:
            # The count comes first: zip would take one request too many and drop it.
            for _, request in zip(range(count), self.table.take_requests(), strict=False):
                self.server.take(request)

    @rule(pick=st.integers(0, 10), revisions=st.integers(1, 6), fragments=st.integers(1, 3))
    def serve(self, pick: int, revisions: int, fragments: int) -> None:
        if self.server.watches:
            ids = sorted(self.server.watches)
            self.server.serve(ids[pick % len(ids)], revisions, fragments)

    @rule(count=st.integers(1, 5))
    def receive(self, count: int) -> None:
        for _ in range(min(count, len(self.server.replies))):
            assert self.table.receive(self.server.replies.popleft())

    @rule(which=st.integers(0, 1))
    def probe(self, which: int) -> None:
        if self.is_connected and which:
            self.table.probe()

    @rule(which=st.integers(0, 1))
    def list_again(self, which: int) -> None:
        watch = self.readers[which].watch
        if watch.phase is WatchPhase.LISTING and not watch.ready:
            self.table.listed(watch, self.server.snapshot())

    @rule(which=st.integers(0, 1), count=st.integers(1, 8))
    def read(self, which: int, count: int) -> None:
        for _ in range(count):
            self.readers[which].take(self.table)

    @invariant()
    def what_was_read_is_a_gapless_part_of_history(self) -> None:
        for reader in self.readers:
            if reader.is_behind:
                continue
            expected = [
                (revision, event.kv.key.decode())
                for revision in range(reader.since + 1, self.server.revision + 1)
                for event in self.server.history.get(revision, [])
                if event.kv.key.startswith(PREFIX.encode())
            ]
            assert reader.changes == expected[: len(reader.changes)]

    @invariant()
    def waiting_events_are_bounded(self) -> None:
        """The bound, and what one reply may bring on top of it."""
        for reader in self.readers:
            assert len(reader.watch.ready) <= PENDING_MAX + 6 * 3 + 1

    def teardown(self) -> None:
        """Once faults stop, every reader comes to know the present state."""
        self.connect()
        truth = {e.key: e.mod_revision for e in self.server.snapshot().entries}
        for _ in range(20):
            self.send(1000)
            for watch_id in list_of(self.server.watches):
                self.serve(list_of(self.server.watches).index(watch_id), 1000, 1)
            self.receive(1000)
            self.table.end_proofs()
            for which in range(2):
                self.read(which, 1000)
                self.list_again(which)
        assert [reader.state for reader in self.readers] == [truth, truth]


def list_of(watches: dict[int, ServerWatch]) -> list[int]:
    return sorted(watches)


WatchHistory.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestWatchHistory = WatchHistory.TestCase
