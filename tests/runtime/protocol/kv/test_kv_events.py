"""KV events as bytes, and the table they add up to: bounds, and what peers may get wrong."""

from __future__ import annotations

import random
from collections import deque

import msgspec
import pytest

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.protocol.kv.blocks import BlockTable
from trinamo.runtime.protocol.kv.events import (
    BATCH_EVENTS_MAX,
    BATCH_HASHES_MAX,
    HASH_BYTES,
    Cleared,
    KvEvent,
    Removed,
    Stored,
    block_hash,
    block_hashes,
    decode_batch,
    encode_batch,
    hash_count,
    next_batch,
)

pack = msgspec.msgpack.encode


def hashes(*numbers: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(HASH_BYTES, "big") for number in numbers)


A, B, C, D = hashes(1, 2, 3, 4)


def test_a_block_is_named_by_its_tokens_and_all_before_them() -> None:
    first, second = block_hashes([1, 2, 3, 4, 5], 2)
    assert first == block_hash(b"", [1, 2])
    assert second == block_hash(first, [3, 4])
    assert block_hashes([9, 2, 3, 4], 2)[1] != second
    assert block_hashes([1], 2) == []


def test_a_batch_decodes_to_what_it_was() -> None:
    events: list[KvEvent] = [Stored(b"", (A, B)), Stored(B, (C,)), Removed((A,)), Cleared()]
    assert decode_batch(encode_batch(events)) == events


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"garbage, and more of it",
        pack([]),
        pack({"stored": 1}),
        pack([["moved", A]]),
        pack([["stored", b"", b""]]),
        pack([["stored", b"", A + b"x"]]),
        pack([["stored", b"xyz", A]]),
        pack([["stored", "", A]]),
        pack([["removed", b""]]),
        pack([["removed"]]),
        pack([["cleared"]] * (BATCH_EVENTS_MAX + 1)),
        pack([["removed", A * (BATCH_HASHES_MAX + 1)]]),
        pack([["removed", A * BATCH_HASHES_MAX * 4]]),
        b"\x91" * 10_000,
    ],
)
def test_what_is_no_batch_is_refused_as_such(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_batch(payload)


def test_random_bytes_and_damaged_batches_never_raise_anything_else() -> None:
    dice = random.Random(1)
    good = encode_batch([Stored(b"", (A, B)), Removed((A,)), Cleared()])
    for _ in range(2000):
        damaged = bytearray(good if dice.random() < 0.7 else dice.randbytes(dice.randrange(40)))
        for _ in range(dice.randrange(3)):
            if damaged:
                damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        try:
            events = decode_batch(bytes(damaged))
        except RemoteProtocolError:
            continue
        assert decode_batch(encode_batch(events)) == events


def test_what_waits_leaves_in_batches_within_both_bounds() -> None:
    long = hashes(*range(2 * BATCH_HASHES_MAX + 5))
    waiting: deque[KvEvent] = deque([Stored(A, long), *[Cleared()] * (BATCH_EVENTS_MAX + 1)])
    batches = []
    while waiting:
        batches.append(next_batch(waiting))
    assert [sum(map(hash_count, batch)) for batch in batches[:3]] == [1024, 1024, 5]
    assert max(map(len, batches)) == BATCH_EVENTS_MAX
    # Cut in two, the second half follows the last block of the first.
    assert batches[1] == [Stored(long[1023], long[1024:2048])]


# --- the table -------------------------------------------------------------------------------


def test_the_leading_blocks_end_at_the_first_gap() -> None:
    table = BlockTable()
    table.apply(Stored(b"", (A, B, C)))
    assert table.leading((A, B, C, D)) == 3
    table.apply(Removed((B,)))
    assert table.leading((A, B, C)) == 1
    assert table.leading((B, C)) == 0
    # A block that is held, but behind another parent, is not this one.
    assert table.leading((A, C)) == 1
    table.apply(Cleared())
    assert table.leading((A,)) == 0


def test_applying_again_and_removing_what_is_not_there_change_nothing() -> None:
    table = BlockTable()
    for _ in range(2):
        table.apply(Stored(b"", (A, B)))
        table.apply(Removed((C, B)))
    assert dict(table.parents) == {A: b""}


def test_a_full_table_refuses_and_stays_a_subset() -> None:
    table = BlockTable(blocks_max=3)
    table.apply(Stored(b"", (A, B)))
    table.apply(Stored(B, (C, D)))
    assert (len(table), table.refused) == (3, 1)
    assert D not in table
    # What is there already may be told again.
    table.apply(Stored(b"", (A, B, C)))
    assert (len(table), table.refused) == (3, 1)
    table.replace([BlockTable().encode_part(0, 1)])
    assert len(table) == 0


def test_a_snapshot_that_makes_no_sense_changes_nothing() -> None:
    table = BlockTable()
    table.apply(Stored(b"", (A,)))
    for body in (b"", b"\xc1", pack([A, B]), pack([A, B, b""]), pack([b"x", b"", b""]), pack(7)):
        with pytest.raises(RemoteProtocolError):
            table.replace([table.encode_part(0, 1), body])
    assert dict(table.parents) == {A: b""}


def test_the_parts_of_a_snapshot_are_of_about_the_same_size() -> None:
    table = BlockTable()
    table.apply(Stored(b"", tuple(block_hashes(range(4000), 2))))
    sizes = [len(table.encode_part(part, 4)) for part in range(4)]
    assert max(sizes) < 1.25 * min(sizes)
