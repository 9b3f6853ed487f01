"""Pieces of a stream: opened by who has the key, in their order, once."""

from __future__ import annotations

import random

import pytest

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.transports.tcp.transfer.sealed import (
    PIECE_BYTES,
    PIECE_GROWTH,
    PIECE_KEY_BYTES,
    PIECE_LENGTH,
    PieceBuffers,
    PieceKey,
    _parts,
)

KEY = random.Random(1).randbytes(PIECE_KEY_BYTES)


def sealed_by(key: PieceKey, data: bytes) -> memoryview:
    """The piece without its length, which is checked."""
    place = memoryview(bytearray(len(data) + 2 * PIECE_GROWTH))
    end = key.seal_into(data, place)
    assert end == len(data) + PIECE_GROWTH
    assert PIECE_LENGTH.unpack_from(place) == (end - PIECE_LENGTH.size,)
    assert not any(place[end:])
    return place[PIECE_LENGTH.size : end]


def opened_by(key: PieceKey, piece: memoryview) -> bytes:
    place = memoryview(bytearray(piece.nbytes))
    return bytes(place[: key.open_into(piece, place)])


def test_pieces_open_in_their_order() -> None:
    sender, receiver = PieceKey(KEY), PieceKey(KEY)
    for data in (b"one", b"", bytes(100_000), b"one"):
        assert opened_by(receiver, sealed_by(sender, data)) == data


@pytest.mark.parametrize("order", [(0, 0), (1,), (0, 2), (0, 1, 0)])
def test_what_was_repeated_or_left_out_does_not_open(order: tuple[int, ...]) -> None:
    sender, receiver = PieceKey(KEY), PieceKey(KEY)
    pieces = [sealed_by(sender, b"alike") for _ in range(3)]
    for number in order[:-1]:
        opened_by(receiver, pieces[number])
    with pytest.raises(RemoteProtocolError, match="not the next"):
        opened_by(receiver, pieces[order[-1]])


def test_no_two_pieces_are_alike() -> None:
    sender = PieceKey(KEY)
    assert len({bytes(sealed_by(sender, b"alike")) for _ in range(300)}) == 300


@pytest.mark.parametrize("bit", range(8 * (3 + 16)))
def test_a_changed_bit_does_not_open(bit: int) -> None:
    piece = sealed_by(PieceKey(KEY), b"one")
    piece[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RemoteProtocolError, match="changed"):
        opened_by(PieceKey(KEY), piece)


def test_another_key_opens_nothing() -> None:
    with pytest.raises(RemoteProtocolError, match="changed"):
        opened_by(PieceKey(bytes(PIECE_KEY_BYTES)), sealed_by(PieceKey(KEY), b"one"))


@pytest.mark.parametrize(
    ("sizes", "counts"),
    [
        ((0, 0), []),
        ((1, 2), [3]),
        ((100_000, 100_000, 100_000), [200_000, 100_000]),
        ((7, PIECE_BYTES, 9), [7, PIECE_BYTES, 9]),
        ((PIECE_BYTES - 1, 1, 1), [PIECE_BYTES, 1]),
        ((2 * PIECE_BYTES + 5, 6), [PIECE_BYTES, PIECE_BYTES, 11]),
    ],
)
def test_a_piece_holds_as_many_blocks_as_fit_and_nothing_is_out_of_order(
    sizes: tuple[int, ...], counts: list[int]
) -> None:
    data = [random.Random(size).randbytes(size) for size in sizes]
    place = memoryview(bytearray(PIECE_BYTES))
    parts = [bytes(part) for part in _parts(data, place)]
    assert b"".join(parts) == b"".join(data)
    assert [len(part) for part in parts] == counts


def test_buffers_are_used_again_and_a_bounded_number_is_kept() -> None:
    buffers = PieceBuffers()
    taken = [buffers.take() for _ in range(100)]
    for each in taken:
        buffers.give_back(each)
    again = [buffers.take() for _ in range(100)]
    kept = {id(each) for each in taken} & {id(each) for each in again}
    assert 0 < len(kept) <= 8
