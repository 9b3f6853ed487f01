"""Memory of a device is synchronised before blocks move and before they are confirmed.

No GPU is needed: the memory is this process's own, registered as a device's, and only the word
that names the kind of memory to the library is changed. All else is the real path: the plane, its
thread, the library.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import trio

from tests import needs
from trinamo.runtime.errors import TransferError
from trinamo.runtime.planes import DeviceMemory, MemoryRegion, Transfer, TransferPlane
from trinamo.runtime.protocol.transfer.description import Direction
from trinamo.transports.nixl.agent import Agent
from trinamo.transports.nixl.options import NixlOptions
from trinamo.transports.nixl.plane import open_nixl_plane

needs.NIXL.imported()

SIZE, BLOCKS, CHUNK = 4096, 12, 5
ALL = range(BLOCKS)


class Device:
    """Host memory that passes for a device's, and what was done with it, in order."""

    def __init__(self, seed: int) -> None:
        self.memory = bytearray(random.Random(seed).randbytes(BLOCKS * SIZE))
        self.done: list[str | int] = []
        self._anchor = ctypes.c_char.from_buffer(self.memory)

    def as_memory(self, synchronize: Callable[[], None]) -> DeviceMemory:
        address = ctypes.addressof(self._anchor)
        return DeviceMemory(
            address=address, length=len(self.memory), device=0, synchronize=synchronize
        )


@pytest.fixture(autouse=True)
def host_memory_for_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agent, "_segment", lambda agent, _: agent._library.DRAM_SEG)


@pytest.fixture
async def planes() -> AsyncIterator[tuple[TransferPlane, TransferPlane]]:
    options = NixlOptions(chunk_bytes=CHUNK * SIZE)
    async with open_nixl_plane(options) as ours, open_nixl_plane(options) as theirs:
        yield ours, theirs


def record_moves(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Note how many blocks each call of the library moves; looks at pages are of one item."""
    post = Agent.post

    def noting(agent: Agent, direction: Direction, local: tuple, remote: tuple) -> int | None:  # type: ignore[type-arg]
        if len(local[1]) > 1:
            device.done.append(len(local[1]))
        return post(agent, direction, local, remote)

    monkeypatch.setattr(Agent, "post", noting)


@pytest.mark.parametrize("direction", Direction)
async def test_a_device_is_synchronised_before_each_chunk_moves_and_before_it_is_confirmed(
    planes: tuple[TransferPlane, TransferPlane],
    direction: Direction,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = planes
    device, peer = Device(1), bytearray(random.Random(2).randbytes(BLOCKS * SIZE))
    confirmed: list[int] = []
    started: list[Transfer] = []

    def synchronize() -> None:
        device.done.append("synchronised")
        confirmed.append(started[0].confirmed_count if started else 0)

    local = await ours.register(device.as_memory(synchronize), block_bytes=SIZE)
    owned = await theirs.register(peer, block_bytes=SIZE)
    remote = await ours.connect(owned.describe())
    record_moves(device, monkeypatch)

    started.append(ours.start(direction, local, ALL, remote, ALL, deadline_s=10))
    report = await started[0].wait()

    assert report.block_count == BLOCKS
    assert device.memory == peer
    assert device.done == [
        "synchronised",
        *(CHUNK, "synchronised"),
        *(CHUNK, "synchronised"),
        *(BLOCKS - 2 * CHUNK, "synchronised"),
    ]
    # What a chunk brought is confirmed only after the synchronisation that follows it.
    assert confirmed == [0, 0, CHUNK, 2 * CHUNK]


@pytest.mark.parametrize("fails_at", [0, 1, 3])
async def test_a_device_that_fails_ends_the_transfer_unconfirmed_and_nothing_else(
    planes: tuple[TransferPlane, TransferPlane], fails_at: int
) -> None:
    """The error of the device is the transfer's; blocks it may not have taken are not confirmed."""
    ours, theirs = planes
    device, calls = Device(1), 0

    def synchronize() -> None:
        nonlocal calls
        calls += 1
        if calls == fails_at + 1:
            raise OSError("an illegal memory access was encountered")

    local: MemoryRegion = await ours.register(device.as_memory(synchronize), block_bytes=SIZE)
    owned = await theirs.register(bytearray(BLOCKS * SIZE), block_bytes=SIZE, needs_ticket=True)
    heard: list[bytes] = []
    owned.grant(5, ALL, heard.append)
    remote = await ours.connect(owned.describe())
    of_grant: dict[str, Any] = {"deadline_s": 10, "ticket": 5}

    transfer = ours.start(Direction.READ, local, ALL, remote, ALL, notify=b"never said", **of_grant)
    with pytest.raises(TransferError, match="illegal memory access"):
        await transfer.wait()
    assert transfer.confirmed_count == max(0, fails_at - 1) * CHUNK
    with trio.fail_after(120):
        await transfer.wait_settled()

    await ours.start(Direction.READ, local, ALL, remote, ALL, notify=b"said", **of_grant).wait()
    with trio.fail_after(120):
        while not heard:
            await trio.sleep(0.005)
    assert heard == [b"said"]
    assert not any(device.memory)


async def test_a_block_of_a_device_is_never_moved_on_the_event_loop(
    planes: tuple[TransferPlane, TransferPlane],
) -> None:
    """Small transfers may begin there, but to synchronise a device may take as long as it likes."""
    ours, theirs = planes
    device, loop = Device(1), trio.lowlevel.current_trio_token()
    where: list[bool] = []

    def synchronize() -> None:
        try:
            where.append(trio.lowlevel.current_trio_token() is loop)
        except RuntimeError:
            where.append(False)

    local = await ours.register(device.as_memory(synchronize), block_bytes=SIZE)
    owned = await theirs.register(bytearray(BLOCKS * SIZE), block_bytes=SIZE)
    remote = await ours.connect(owned.describe())
    await ours.start(Direction.READ, local, [3], remote, [3], deadline_s=10).wait()

    assert where == [False, False]
