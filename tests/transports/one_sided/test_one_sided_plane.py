"""What the plane over a backend promises whatever the library does: its memory outlives its transfers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from trinamo.runtime.errors import StaleMemoryError, TransferError
from trinamo.runtime.planes import TransferPlane
from trinamo.runtime.protocol.transfer.access_page import TransferDone, encode_completion
from trinamo.runtime.protocol.transfer.description import Direction
from trinamo.transports.one_sided.memory import Memory, OneSidedRemote
from trinamo.transports.one_sided.mover import PROBES_MAX, OneSidedMover, open_one_sided_plane
from trinamo.transports.one_sided.steps import Backend, BackendJob

Clock = trio.testing.MockClock
SIZE, BLOCKS = 64, 4


class Library(Backend):
    """A backend whose library never finishes by itself."""

    name = "library"

    def __init__(self) -> None:
        super().__init__("nowhere", PROBES_MAX + 2)
        self.registered: dict[int, Memory] = {}
        self.jobs: list[BackendJob] = []
        self.problem: TransferError | None = None

    async def start(self) -> None:
        await trio.lowlevel.checkpoint()

    async def close(self) -> bool:
        await trio.lowlevel.checkpoint()
        return bool(self.registered)

    def address(self) -> bytes:
        return b"here"

    async def register(self, memory: Memory) -> None:
        await trio.lowlevel.checkpoint()
        self.registered[memory.address] = memory

    async def deregister(self, memory: Memory) -> None:
        await trio.lowlevel.checkpoint()
        if self.problem is not None:
            raise self.problem
        del self.registered[memory.address]

    async def connect(self, remote: OneSidedRemote) -> None:
        await trio.lowlevel.checkpoint()

    async def forget(self, incarnation: str) -> None:
        await trio.sleep_forever()

    def submit(self, job: BackendJob) -> None:
        self.jobs.append(job)


@attrs.frozen
class House:
    """A plane with one region, and a peer's that the library moves blocks of for ever."""

    library: Library
    plane: TransferPlane[OneSidedMover]
    memory: bytearray
    region: Any
    remote: OneSidedRemote

    def start(self) -> Any:
        return self.plane.start(
            Direction.READ, self.region, [0, 1], self.remote, [0, 1], deadline_s=9
        )

    def is_registered(self) -> bool:
        return self.region.description.bases[0] in self.library.registered


@pytest.fixture
async def house() -> AsyncIterator[House]:
    library = Library()
    async with open_one_sided_plane(
        library, incarnation="aa", connect_timeout_s=1, drain_s=2, chunk_bytes=SIZE
    ) as plane:
        memory = bytearray(SIZE * BLOCKS)
        region = await plane.register(memory, block_bytes=SIZE, needs_ticket=True)
        described = region.description
        remote = OneSidedRemote(
            description=described,
            memory=Memory(addresses=described.bases, length=described.length),
            page=4096,
            address=b"there",
        )
        yield House(library, plane, memory, region, remote)


def let_go(memory: bytearray) -> bool:
    """Whether nothing holds the buffer in its place any more."""
    try:
        memory.append(0)
    except BufferError:
        return False
    return True


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_memory_of_an_unsettled_transfer_stays_registered_and_in_place_until_it_settles(
    house: House, autojump_clock: Clock, is_cancelled: bool
) -> None:
    """The library goes on writing there, whoever has lost patience."""
    transfer = house.start()
    with trio.move_on_after(1 if is_cancelled else 10) as scope:
        await house.plane.deregister(house.region)
    assert scope.cancelled_caught is is_cancelled
    with pytest.raises(StaleMemoryError):
        await transfer.wait()
    await trio.sleep(600)
    assert not transfer.is_settled
    assert house.is_registered()
    assert not let_go(house.memory)
    house.library.jobs[-1].finish(None)
    await trio.sleep(1)
    assert transfer.is_settled
    assert not house.is_registered()
    assert let_go(house.memory)


async def test_memory_that_the_library_does_not_give_back_is_kept(
    house: House, autojump_clock: Clock
) -> None:
    house.library.problem = TransferError("no")
    await house.plane.deregister(house.region)
    assert not let_go(house.memory)


async def test_memory_that_nothing_moves_is_given_back_at_once(
    house: House, autojump_clock: Clock
) -> None:
    before = trio.current_time()
    await house.plane.deregister(house.region)
    assert trio.current_time() == before
    assert not house.is_registered()
    assert let_go(house.memory)


async def test_a_library_that_does_not_forget_a_peer_keeps_nobody_waiting(
    house: House, autojump_clock: Clock
) -> None:
    before = trio.current_time()
    await house.plane.forget("bb")
    assert trio.current_time() - before <= 4


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"done",
        bytes(20),
        bytes(5000),
        encode_completion(TransferDone(1, 6, b"done")),
        encode_completion(TransferDone(1, 0, b"done")),
        encode_completion(TransferDone(2, 5, b"done")),
        encode_completion(TransferDone(2**63, 5, b"done")),
    ],
)
async def test_what_shows_no_ticket_of_a_grant_completes_none_and_is_counted(
    house: House, said: bytes
) -> None:
    heard: list[bytes] = []
    house.region.grant(5, [0], heard.append)
    house.library.on_told("somebody", said)
    assert (heard, house.plane.mover.refused_count) == ([], 1)
    house.library.on_told("whoever", encode_completion(TransferDone(1, 5, b"true")))
    assert (heard, house.plane.mover.refused_count) == ([b"true"], 1)
    house.region.revoke(5)
    house.library.on_told("whoever", encode_completion(TransferDone(1, 5, b"again")))
    assert (heard, house.plane.mover.refused_count) == ([b"true"], 2)
