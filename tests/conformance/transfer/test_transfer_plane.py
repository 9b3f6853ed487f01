"""What every transfer plane must do, whatever moves the bytes."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import attrs
import msgspec
import pytest
import trio
import trio.testing

from tests.conformance.transfer.backends import (
    BACKENDS,
    BLOCK_BYTES,
    BLOCKS,
    Pages,
    TransferBackend,
)
from trinamo.runtime.errors import (
    ConnectError,
    DisconnectedError,
    KilledError,
    RemoteProtocolError,
    RequestError,
    StaleMemoryError,
    TransportError,
    TrinamoError,
)
from trinamo.runtime.planes import DeviceMemory, MemoryRegion, RemoteMemory, Transfer, TransferPlane
from trinamo.runtime.protocol.transfer.description import (
    DESCRIPTION_BYTES_MAX,
    NOTIFY_BYTES_MAX,
    Direction,
    MemoryDescription,
    decode_description,
    encode_description,
)

READ, WRITE = Direction.READ, Direction.WRITE
DEADLINE_S = 20.0


@attrs.frozen
class Ends:
    """Two planes, a region of each, and the first one connected to the second's."""

    backend: TransferBackend
    ours: TransferPlane
    theirs: TransferPlane
    here: Pages
    there: Pages
    local: MemoryRegion
    owned: MemoryRegion
    remote: RemoteMemory

    def start(
        self, direction: Direction, here: list[int], there: list[int], **more: Any
    ) -> Transfer:
        more.setdefault("deadline_s", DEADLINE_S)
        return self.ours.start(direction, self.local, here, self.remote, there, **more)

    async def move(
        self, direction: Direction, here: list[int], there: list[int], **more: Any
    ) -> None:
        """Move and expect what must be where afterwards."""
        for a, b in zip(here, there, strict=True):
            if direction is READ:
                self.here.expect(a, self.there.block(b))
            else:
                self.there.expect(b, self.here.block(a))
        transfer = self.start(direction, here, there, **more)
        report = await transfer.wait()
        assert transfer.is_settled
        assert transfer.confirmed_count == report.block_count == len(here)
        assert report.byte_count == len(here) * self.local.description.block_bytes
        assert report.direction is direction
        assert report.backend == self.ours.backend
        assert report.is_verified is self.backend.is_verified
        self.check()

    def check(self) -> None:
        assert self.here.memory == self.here.expected
        assert self.there.memory == self.there.expected


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    backend: TransferBackend = request.param
    here, there = Pages(1), Pages(2)
    async with backend.open_planes() as (ours, theirs):
        local = await ours.register(here.memory, block_bytes=BLOCK_BYTES, fingerprint="pages")
        owned = await theirs.register(there.memory, block_bytes=BLOCK_BYTES, fingerprint="pages")
        remote = await ours.connect(owned.describe())
        yield Ends(backend, ours, theirs, here, there, local, owned, remote)


@pytest.fixture(autouse=True)
async def bounded() -> AsyncIterator[None]:
    """No test waits for ever."""
    with trio.fail_after(30):
        yield


def scattered(count: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(BLOCKS), count)


# --- moving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("count", [1, 2, 37, BLOCKS])
async def test_scattered_blocks_arrive_where_they_should(
    ends: Ends, direction: Direction, count: int
) -> None:
    await ends.move(direction, scattered(count, 3), scattered(count, 4))


@pytest.mark.parametrize("direction", Direction)
async def test_neighbours_on_one_side_only_arrive_where_they_should(
    ends: Ends, direction: Direction
) -> None:
    await ends.move(direction, [5, 6, 7, 8, 9], [20, 21, 40, 41, 3])
    await ends.move(direction, [12, 11, 10], [0, 1, 2])
    await ends.move(direction, list(range(BLOCKS)), list(range(BLOCKS)))


def shapes(count: int) -> dict[str, tuple[list[int], list[int]]]:
    """Lists of all blocks, by how they lie on the two sides."""
    row, mixed = list(range(count)), random.Random(11).sample(range(count), count)
    return {
        "a row each": (row, row),
        "a row here": (row, mixed),
        "a row there": (mixed, row),
        "backwards": (row[::-1], row),
        "every other one": (row[::2] + row[1::2], mixed),
    }


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("block_bytes", [1, 8, 1000, 1024, 1025, 16384, 1 << 20])
@pytest.mark.slow
async def test_blocks_of_any_size_move_however_they_lie(
    ends: Ends, direction: Direction, block_bytes: int
) -> None:
    """Thousands of small ones too: neither their sums nor their addresses are too many."""
    count = max(3, min(2500 if block_bytes in {1, 1025} else 300, (3 << 20) // block_bytes))
    here, there = (Pages(seed, count, block_bytes) for seed in (1, 2))
    local = await ends.ours.register(here.memory, block_bytes=block_bytes)
    owned = await ends.theirs.register(there.memory, block_bytes=block_bytes)
    remote = await ends.ours.connect(owned.describe())
    for name, (ours, theirs) in shapes(count).items():
        if direction is READ:
            for a, b in zip(ours, theirs, strict=True):
                here.expect(a, there.block(b))
        else:
            for a, b in zip(ours, theirs, strict=True):
                there.expect(b, here.block(a))
        await ends.ours.start(direction, local, ours, remote, theirs, deadline_s=DEADLINE_S).wait()
        assert here.memory == here.expected, name
        assert there.memory == there.expected, name
        target = here if direction is READ else there
        target.memory[:] = target.expected[:] = random.Random(name).randbytes(len(target.memory))


@pytest.mark.parametrize("direction", Direction)
async def test_no_blocks_are_moved_at_once(ends: Ends, direction: Direction) -> None:
    await ends.move(direction, [], [])


@pytest.mark.parametrize("direction", Direction)
async def test_transfers_side_by_side_do_not_mix(ends: Ends, direction: Direction) -> None:
    pairs = list(zip(scattered(BLOCKS, 5), scattered(BLOCKS, 6), strict=True))
    async with trio.open_nursery() as nursery:
        for start in range(0, BLOCKS, 8):
            part = pairs[start : start + 8]
            for a, b in part:
                if direction is READ:
                    ends.here.expect(a, ends.there.block(b))
                else:
                    ends.there.expect(b, ends.here.block(a))
            transfer = ends.start(direction, [a for a, _ in part], [b for _, b in part])
            nursery.start_soon(transfer.wait)
    ends.check()


async def test_one_block_may_be_sent_to_many_places(ends: Ends) -> None:
    await ends.move(WRITE, [7, 7, 7], [1, 2, 3])
    await ends.move(READ, [1, 2, 3], [9, 9, 9])


async def test_both_sides_may_start_transfers(ends: Ends) -> None:
    back = await ends.theirs.connect(ends.local.describe())
    ends.there.expect(4, ends.here.block(5))
    await ends.theirs.start(READ, ends.owned, [4], back, [5], deadline_s=DEADLINE_S).wait()
    ends.check()
    await ends.move(WRITE, [1], [2])


async def test_a_tail_shorter_than_a_block_is_left_out(ends: Ends) -> None:
    memory = bytearray(10 * 100 + 7)
    region = await ends.ours.register(memory, block_bytes=100)
    assert region.description.block_count == 10


# --- notifications ---------------------------------------------------------------------------------


@attrs.frozen
class Granted:
    """A region of the peer's whose blocks are granted to tickets, and what was heard of each."""

    ends: Ends
    owned: MemoryRegion
    remote: RemoteMemory
    heard: list[bytes]

    async def move(self, direction: Direction, blocks: list[int], **more: Any) -> None:
        await self.ends.ours.start(
            direction,
            self.ends.local,
            blocks,
            self.remote,
            blocks,
            **{"deadline_s": DEADLINE_S, "ticket": 77, **more},
        ).wait()

    async def hears(self, *messages: bytes) -> bool:
        """Whether these have been told, and no others; one-sided backends look now and then."""
        with trio.move_on_after(2 if messages else 0.05):
            while len(self.heard) < max(1, len(messages)):
                await trio.sleep(0.005)
        return self.heard == list(messages)


@pytest.fixture
async def granted(ends: Ends) -> Granted:
    owned = await ends.theirs.register(
        Pages(9).memory, block_bytes=BLOCK_BYTES, fingerprint="pages", needs_ticket=True
    )
    heard: list[bytes] = []
    owned.grant(77, [1, 2, 3], heard.append)
    owned.grant(78, [4, 5])
    return Granted(ends, owned, await ends.ours.connect(owned.describe()), heard)


@pytest.mark.parametrize("direction", Direction)
async def test_who_granted_blocks_is_told_when_and_only_when_the_transfer_is_done(
    granted: Granted, direction: Direction
) -> None:
    await granted.move(direction, [1, 2])
    for number in range(3):
        await granted.move(direction, [1 + number], notify=b"done %d" % number)
    assert await granted.hears(b"done 0", b"done 1", b"done 2")


@pytest.mark.parametrize("direction", Direction)
async def test_a_grant_is_completed_by_its_own_ticket_only(
    granted: Granted, direction: Direction
) -> None:
    """Not by another one, none, or one that was revoked; not without blocks either."""
    await granted.move(direction, [4], ticket=78, notify=b"of another grant")
    for ticket in (0, 79):
        for blocks in ([1], []):
            with pytest.raises((StaleMemoryError, RequestError)):
                await granted.move(direction, blocks, ticket=ticket, notify=b"forged")
    granted.owned.revoke(77)
    with pytest.raises(StaleMemoryError):
        await granted.move(direction, [], notify=b"too late")
    assert await granted.hears()


async def test_a_failed_transfer_tells_nobody(granted: Granted) -> None:
    granted.owned.renew()
    with pytest.raises(StaleMemoryError):
        await granted.move(WRITE, [1], notify=b"never")
    assert await granted.hears()


# --- refusing --------------------------------------------------------------------------------------


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


# --- descriptions ----------------------------------------------------------------------------------


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
        {"base": 2**63 - 1},
        {"version": 2},
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


# --- ending ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", Direction)
async def test_an_aborted_transfer_settles_and_says_so(ends: Ends, direction: Direction) -> None:
    transfer = ends.start(direction, scattered(60, 7), scattered(60, 8))
    transfer.abort()
    with pytest.raises(KilledError):
        await transfer.wait()
    if ends.backend.settles_at_once:
        assert transfer.is_settled
    await transfer.wait_settled()
    transfer.abort()
    await ends.ours.probe(ends.remote)
    ends.here.expected[:], ends.there.expected[:] = ends.here.memory, ends.there.memory
    await ends.move(direction, [3], [4])


@pytest.mark.parametrize("direction", Direction)
async def test_nothing_lands_after_an_aborted_transfer_has_settled(
    ends: Ends, direction: Direction
) -> None:
    for turns in range(12):
        transfer = ends.start(direction, list(range(BLOCKS)), list(range(BLOCKS)))
        for _ in range(turns):
            await trio.lowlevel.checkpoint()
        transfer.abort()
        await transfer.wait_settled()
        target = ends.here if direction is READ else ends.there
        if direction is READ:
            # Ours again: whatever we write there now must stay.
            target.memory[:] = bytes(len(target.memory))
        await ends.ours.probe(ends.remote)
        await trio.testing.wait_all_tasks_blocked(0.001)
        if direction is READ:
            assert not any(target.memory)


async def test_a_waiter_that_is_cancelled_leaves_the_transfer_alone(ends: Ends) -> None:
    here, there = scattered(50, 9), scattered(50, 10)
    for a, b in zip(here, there, strict=True):
        ends.here.expect(a, ends.there.block(b))
    transfer = ends.start(READ, here, there)
    with trio.CancelScope() as scope:
        scope.cancel()
        await transfer.wait()
    await transfer.wait()
    assert await transfer.wait() == await transfer.wait()
    ends.check()


async def test_a_forgotten_peer_s_transfers_fail_and_settle(ends: Ends) -> None:
    transfer = ends.start(READ, list(range(BLOCKS)), list(range(BLOCKS)))
    await ends.ours.forget(ends.theirs.incarnation)
    with pytest.raises((DisconnectedError, ConnectError)):
        await transfer.wait()
    assert transfer.is_settled
    await ends.ours.forget(ends.theirs.incarnation)
    await ends.ours.forget("unknown")


async def test_a_peer_that_was_forgotten_may_be_connected_again(ends: Ends) -> None:
    await ends.ours.forget(ends.theirs.incarnation)
    remote = await ends.ours.connect(ends.owned.describe())
    ends.here.expect(3, ends.there.block(4))
    await ends.ours.start(READ, ends.local, [3], remote, [4], deadline_s=DEADLINE_S).wait()
    ends.check()


async def test_a_probe_answers_while_the_peer_lives(ends: Ends) -> None:
    await ends.ours.probe(ends.remote)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
async def test_a_plane_that_is_closed_is_not_reached(backend: TransferBackend) -> None:
    async with backend.open_planes() as (_, theirs):
        region = await theirs.register(bytearray(8192), block_bytes=4096)
        described = region.describe()
    async with backend.open_planes() as (ours, _):
        with pytest.raises(TransportError):
            await ours.probe(await ours.connect(described))


async def test_a_description_survives_its_bytes(ends: Ends) -> None:
    described: MemoryDescription = ends.owned.description
    assert decode_description(encode_description(described)) == described
