from __future__ import annotations

import struct
import tracemalloc

import pytest

from trinamo.runtime.errors import LocalProtocolError, RemoteProtocolError
from trinamo.runtime.protocol.streams.codec import (
    DATA_BYTES_MAX,
    HEADER_BYTES_MAX,
    PREFIX_BYTES,
    FrameDecoder,
    decode_frame,
    encode_frame,
)

FRAMES = [(b"{}", b""), (b"", b"payload"), (b"head", b"data"), (b"", b"")]


def announce(header_bytes: int, data_bytes: int) -> bytes:
    return struct.pack(">II", header_bytes, data_bytes)


def test_the_layout_is_two_big_endian_lengths_then_header_then_data() -> None:
    assert encode_frame(b"ab", b"cde") == b"\0\0\0\2\0\0\0\3abcde"


def test_the_bounds_are_those_of_the_specification() -> None:
    assert (HEADER_BYTES_MAX, DATA_BYTES_MAX, PREFIX_BYTES) == (128 * 1024, 32 * 1024 * 1024, 8)


class Long(bytes):
    """Bytes that say they are 4 GiB and more, without being it."""

    says: int

    def __len__(self) -> int:
        return self.says


def long(count: int) -> bytes:
    found = Long()
    found.says = count
    return found


@pytest.mark.parametrize(
    ("header", "data"), [(long(1 << 32), b""), (b"", long(1 << 32)), (long(1 << 32), long(1 << 32))]
)
def test_a_part_that_no_length_field_can_tell_is_our_own_bug(header: bytes, data: bytes) -> None:
    with pytest.raises(LocalProtocolError, match="4294967296"):
        encode_frame(header, data)


def test_the_longest_part_a_length_field_can_tell_is_none() -> None:
    most = long((1 << 32) - 1)
    assert encode_frame(most, b"")[:8] == b"\xff\xff\xff\xff\0\0\0\0"
    assert encode_frame(b"", most)[:8] == b"\0\0\0\0\xff\xff\xff\xff"


def test_all_four_kinds_of_frame_come_back_in_order() -> None:
    wire = b"".join(encode_frame(*frame) for frame in FRAMES)
    assert FrameDecoder().feed(wire) == FRAMES


def test_every_single_split_gives_the_same_frames() -> None:
    wire = b"".join(encode_frame(*frame) for frame in FRAMES)
    for cut in range(len(wire) + 1):
        decoder = FrameDecoder()
        assert decoder.feed(wire[:cut]) + decoder.feed(wire[cut:]) == FRAMES
        assert decoder.pending_bytes == 0


def test_parts_are_bytes_however_they_were_split() -> None:
    """A bytearray would be no dictionary key, and only on the path of torn frames."""
    decoder = FrameDecoder()
    wire = encode_frame(b"head", b"data")
    frames = [frame for i in range(len(wire)) for frame in decoder.feed(wire[i : i + 1])]
    assert [type(part) for frame in frames for part in frame] == [bytes, bytes]


def test_an_incomplete_frame_shows_in_pending_bytes() -> None:
    decoder = FrameDecoder()
    assert decoder.feed(encode_frame(b"", b"abc") + b"\0\0\0") == [(b"", b"abc")]
    assert decoder.pending_bytes == 3
    decoder.check()


@pytest.mark.parametrize("lengths", [(129, 0), (0, 1025), (0xFFFFFFFF, 0xFFFFFFFF)])
def test_a_length_over_its_bound_is_refused_before_a_byte_of_it_has_come(
    lengths: tuple[int, int],
) -> None:
    decoder = FrameDecoder(header_bytes_max=128, data_bytes_max=1024)
    with pytest.raises(RemoteProtocolError, match="at most 128 and 1024"):
        decoder.feed(announce(*lengths))
    assert decoder.pending_bytes == 0


def test_a_length_at_its_bound_is_taken() -> None:
    decoder = FrameDecoder(header_bytes_max=4, data_bytes_max=8)
    assert decoder.feed(encode_frame(b"h" * 4, b"d" * 8)) == [(b"h" * 4, b"d" * 8)]


def test_a_length_of_eight_gigabytes_allocates_nothing() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            FrameDecoder().feed(announce(0xFFFFFFFF, 0xFFFFFFFF))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_frame_that_comes_in_tiny_pieces_costs_no_more_memory_than_its_bytes() -> None:
    decoder = FrameDecoder()
    decoder.feed(announce(0, 400_000))
    tracemalloc.start()
    try:
        for number in range(50_000):
            decoder.feed(number.to_bytes(4, "big"))
        assert tracemalloc.get_traced_memory()[0] < 400_000
    finally:
        tracemalloc.stop()


def test_good_frames_before_a_malformed_one_are_handed_out_then_it_stays_broken() -> None:
    decoder = FrameDecoder(data_bytes_max=8)
    good = encode_frame(b"", b"good")
    assert decoder.feed(good + announce(0, 9) + good) == [(b"", b"good")]
    with pytest.raises(RemoteProtocolError):
        decoder.check()
    with pytest.raises(RemoteProtocolError):
        decoder.feed(good)


def test_a_part_too_long_for_its_length_field_is_our_own_bug() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return 1 << 32

    with pytest.raises(LocalProtocolError):
        encode_frame(b"", Huge())


def test_a_whole_message_is_one_frame() -> None:
    assert decode_frame(encode_frame(b"h", b"d")) == (b"h", b"d")


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\0" * 7,
        encode_frame(b"h", b"d")[:-1],
        encode_frame(b"h", b"d") + b"!",
        encode_frame(b"h") * 2,
        announce(1 << 31, 0),
        encode_frame(b"h") + announce(1 << 31, 0),
    ],
)
def test_a_message_that_is_not_one_frame_is_malformed(message: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_frame(message)
