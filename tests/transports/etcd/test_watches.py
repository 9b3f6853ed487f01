"""The books of the Watch stream, step by step: requests out, replies in, no I/O."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from trinamo.runtime.errors import ControlPlaneError
from trinamo.runtime.planes import Delete, Entry, Put, Resync, Snapshot, WatchEvent
from trinamo.transports.etcd import wire_pb2 as wire
from trinamo.transports.etcd.watches import Watch, WatchPhase, WatchTable, entry_of, prefix_range

Sent = tuple[str, int, int]


class Books:
    """A table with its requests in words, and the watches' wakes counted."""

    def __init__(self, *, pending_max: int = 1024) -> None:
        self.table = WatchTable(pending_max=pending_max)
        self.wakes = 0

    def add(self, prefix: str = "p/", *, at: int = 10) -> Watch:
        """A watch that was listed at a revision, and whose snapshot was read."""
        watch = self.table.add(prefix, self.wake)
        snapshot = Snapshot(at, (Entry(prefix + "z", b"v", 8, 8),))
        self.table.listed(watch, snapshot)
        assert self.table.take(watch) == snapshot
        return watch

    def wake(self) -> None:
        self.wakes += 1

    def sent(self) -> list[Sent]:
        """What was sent since last asked: (verb, wire id, start revision)."""
        words = []
        for request in self.table.take_requests():
            if request.HasField("create_request"):
                create = request.create_request
                words.append(("create", create.watch_id, create.start_revision))
            else:
                words.append(("cancel", request.cancel_request.watch_id, 0))
        return words

    def take_all(self, watch: Watch) -> list[WatchEvent]:
        found = []
        while (event := self.table.take(watch)) is not None:
            found.append(event)
        return found


def header(revision: int, cluster_id: int = 1) -> wire.Header:
    return wire.Header(revision=revision, cluster_id=cluster_id)


def put(key: str, revision: int, value: bytes = b"v") -> wire.Event:
    kv = wire.KeyValue(
        key=key.encode(), value=value, mod_revision=revision, create_revision=revision
    )
    return wire.Event(type=wire.Event.PUT, kv=kv)


def delete(key: str, revision: int) -> wire.Event:
    return wire.Event(
        type=wire.Event.DELETE, kv=wire.KeyValue(key=key.encode(), mod_revision=revision)
    )


def created(watch_id: int, revision: int = 10, cluster_id: int = 1) -> wire.WatchResponse:
    return wire.WatchResponse(header=header(revision, cluster_id), watch_id=watch_id, created=True)


def events(
    watch_id: int, *changes: wire.Event, revision: int = 0, fragment: bool = False
) -> wire.WatchResponse:
    return wire.WatchResponse(
        header=header(revision or changes[-1].kv.mod_revision),
        watch_id=watch_id,
        events=changes,
        fragment=fragment,
    )


def progress(watch_id: int, revision: int) -> wire.WatchResponse:
    return wire.WatchResponse(header=header(revision), watch_id=watch_id)


def compacted(watch_id: int, revision: int) -> wire.WatchResponse:
    return wire.WatchResponse(
        header=header(99), watch_id=watch_id, canceled=True, compact_revision=revision
    )


def refused(watch_id: int, *, is_created: bool = True) -> wire.WatchResponse:
    return wire.WatchResponse(
        header=header(0),
        watch_id=watch_id,
        created=is_created,
        canceled=True,
        cancel_reason="permission denied",
    )


def test_a_watch_is_created_one_past_its_snapshot() -> None:
    books = Books()
    books.table.connected()
    books.add(at=10)
    assert books.sent() == [("create", 1, 11)]


def test_before_it_is_listed_nothing_is_sent() -> None:
    books = Books()
    books.table.connected()
    watch = books.table.add("p/", books.wake)
    assert books.sent() == []
    assert books.table.take(watch) is None
    assert watch.phase is WatchPhase.LISTING


# fmt: off
RESUMES: list[tuple[str, list[wire.WatchResponse], int, int]] = [
    # what the stream said before it was lost,                     from where it is told again, what is new
    ("nothing",                  [],                                                         8, 11),
    ("created",                  [created(1, 50)],                                           8, 11),
    ("an event",                 [created(1), events(1, put("p/a", 12))],                   12, 13),
    ("two revisions in a reply", [events(1, put("p/a", 12), put("p/b", 15))],               15, 16),
    ("a revision of many",       [events(1, delete("p/a", 12), delete("p/b", 12))],          8, 13),
    ("progress",                 [progress(1, 40)],                                          8, 41),
    ("progress gone backwards",  [progress(1, 40), progress(1, 20)],                         8, 41),
    ("events after progress",    [progress(1, 40), events(1, put("p/a", 44), revision=60)], 44, 45),
    ("half a revision",          [events(1, put("p/a", 12), fragment=True)],                 8, 11),
    ("progress amid fragments",  [events(1, put("p/a", 12), fragment=True),
                                  progress(1, 40)],                                          8, 11),
    ("all of a revision",        [events(1, put("p/a", 12), fragment=True),
                                  events(1, put("p/b", 12))],                               12, 13),
    ("another watch's event",    [events(7, put("q/a", 30))],                                8, 11),
    ("progress of no watch",     [progress(-1, 40)],                                         8, 11),
]
# fmt: on


@pytest.mark.parametrize(
    ("said", "start", "new"), [row[1:] for row in RESUMES], ids=[r[0] for r in RESUMES]
)
def test_a_lost_stream_is_resumed_at_the_watchs_own_revision(
    said: Sequence[wire.WatchResponse], start: int, new: int
) -> None:
    books = Books()
    books.table.connected()
    watch = books.add(at=10)
    books.sent()
    for reply in said:
        assert books.table.receive(reply)
    books.table.disconnected()
    books.table.connected()
    assert books.sent() == [("create", 2, start)]
    assert watch.next_revision == new


def test_each_watch_resumes_at_its_own_place() -> None:
    books = Books()
    books.table.connected()
    books.add("a/", at=10)
    books.add("b/", at=20)
    books.sent()
    books.table.receive(events(1, put("a/x", 35)))
    books.table.disconnected()
    assert books.sent() == []
    books.table.connected()
    assert sorted(start for _, _, start in books.sent()) == [8, 35]


def test_events_reach_the_reader_in_order_and_in_the_planes_words() -> None:
    books = Books()
    books.table.connected()
    watch = books.add()
    books.table.receive(events(1, put("p/a", 12), delete("p/a", 13)))
    assert books.wakes == 1
    assert books.take_all(watch) == [Put(Entry("p/a", b"v", 12, 12)), Delete("p/a", 13)]


def test_what_was_already_seen_is_not_told_again() -> None:
    books = Books()
    books.table.connected()
    watch = books.add(at=10)
    books.table.receive(events(1, put("p/old", 9), put("p/new", 11)))
    assert books.take_all(watch) == [Put(Entry("p/new", b"v", 11, 11))]


def test_fragments_are_told_only_when_the_last_has_come() -> None:
    books = Books()
    books.table.connected()
    watch = books.add()
    books.table.receive(events(1, put("p/a", 12), fragment=True))
    assert books.table.take(watch) is None
    books.table.receive(events(1, put("p/b", 12)))
    assert len(books.take_all(watch)) == 2


def test_fragments_of_a_lost_stream_are_forgotten() -> None:
    books = Books()
    books.table.connected()
    watch = books.add()
    books.table.receive(events(1, put("p/a", 12), fragment=True))
    books.table.disconnected()
    books.table.connected()
    books.table.receive(events(2, put("p/z", 8), put("p/a", 12), put("p/b", 12)))
    assert len(books.take_all(watch)) == 2


def test_replies_to_a_number_of_the_last_stream_are_ignored() -> None:
    books = Books()
    books.table.connected()
    watch = books.add()
    books.table.disconnected()
    books.table.connected()
    assert books.table.receive(events(1, put("p/a", 12)))
    assert books.take_all(watch) == []


def test_compaction_sends_the_reader_to_list_and_then_tells_a_resync() -> None:
    books = Books()
    books.table.connected()
    watch = books.add(at=10)
    books.table.receive(events(1, put("p/a", 12)))
    books.sent()
    assert books.table.receive(compacted(1, 30))
    assert watch.phase is WatchPhase.LISTING
    assert books.wakes == 2
    books.table.listed(watch, Snapshot(40, ()))
    assert books.take_all(watch) == [Put(Entry("p/a", b"v", 12, 12)), Resync(40, ())]
    assert books.sent() == [("create", 2, 41)]


def test_a_watch_listed_while_there_is_no_stream_waits_for_the_next() -> None:
    books = Books()
    watch = books.add(at=10)
    assert watch.phase is WatchPhase.STREAMING
    assert books.sent() == []
    books.table.connected()
    assert books.sent() == [("create", 1, 11)]


@pytest.mark.parametrize("is_created", [True, False])
def test_a_refused_watch_asks_for_a_new_stream_once_and_then_fails(is_created: bool) -> None:
    """The server says `created` and `canceled` in one reply when a token is bad."""
    books = Books()
    books.table.connected()
    watch = books.add()
    assert not books.table.receive(refused(1, is_created=is_created))
    books.table.disconnected()
    books.table.connected()
    assert books.sent() == [("create", 2, 8)]
    assert books.table.receive(refused(2, is_created=is_created))
    assert isinstance(watch.error, ControlPlaneError)
    assert "permission denied" in str(watch.error)
    assert watch.phase is WatchPhase.FAILED
    books.table.disconnected()
    books.table.connected()
    assert books.sent() == []


def test_a_watch_that_was_taken_in_between_may_be_refused_again() -> None:
    books = Books()
    books.table.connected()
    watch = books.add()
    assert not books.table.receive(refused(1))
    books.table.disconnected()
    books.table.connected()
    books.table.receive(created(2))
    assert not books.table.receive(refused(2, is_created=False))
    assert watch.error is None


def test_a_refusal_that_names_no_watch_asks_for_a_new_stream() -> None:
    books = Books()
    books.table.connected()
    books.add()
    assert not books.table.receive(refused(-1))


def test_a_removed_watch_is_cancelled_and_its_echo_ignored() -> None:
    books = Books()
    books.table.connected()
    watch = books.add()
    books.sent()
    books.table.remove(watch)
    assert books.sent() == [("cancel", 1, 0)]
    assert books.table.receive(refused(1, is_created=False))
    assert books.table.receive(events(1, put("p/a", 12)))
    assert len(books.table) == 0
    assert books.wakes == 0


def test_a_lagging_reader_is_taken_off_the_stream_until_it_has_read_half() -> None:
    books = Books(pending_max=4)
    books.table.connected()
    watch = books.add(at=10)
    books.sent()
    books.table.receive(events(1, *(put("p/a", revision) for revision in range(11, 16))))
    assert watch.phase is WatchPhase.LAGGING
    assert books.sent() == [("cancel", 1, 0)]
    # What was on its way is not taken twice: the watch comes back for it.
    books.table.receive(events(1, put("p/a", 16)))
    for _ in range(2):
        assert books.table.take(watch) is not None
    assert books.sent() == []
    assert books.table.take(watch) is not None
    assert books.sent() == [("create", 2, 16)]
    books.table.receive(events(2, put("p/a", 16)))
    assert [e.entry.mod_revision for e in books.take_all(watch) if isinstance(e, Put)] == [
        14,
        15,
        16,
    ]


def test_a_lagging_reader_stays_off_a_new_stream() -> None:
    books = Books(pending_max=1)
    books.table.connected()
    watch = books.add(at=10)
    books.table.receive(events(1, put("p/a", 11), put("p/a", 12)))
    books.sent()
    books.table.disconnected()
    books.table.connected()
    assert books.sent() == []
    assert len(books.take_all(watch)) == 2
    # What proves the history on this stream has been told already.
    assert watch.phase is WatchPhase.LISTING
    assert books.sent() == []


# fmt: off
HISTORIES: list[tuple[str, list[wire.WatchResponse], WatchPhase]] = [
    ("the same",              [created(2, 40), events(2, put("p/z", 8), delete("p/a", 12))], WatchPhase.STREAMING),
    ("just as far",           [created(2, 30), events(2, put("p/z", 8), delete("p/a", 12), revision=30)],
                                                                                         WatchPhase.STREAMING),
    ("goes on",               [created(2, 40), events(2, put("p/z", 8), delete("p/a", 12), put("p/n", 35))],
                                                                                         WatchPhase.STREAMING),
    ("not as far",            [created(2, 29)],                                          WatchPhase.LISTING),
    ("another change",        [created(2, 40), events(2, put("p/y", 8), delete("p/a", 12))], WatchPhase.LISTING),
    ("another value",         [created(2, 40), events(2, put("p/z", 8, b"w"), delete("p/a", 12))], WatchPhase.LISTING),
    ("one change less",       [created(2, 40), events(2, put("p/z", 8))],                WatchPhase.LISTING),
    ("one change more",       [created(2, 40), events(2, put("p/z", 8), delete("p/a", 12), put("p/x", 20))],
                                                                                         WatchPhase.LISTING),
    ("no change",             [created(2, 40), progress(2, 40)],                         WatchPhase.LISTING),
    ("compacted",             [created(2, 40), compacted(2, 20)],                        WatchPhase.LISTING),
]
# fmt: on


@pytest.mark.parametrize(
    ("replies", "phase"), [r[1:] for r in HISTORIES], ids=[r[0] for r in HISTORIES]
)
def test_a_store_whose_history_is_not_ours_is_listed_again(
    replies: list[wire.WatchResponse], phase: WatchPhase
) -> None:
    """Such as one that was restored from a backup: what it has lost would stay, and its news would not come."""
    books = Books()
    books.table.connected()
    watch = books.add(at=10)
    books.table.receive(created(1, 10))
    books.table.receive(events(1, delete("p/a", 12)))
    books.table.receive(progress(1, 30))
    assert books.take_all(watch) == [Delete("p/a", 12)]
    books.table.disconnected()
    books.table.connected()
    for reply in replies:
        books.table.receive(reply)
    assert watch.phase is phase
    goes_on = replies[-1] == HISTORIES[2][1][-1]
    assert books.take_all(watch) == [Put(Entry("p/n", b"v", 35, 35))] * goes_on


def test_a_history_that_is_not_proven_in_time_is_listed_again() -> None:
    """Nothing is told of a prefix to which nothing has happened in the new history."""
    books = Books()
    books.table.connected()
    watch, proven = books.add(at=10), books.add("q/", at=10)
    books.table.disconnected()
    books.table.connected()
    for number in (3, 4):
        books.table.receive(created(number, 10))
    books.table.receive(events(4, put("q/z", 8)))
    books.table.end_proofs()
    assert (watch.phase, proven.phase) == (WatchPhase.LISTING, WatchPhase.STREAMING)
    books.table.listed(watch, Snapshot(12, ()))
    books.table.end_proofs()
    assert books.take_all(watch) == [Resync(12, ())]
    assert watch.phase is WatchPhase.STREAMING


def test_a_prefix_without_a_change_is_listed_again_on_each_new_stream() -> None:
    books = Books()
    books.table.connected()
    watch = books.table.add("p/", books.wake)
    books.table.listed(watch, Snapshot(10, ()))
    books.table.disconnected()
    books.table.connected()
    assert watch.phase is WatchPhase.LISTING


def test_too_many_deletions_since_the_last_put_are_no_proof() -> None:
    books = Books()
    books.table.connected()
    watch = books.add(at=10)
    for revision in range(11, 90):
        books.table.receive(events(1, delete("p/a", revision)))
    books.table.disconnected()
    books.table.connected()
    assert watch.phase is WatchPhase.LISTING


def test_a_probe_is_answered_and_ends_with_the_next() -> None:
    books = Books()
    books.table.connected()
    watch = books.add()
    books.sent()
    books.table.probe()
    assert books.sent() == [("create", 2, 0)]
    assert books.table.receive(created(2))
    assert books.sent() == []
    books.table.probe()
    assert books.sent() == [("cancel", 2, 0)]
    assert books.table.receive(refused(2, is_created=False))
    assert watch.phase is WatchPhase.STREAMING
    books.table.probe()
    assert books.sent() == [("create", 3, 0)]
    assert books.table.receive(refused(3)), "also a refusal shows that the server lives"
    books.table.probe()
    assert books.sent() == [("create", 4, 0)]


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("", (b"\0", b"\0")),
        ("a", (b"a", b"b")),
        ("a/", (b"a/", b"a0")),
        ("\x7f", (b"\x7f", b"\x80")),
        ("\u00bf", (b"\xc2\xbf", b"\xc2\xc0")),
    ],
)
def test_a_prefix_is_a_range(prefix: str, expected: tuple[bytes, bytes]) -> None:
    assert prefix_range(prefix) == expected


def test_a_key_that_is_no_text_is_shown_all_the_same() -> None:
    assert entry_of(wire.KeyValue(key=b"a\xff", mod_revision=1)).key == "a\\xff"
