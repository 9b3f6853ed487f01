"""KV events as bytes, and the set they add up to: bounds, and what peers may get wrong."""

from __future__ import annotations

import random
from collections import deque

import msgspec
import pytest

from tests.runtime.kv.naming import block_hashes
from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.protocol.kv.events import (
    BATCH_EVENTS_MAX,
    BATCH_HASHES_MAX,
    BlockSet,
    Cleared,
    KvEvent,
    Removed,
    Stored,
    decode_keys,
    decode_part,
    encode_batch,
    next_batch,
)
from trinamo.runtime.protocol.kv.names import HASH_BYTES

pack = msgspec.msgpack.encode


def hashes(*numbers: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(HASH_BYTES, "big") for number in numbers)


A, B, C, D = hashes(1, 2, 3, 4)


def test_a_batch_decodes_to_what_it_was() -> None:
    events: list[KvEvent] = [Stored((A, B)), Stored((C,)), Removed((A,)), Cleared()]
    assert decode_keys(encode_batch(events)) == [
        (Stored, (1, 2)),
        (Stored, (3,)),
        (Removed, (1,)),
        (Cleared, ()),
    ]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"garbage, and more of it",
        pack([]),
        pack({"stored": 1}),
        pack([["moved", A]]),
        pack([["stored", b""]]),
        pack([["stored", A + A[:8]]]),
        pack([["stored", A, A]]),
        pack([["stored", "A" * HASH_BYTES]]),
        pack([["removed", b""]]),
        pack([["removed"]]),
        pack([["cleared", A]]),
        pack([["cleared", b""]] * (BATCH_EVENTS_MAX + 1)),
        pack([["stored", b"", b"8 bytes!"], ["removed", b"8 bytes!"], ["cleared"]]),
        pack([["removed", A * (BATCH_HASHES_MAX + 1)]]),
        pack([["removed", A * BATCH_HASHES_MAX * 4]]),
        b"\x91" * 10_000,
    ],
)
def test_what_is_no_batch_is_refused_as_such(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_keys(payload)


def test_random_bytes_and_damaged_batches_never_raise_anything_else() -> None:
    dice = random.Random(1)
    good = encode_batch([Stored((A, B)), Removed((A,)), Cleared()])
    for _ in range(2000):
        damaged = bytearray(good if dice.random() < 0.7 else dice.randbytes(dice.randrange(40)))
        for _ in range(dice.randrange(3)):
            if damaged:
                damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        try:
            events = decode_keys(bytes(damaged))
        except RemoteProtocolError:
            continue
        assert 0 < len(events) <= BATCH_EVENTS_MAX
        assert all(kind is Cleared or keys for kind, keys in events)


def test_what_waits_leaves_in_batches_within_both_bounds() -> None:
    long = hashes(*range(2 * BATCH_HASHES_MAX + 5))
    waiting: deque[KvEvent] = deque([Stored(long), *[Cleared()] * (BATCH_EVENTS_MAX + 1)])
    batches = []
    while waiting:
        batches.append(next_batch(waiting))
    sizes = [sum(len(event.block_hashes) for event in batch) for batch in batches]
    assert sizes == [BATCH_HASHES_MAX, BATCH_HASHES_MAX, 5, 0]
    assert max(map(len, batches)) == BATCH_EVENTS_MAX
    assert batches[1] == [Stored(long[BATCH_HASHES_MAX : 2 * BATCH_HASHES_MAX])]


def test_a_full_batch_is_within_16_kib_and_is_taken() -> None:
    waiting: deque[KvEvent] = deque([Stored((A, B, C))] * (BATCH_EVENTS_MAX + 1))
    payload = encode_batch(next_batch(waiting))
    assert len(payload) <= 16 << 10
    assert sum(len(keys) for _, keys in decode_keys(payload)) == BATCH_HASHES_MAX
    assert len(waiting) == 1


# --- the blocks of one worker --------------------------------------------------------------------


def test_applying_again_and_removing_what_is_not_there_change_nothing() -> None:
    blocks = BlockSet()
    for _ in range(2):
        blocks.apply(Stored((A, B)))
        blocks.apply(Removed((C, B)))
    assert blocks.hashes == {A}
    blocks.apply(Cleared())
    assert len(blocks) == 0


@pytest.mark.parametrize("body", [b"", b"\xc1", pack([]), pack([b"x"]), pack([7]), pack(7)])
def test_what_is_no_part_of_a_snapshot_is_refused_as_such(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_part(body)


def test_the_parts_of_a_snapshot_are_of_about_the_same_size() -> None:
    blocks = BlockSet()
    blocks.apply(Stored(tuple(block_hashes(range(4000), 2))))
    sizes = [len(blocks.encode_part(part, 4)) for part in range(4)]
    assert max(sizes) < 1.25 * min(sizes)


def test_a_snapshot_says_the_same_blocks_by_the_same_bytes() -> None:
    hashes, ways = tuple(block_hashes(range(4000), 2)), (BlockSet(), BlockSet())
    for held, order in zip(ways, (hashes, hashes[::-1]), strict=True):
        held.apply(Stored(order))
    first, second = ways
    assert [first.encode_part(0, n) for n in (1, 3)] == [second.encode_part(0, n) for n in (1, 3)]
