"""Numbered events: which incarnation counts, what may wait, and snapshots that come in parts."""

from __future__ import annotations

import msgspec
import pytest

from trinamo.runtime.errors import OverloadedError, RemoteProtocolError
from trinamo.runtime.protocol.events import sequence
from trinamo.runtime.protocol.events.sequence import (
    OUTDATED_ANSWERS_MAX,
    OUTDATED_EVENTS_MAX,
    PARTS_MAX,
    SequenceCounts,
    SequencedEvent,
    SequencedSnapshot,
    SequencedView,
    SnapshotAssembly,
    SnapshotRequest,
    WholeSnapshot,
    decode_event,
    decode_request,
    decode_snapshot,
    encode_event,
    encode_request,
)

DEEP = b"\x91" * 5000


def event(incarnation: int, number: int, body: bytes | None = b"x") -> SequencedEvent:
    return SequencedEvent("p", incarnation, number, body)


def snapshot(incarnation: int, number: int) -> WholeSnapshot:
    return WholeSnapshot("p", incarnation, number, (b"s",))


def test_an_earlier_incarnation_is_heard_again_once_the_later_one_is_silent() -> None:
    view = SequencedView()
    view.receive(event(9, 1))
    for number in range(OUTDATED_EVENTS_MAX - 1):
        view.receive(event(3, number + 1))
    assert not view.needs_snapshot
    # A sign of the later one, and the count begins anew.
    view.receive(event(9, 1, None))
    asking = []
    for number in range(OUTDATED_EVENTS_MAX):
        view.receive(event(3, number + 1))
        asking.append(view.needs_snapshot)
    assert asking == [False] * (OUTDATED_EVENTS_MAX - 1) + [True]
    for _ in range(OUTDATED_ANSWERS_MAX - 1):
        assert view.take_snapshot(snapshot(3, 8)).snapshot is None
    assert view.take_snapshot(snapshot(3, 8)).snapshot == (b"s",)
    assert (view.incarnation, view.sequence, view.needs_snapshot) == (3, 8, False)
    assert view.receive(event(3, 9)).events == (b"x",)


@pytest.mark.parametrize(
    "wrong", [event(1, 0), event(-1, 1), event(-1, 1, None), event(1, -1, None)]
)
def test_an_event_with_an_impossible_number_is_refused(wrong: SequencedEvent) -> None:
    with pytest.raises(RemoteProtocolError, match="an event numbered"):
        decode_event(encode_event(wrong))


@pytest.mark.parametrize("right", [event(0, 1), event(7, 2), event(0, 0, None), event(3, 9, None)])
def test_the_least_numbers_are_events_and_signs_of_life(right: SequencedEvent) -> None:
    assert decode_event(encode_event(right)) == right


def test_a_snapshot_that_comes_uncalled_counts_only_if_it_is_newer() -> None:
    view = SequencedView()
    view.receive(event(1, 1))
    assert view.take_snapshot(snapshot(1, 1)).snapshot is None
    assert view.take_snapshot(snapshot(1, 0)).snapshot is None
    assert view.sequence == 1
    assert view.take_snapshot(snapshot(1, 5)).snapshot == (b"s",)
    assert view.receive(event(1, 6)).events == (b"x",)


def test_events_that_waited_for_a_snapshot_follow_it_each_once() -> None:
    view = SequencedView()
    view.receive(event(1, 3, b"3"))
    for number in (4, 5, 6):
        view.receive(event(1, number, b"%d" % number))
    step = view.take_snapshot(snapshot(1, 4))
    assert (step.snapshot, step.events) == ((b"s",), (b"5", b"6"))
    assert (view.sequence, view.needs_snapshot) == (6, False)
    assert view.receive(event(1, 7, b"7")).events == (b"7",)


def test_the_event_that_shows_a_gap_follows_the_snapshot_that_fills_it() -> None:
    view = SequencedView()
    view.receive(event(1, 1))
    view.receive(event(1, 3, b"3"))
    assert view.needs_snapshot
    assert view.take_snapshot(snapshot(1, 2)).events == (b"3",)
    assert (view.sequence, view.needs_snapshot) == (3, False)


def test_outdated_snapshots_are_counted_and_a_newer_one_ends_the_count() -> None:
    view = SequencedView()
    view.receive(event(9, 5))
    for _ in range(OUTDATED_ANSWERS_MAX - 1):
        view.take_snapshot(snapshot(3, 8))
    assert view.counts.outdated == OUTDATED_ANSWERS_MAX - 1
    assert view.take_snapshot(snapshot(9, 8)).snapshot == (b"s",)
    # The count begins anew: as many outdated ones again change nothing.
    view.receive(event(9, 20))
    assert view.needs_snapshot
    for _ in range(OUTDATED_ANSWERS_MAX - 1):
        assert view.take_snapshot(snapshot(3, 8)).snapshot is None
    assert view.take_snapshot(snapshot(3, 8)).snapshot == (b"s",)


def test_a_later_incarnation_that_lives_stays() -> None:
    view = SequencedView()
    view.receive(event(9, 5))
    for _ in range(100):
        assert view.take_snapshot(snapshot(3, 8)).snapshot is None
        view.receive(event(9, 5, None))
    assert view.incarnation == 9


def test_an_uncalled_snapshot_of_an_earlier_incarnation_is_never_taken() -> None:
    view = SequencedView()
    view.receive(event(9, 1))
    for _ in range(100):
        assert view.take_snapshot(snapshot(3, 8)).snapshot is None
    assert view.incarnation == 9


def test_what_waits_is_bounded_in_bytes_over_all_publishers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sequence, "BUFFERED_BYTES_MAX", 100)
    counts = SequenceCounts()
    views = [SequencedView(counts) for _ in range(5)]
    for number in range(5, 50):
        for view in views:
            view.receive(event(1, number, b"x" * 30))
            assert counts.buffered_bytes <= 100
    assert counts.overflowed > 0
    for view in views:
        view.close()
    assert counts.buffered_bytes == 0


def test_the_same_number_twice_waits_once() -> None:
    view = SequencedView()
    view.receive(event(1, 5, b"abc"))
    view.receive(event(1, 5, b"abcde"))
    assert view.counts.buffered_bytes == 5
    assert view.take_snapshot(snapshot(1, 4)).events == (b"abcde",)
    assert view.counts.buffered_bytes == 0


# --- snapshots -------------------------------------------------------------------------------


def answer(part: int, parts: int, *, number: int = 7, incarnation: int = 1) -> SequencedSnapshot:
    return SequencedSnapshot("p", incarnation, number, b"%d" % part, part, parts)


def test_a_snapshot_that_fits_is_one_answer() -> None:
    assembly = SnapshotAssembly("p")
    assert assembly.request == SnapshotRequest(0, 1)
    assert assembly.take(answer(0, 1)) == WholeSnapshot("p", 1, 7, (b"0",))


def test_one_that_does_not_is_asked_for_in_parts_and_has_the_first_one_s_number() -> None:
    assembly = SnapshotAssembly("p")
    assert assembly.take(answer(0, 3)) is None
    for part in range(2):
        assert assembly.request == SnapshotRequest(part, 3)
        assert assembly.take(answer(part, 3, number=7 + part)) is None
    assert assembly.take(answer(2, 3, number=9)) == WholeSnapshot("p", 1, 7, (b"0", b"1", b"2"))


def test_a_part_that_has_outgrown_its_message_starts_it_again_in_more_parts() -> None:
    assembly = SnapshotAssembly("p")
    assembly.take(answer(0, 3))
    assembly.take(answer(0, 3))
    assert assembly.take(answer(0, 9)) is None
    assert assembly.request == SnapshotRequest(0, 9)


@pytest.mark.parametrize(
    "wrong",
    [
        SequencedSnapshot("q", 1, 7, b"", 1, 3),
        answer(0, 3),
        answer(2, 3),
        answer(1, 2),
        answer(1, 3, number=6),
        answer(1, 3, incarnation=2),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(wrong: SequencedSnapshot) -> None:
    assembly = SnapshotAssembly("p")
    assembly.take(answer(0, 3))
    assembly.take(answer(0, 3))
    with pytest.raises(RemoteProtocolError):
        assembly.take(wrong)


def test_too_many_parts_are_refused_by_their_bound() -> None:
    with pytest.raises(OverloadedError, match="parts") as caught:
        SnapshotAssembly("p").take(answer(0, PARTS_MAX + 1))
    assert caught.value.value == PARTS_MAX


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        DEEP,
        msgspec.msgpack.encode([2, 2]),
        msgspec.msgpack.encode([-1, 2]),
        msgspec.msgpack.encode([0, PARTS_MAX + 1]),
        msgspec.msgpack.encode(["0", 1]),
    ],
)
def test_what_is_no_request_is_refused_as_such(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_request(payload)


def test_a_request_decodes_to_what_it_was() -> None:
    request = SnapshotRequest(3, PARTS_MAX)
    assert decode_request(encode_request(request)) == request


@pytest.mark.parametrize("payload", [b"", b"\xc1", DEEP, msgspec.msgpack.encode(["p", -1, 1, b""])])
def test_what_is_no_event_and_no_snapshot_is_refused_as_such(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_event(payload)
    with pytest.raises(RemoteProtocolError):
        decode_snapshot(payload)


def test_nesting_behind_the_known_fields_is_refused_not_followed() -> None:
    deep = msgspec.msgpack.encode(["p", 1, 1, b"x"])[1:] + DEEP + b"\xc0"
    for decode in (decode_event, decode_snapshot):
        with pytest.raises(RemoteProtocolError):
            decode(b"\x9f" + deep)
