"""What does not fit, is stale or was not granted is refused on every backend before a byte moves."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from tests.conformance.transfer.backends import (
    BLOCK_BYTES,
    BLOCKS,
    Pages,
)
from tests.conformance.transfer.ends import DEADLINE_S, READ, WRITE, Ends, Granted
from trinamo.runtime.errors import (
    ConnectError,
    RemoteProtocolError,
    RequestError,
    StaleMemoryError,
    TrinamoError,
)
from trinamo.runtime.planes import DeviceMemory, Transfer
from trinamo.runtime.protocol.transfer.description import (
    DESCRIPTION_BYTES_MAX,
    NOTIFY_BYTES_MAX,
    Direction,
    decode_description,
    encode_description,
)


@pytest.mark.parametrize(
    ("direction", "here", "there"),
    [
        (READ, [1, 2], [1]),
        (WRITE, [1], [1, 2]),
        (READ, [BLOCKS], [1]),
        (READ, [1], [BLOCKS]),
        (WRITE, [-1], [1]),
        (WRITE, [1], [-1]),
        (READ, [1, 1], [1, 2]),
        (WRITE, [1, 2], [1, 1]),
    ],
)
async def test_lists_that_do_not_fit_are_refused_before_anything_moves(
    ends: Ends, direction: Direction, here: list[int], there: list[int]
) -> None:
    with pytest.raises(RequestError):
        ends.start(direction, here, there)
    ends.check()


async def test_a_notification_has_a_bound(granted: Granted) -> None:
    with pytest.raises(RequestError):
        await granted.move(WRITE, [1], notify=bytes(NOTIFY_BYTES_MAX + 1))
    await granted.move(WRITE, [1], notify=bytes(NOTIFY_BYTES_MAX))
    assert await granted.hears(bytes(NOTIFY_BYTES_MAX))


@pytest.mark.parametrize("direction", Direction)
async def test_a_stale_generation_is_refused_before_a_byte_moves(
    ends: Ends, direction: Direction
) -> None:
    assert ends.owned.renew() == ends.owned.description.generation == 2
    with pytest.raises(StaleMemoryError):
        await ends.start(direction, [1], [2]).wait()
    ends.check()
    fresh = await ends.ours.connect(ends.owned.describe())
    await ends.ours.start(READ, ends.local, [1], fresh, [2], deadline_s=DEADLINE_S).wait()


@pytest.mark.parametrize("direction", Direction)
async def test_a_deregistered_region_is_refused(ends: Ends, direction: Direction) -> None:
    await ends.theirs.deregister(ends.owned)
    with pytest.raises(StaleMemoryError):
        await ends.start(direction, [1], [2]).wait()
    ends.check()


async def test_a_local_region_that_is_deregistered_is_refused(ends: Ends) -> None:
    await ends.ours.deregister(ends.local)
    with pytest.raises(StaleMemoryError):
        ends.start(READ, [1], [2])


async def test_deregistering_again_changes_nothing(ends: Ends) -> None:
    await ends.ours.deregister(ends.local)
    await ends.ours.deregister(ends.local)


@pytest.mark.parametrize("direction", Direction)
async def test_only_blocks_granted_to_the_ticket_move(ends: Ends, direction: Direction) -> None:
    there = Pages(9)
    owned = await ends.theirs.register(
        there.memory, block_bytes=BLOCK_BYTES, fingerprint="pages", needs_ticket=True
    )
    owned.grant(77, [4, 5])
    remote = await ends.ours.connect(owned.describe())

    async def move(block: int, ticket: int) -> None:
        await ends.ours.start(
            direction, ends.local, [1], remote, [block], deadline_s=DEADLINE_S, ticket=ticket
        ).wait()

    await move(4, 77)
    for block, ticket in [(4, 0), (4, 78), (6, 77)]:
        with pytest.raises(StaleMemoryError):
            await move(block, ticket)
    owned.revoke(77)
    with pytest.raises(StaleMemoryError):
        await move(4, 77)


async def test_a_ticket_for_reading_does_not_write(ends: Ends) -> None:
    there = Pages(9)
    owned = await ends.theirs.register(
        there.memory, block_bytes=BLOCK_BYTES, fingerprint="pages", needs_ticket=True
    )
    owned.grant(77, [4], may_write=False)
    remote = await ends.ours.connect(owned.describe())
    before = bytes(there.memory)

    def start(direction: Direction) -> Transfer:
        return ends.ours.start(
            direction, ends.local, [1], remote, [4], deadline_s=DEADLINE_S, ticket=77
        )

    with pytest.raises(StaleMemoryError):
        await start(WRITE).wait()
    assert bytes(there.memory) == before
    await start(READ).wait()
    assert ends.here.block(1) == there.block(4)


async def test_regions_that_mean_different_bytes_are_refused(ends: Ends) -> None:
    other = await ends.ours.register(bytearray(8192), block_bytes=BLOCK_BYTES, fingerprint="else")
    small = await ends.ours.register(bytearray(8192), block_bytes=1024, fingerprint="pages")
    for region in (other, small):
        with pytest.raises(StaleMemoryError):
            ends.ours.start(READ, region, [0], ends.remote, [0], deadline_s=DEADLINE_S)


@pytest.mark.parametrize(
    ("memory", "block_bytes"),
    [
        (b"read-only pages", 4),
        (bytearray(), 4),
        (bytearray(3), 4),
        (bytearray(64), 0),
        (memoryview(bytearray(64))[::2], 4),
    ],
)
async def test_memory_that_cannot_be_registered(ends: Ends, memory: Any, block_bytes: int) -> None:
    with pytest.raises(RequestError):
        await ends.ours.register(memory, block_bytes=block_bytes)


async def test_memory_of_a_device_that_the_backend_cannot_move_is_refused(ends: Ends) -> None:
    device = DeviceMemory(address=4096, length=4096, device=99, synchronize=lambda: None)
    with pytest.raises(TrinamoError, match=r"not of a device|registering 4096 bytes"):
        await ends.ours.register(device, block_bytes=4096)


async def test_a_description_says_what_was_registered(ends: Ends) -> None:
    described = decode_description(ends.owned.describe())
    assert described == ends.owned.description == ends.remote.description
    assert described.backend == ends.theirs.backend
    assert described.incarnation == ends.theirs.incarnation != ends.ours.incarnation
    assert (described.block_count, described.block_bytes) == (BLOCKS, BLOCK_BYTES)
    assert described.fingerprint == "pages"
    assert described.generation == 1


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"{}",
        bytes(DESCRIPTION_BYTES_MAX + 1),
        b"\x91" * 5000,
        random.Random(1).randbytes(300),
    ],
)
async def test_garbage_is_no_description(ends: Ends, garbage: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        await ends.ours.connect(garbage)


@pytest.mark.parametrize(
    "wrong",
    [
        {"backend": "else"},
        {"backend": ""},
        {"incarnation": "A B"},
        {"generation": 0},
        {"length": 0},
        {"length": BLOCK_BYTES + 1},
        {"block_bytes": 0},
        {"bases": (2**63 - 1,)},
        {"bases": (4096,) * 7},
        {"bases": (4096,) * 1025},
        {"parts": 0},
        {"parts": 7},
        {"version": 1},
    ],
)
async def test_a_description_out_of_bounds_is_refused(ends: Ends, wrong: dict[str, Any]) -> None:
    fields = msgspec.structs.asdict(ends.owned.description) | wrong
    with pytest.raises(RemoteProtocolError):
        await ends.ours.connect(msgspec.msgpack.encode(fields))


async def test_cut_off_descriptions_are_refused(ends: Ends) -> None:
    described = ends.owned.describe()
    for length in range(0, len(described), 7):
        with pytest.raises(RemoteProtocolError):
            await ends.ours.connect(described[:length])


async def test_another_incarnation_is_not_taken_for_the_one_described(ends: Ends) -> None:
    described = msgspec.structs.replace(ends.owned.description, incarnation="0" * 16)
    with pytest.raises((StaleMemoryError, ConnectError, RemoteProtocolError)):
        await ends.ours.connect(encode_description(described))
    await ends.move(READ, [1], [2])
