"""What many streams say comes out of a link as it went in, however its bytes were cut; other bytes are refused."""

from __future__ import annotations

from contextlib import suppress

import attrs
from hypothesis import given, strategies as st

from properties.strategies import cut, cuts
from trinamo.runtime.errors import EngineError, RemoteProtocolError
from trinamo.runtime.protocol.streams.codec import encode_frame
from trinamo.runtime.protocol.streams.control import (
    Closed,
    Control,
    Declined,
    Failed,
    Handshake,
    Kill,
    Opened,
    Refused,
    Sentinel,
    Stop,
)
from trinamo.runtime.protocol.streams.link_frames import (
    ADDED_FROM,
    MESSAGES_FROM,
    Credit,
    Kind,
    LinkMessage,
    Opening,
    encode_credit,
    encode_event,
    encode_opening,
)
from trinamo.runtime.protocol.streams.multiplex import (
    PART_BYTES,
    Demultiplexer,
    Multiplexer,
    StreamIds,
)
from trinamo.runtime.protocol.streams.request import Reason, StreamType

STREAMS = 4


@attrs.frozen
class Added:
    """A frame that a newer minor has added."""

    kind: int
    header: bytes
    data: bytes


Said = bytes | Control | Credit | LinkMessage | Added

events: st.SearchStrategy[Said] = st.one_of(
    st.sampled_from([Opened(), Sentinel(), Closed()]),
    st.builds(Stop, st.sampled_from(Reason)),
    st.builds(Kill, st.sampled_from(Reason)),
    st.builds(lambda text: Failed(EngineError(text)), st.text(max_size=9)),
    st.builds(lambda text: Declined(EngineError(text)), st.text(max_size=9)),
    st.builds(Refused, st.text(max_size=5), st.text(max_size=9)),
    st.builds(Credit, st.integers(0, 0xFFFFFFFF)),
    st.builds(Added, st.integers(ADDED_FROM, 255), st.binary(max_size=9), st.binary(max_size=9)),
)
items = st.binary(min_size=1, max_size=40) | st.integers(1, 5).map(
    lambda parts: bytes(parts * PART_BYTES - 3)
)
messages = st.builds(
    LinkMessage,
    st.sampled_from([Kind.REQUEST, Kind.ANSWER]),
    st.binary(max_size=9),
    st.just(b"") | items,
)
spoken = st.lists(
    st.tuples(st.integers(1, STREAMS), events | items) | st.tuples(st.just(0), messages),
    max_size=24,
)
# What wire bytes are made of, so that kinds, lengths and live streams are met often.
wire_bytes = st.lists(
    st.sampled_from([b"\0\0\0\5", b"\0\0\0\x0d", b"\0\0\0\x15", b"\0\0\0\1", b"\0\0\0\0"])
    | st.just(MESSAGES_FROM.to_bytes(4, "big"))
    | (st.integers(1, 15) | st.just(ADDED_FROM)).map(lambda kind: bytes([kind]))
    | st.sampled_from([b"{", b'"', b"\xff\xff\xff\xff"])
    | st.binary(max_size=3)
).map(b"".join)


def told(what: object) -> object:
    """An event as it can be compared: errors by their classes, words and parameters."""
    if isinstance(what, (Failed, Declined)):
        return type(what), type(what.error), str(what.error), getattr(what.error, "param", None)
    return what


def reader(item_bytes_max: int = 1 << 20) -> Demultiplexer:
    ids = StreamIds()
    for _ in range(STREAMS):
        ids.give()
    return Demultiplexer(set(range(1, STREAMS + 1)), ids, item_bytes_max=item_bytes_max)


def write(mux: Multiplexer, said: list[tuple[int, Said]]) -> bytes:
    """All that is said, as a link sends it: while a long item is under way its stream says nothing."""
    out: list[bytes] = []
    busy: set[int] = set()

    def send() -> None:
        data, finished = mux.take()
        out.append(data)
        busy.difference_update(finished)

    for stream, what in said:
        while stream in busy:
            send()
        if isinstance(what, LinkMessage):
            mux.add_message(what.kind, what.header, what.payload)
        elif isinstance(what, Credit):
            mux.add(encode_credit(stream, what.given_bytes))
        elif isinstance(what, Added):
            head = stream.to_bytes(4, "big") + bytes([what.kind]) + what.header
            mux.add(encode_frame(head, what.data))
        elif not isinstance(what, bytes):
            mux.add(encode_event(stream, what))
        elif len(what) <= PART_BYTES:
            mux.add_item(stream, what)
        else:
            mux.add_in_parts(stream, what)
            busy.add(stream)
    while not mux.is_empty:
        send()
    return b"".join(out)


@given(spoken, cuts)
def test_each_stream_hears_what_was_said_on_it_in_order(
    said: list[tuple[int, Said]], places: list[int]
) -> None:
    """Muxing then demuxing is the identity for each stream, for every split, and nothing is left.

    But for what a newer minor has added, which is skipped and counted. Of messages the short ones keep their order, and no long one is lost.
    """
    demux = reader()
    heard: dict[int, list[object]] = {stream: [] for stream in range(STREAMS + 1)}
    for piece in cut(write(Multiplexer(), said), places):
        for number, what in demux.feed(piece):
            stream = 0 if isinstance(what, LinkMessage) else number
            heard[stream] += what if isinstance(what, list) else [told(what)]
    known = [each for each in said if not isinstance(each[1], Added)]
    assert demux.skipped_count == len(said) - len(known)
    said = known
    asked = [each for _, each in said if isinstance(each, LinkMessage)]
    arrived = [each for each in heard.pop(0) if isinstance(each, LinkMessage)]
    assert [each for each in arrived if is_short(each)] == [
        each for each in asked if is_short(each)
    ]
    assert sorted(map(repr, arrived)) == sorted(map(repr, asked))
    for stream, found in heard.items():
        assert found == [told(each) for on, each in said if on == stream]
    assert demux.pending_bytes == 0


def is_short(message: LinkMessage) -> bool:
    return len(message.payload) <= PART_BYTES


@given(st.lists(st.tuples(st.integers(1, 5), st.none() | st.integers(0, 6)), max_size=8))
def test_a_message_that_is_dropped_never_arrives_and_leaves_nothing(
    asked: list[tuple[int, int | None]],
) -> None:
    """Long messages of so many parts, each dropped after so many sends: what was not all sent is gone."""
    mux, demux = Multiplexer(), reader()
    numbers = [
        mux.add_message(Kind.REQUEST, b"%d" % place, bytes(parts * PART_BYTES + 1))
        for place, (parts, _) in enumerate(asked)
    ]
    arrived, dropped = set[bytes](), set[bytes]()
    for turn in range(100):
        for place, (_, drop_at) in enumerate(asked):
            if drop_at == turn and mux.drop_message(numbers[place]):
                dropped.add(b"%d" % place)
        for _, what in demux.feed(mux.take()[0]):
            assert isinstance(what, LinkMessage)
            arrived.add(what.header)
    assert mux.is_empty
    assert mux.message_bytes == demux.pending_bytes == 0
    assert arrived | dropped == {b"%d" % place for place in range(len(asked))}
    assert not arrived & dropped


@given(
    st.lists(st.tuples(st.integers(1, 9), st.binary(min_size=1, max_size=9)), min_size=2), st.data()
)
def test_a_batch_cut_in_the_middle_gives_nothing_of_itself(
    batch: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    """Its items arrive together with its last byte, and none before."""
    mux = Multiplexer()
    for stream, item in batch:
        mux.add_item(stream, item)
    wire, _ = mux.take()
    place = data.draw(st.integers(0, len(wire) - 1))
    demux = reader()
    for _ in range(5):
        demux._ids.give()
    demux._live = range(1, 10)
    assert list(demux.feed(wire[:place])) == []
    arrivals = dict(demux.feed(wire[place:]))
    assert sum(len(items) for items in arrivals.values() if isinstance(items, list)) == len(batch)


@given(wire_bytes, cuts)
def test_any_bytes_mean_the_same_however_they_were_cut(data: bytes, places: list[int]) -> None:
    """Nothing but `RemoteProtocolError`; what was heard before it does not depend on the split."""
    assert heard_of(cut(data, places)) == heard_of([data])


def heard_of(pieces: list[bytes]) -> tuple[dict[int, list[object]], bool]:
    demux, heard = reader(64), dict[int, list[object]]()
    try:
        for piece in pieces:
            for stream, what in demux.feed(piece):
                heard.setdefault(stream, []).extend(
                    what if isinstance(what, list) else [str(told(what))]
                )
    except RemoteProtocolError:
        return heard, True
    return heard, False


@given(st.integers(0, 0xFFFFFFFF), st.text("0123456789abcdef", min_size=1, max_size=32))
def test_an_opening_tells_its_handshake_and_window(window_bytes: int, subject: str) -> None:
    """Of both types; the stream is above all that were, else the link is broken."""
    ids = StreamIds()
    demux = Demultiplexer(set(), ids, item_bytes_max=64)
    for number, stream_type in enumerate((StreamType.RESPONSE, StreamType.REQUEST), start=1):
        opening = Opening(Handshake(subject, stream_type), window_bytes)
        assert list(demux.feed(encode_opening(number, opening))) == [(number, opening)]
        with suppress(RemoteProtocolError):
            list(demux.feed(encode_opening(number, opening)))
            raise AssertionError("opened twice")
        demux = Demultiplexer(set(), ids, item_bytes_max=64)
