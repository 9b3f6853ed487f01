"""Frames survive any split of their bytes, and any bytes are read or refused."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import given, strategies as st

from properties.strategies import controls, cut, cuts, frames
from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.protocol.streams.codec import Frame, FrameDecoder, encode_frame
from trinamo.runtime.protocol.streams.control import (
    Control,
    Declined,
    Failed,
)
from trinamo.runtime.protocol.streams.link_frames import encode_event, parse_event
from trinamo.runtime.protocol.streams.request import decode_answer, decode_cancel, decode_envelope

# What wire bytes are made of, so that lengths, bounds and JSON are met often.
wire_bytes = st.lists(
    st.sampled_from([b"\0\0\0\0", b"\0\0\0\1", b"\0\0\0\7", b"\0\0\0\x40", b"\xff\xff\xff\xff"])
    | st.sampled_from([b'"Kill"', b'{"error":null}', b"{", b"}", b'"'])
    | st.binary(max_size=3)
).map(b"".join)


def decode(pieces: list[bytes]) -> tuple[list[Frame], bool, int]:
    """The frames, whether the bytes were refused, and what is pending."""
    decoder = FrameDecoder(header_bytes_max=63, data_bytes_max=64)
    found: list[Frame] = []
    try:
        for piece in pieces:
            found += decoder.feed(piece)
        decoder.check()
    except RemoteProtocolError:
        return found, True, decoder.pending_bytes
    return found, False, decoder.pending_bytes


@given(frames, cuts)
def test_frames_come_back_however_the_bytes_were_cut(sent: list[Frame], places: list[int]) -> None:
    """Encoding then decoding is the identity, for every split, and nothing is left over."""
    decoder = FrameDecoder()
    wire = b"".join(encode_frame(*frame) for frame in sent)
    received = [frame for piece in cut(wire, places) for frame in decoder.feed(piece)]
    assert received == sent
    assert decoder.pending_bytes == 0


@given(wire_bytes, cuts)
def test_any_bytes_mean_the_same_however_they_were_cut(data: bytes, places: list[int]) -> None:
    """Frames, refusal and remainder depend on the bytes alone; never more than one frame is kept."""
    whole = decode([data])
    assert decode(cut(data, places)) == whole
    assert decode([data[i : i + 1] for i in range(len(data))]) == whole
    assert whole[2] < 8 + 63 + 64


@given(controls)
def test_every_event_comes_back_as_it_was(event: Control) -> None:
    ((header, data),) = FrameDecoder().feed(encode_event(7, event))
    back = parse_event(header[4], header, data)
    if isinstance(event, (Declined, Failed)):
        assert isinstance(back, (Declined, Failed))
        assert type(back) is type(event)
        assert type(back.error) is type(event.error)
        assert getattr(back.error, "param", None) == getattr(event.error, "param", None)
        assert back.error.args == event.error.args
        assert back.error.definite == event.error.definite
    else:
        assert back == event


@given(st.binary() | wire_bytes, st.binary(max_size=2))
def test_garbage_raises_nothing_but_a_remote_protocol_error(header: bytes, data: bytes) -> None:
    """Peer bytes never crash a process: every parser reads them or says whose fault it is."""
    for parse in (decode_envelope, decode_answer, decode_cancel):
        with suppress(RemoteProtocolError):
            parse(header)
    for kind in range(16):
        with suppress(RemoteProtocolError):
            parse_event(kind, bytes(4) + bytes([kind]) + data, header)
