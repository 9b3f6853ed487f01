"""After many transfers, aborted ones among them, and after peers have died, nothing is left."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import attrs
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
from tests.needs import needs_library_of
from tests.transports.memory_owner import BACKENDS as PROCESS_BACKENDS, open_backend
from tests.transports.owner_process import connect, running_owner, strike_at
from trinamo.runtime.errors import KilledError, TrinamoError
from trinamo.runtime.protocol.transfer.description import Direction

TRANSFERS = 200
ROUNDS_MAX = 5
GROWTH_BYTES_MAX = 8 << 20
"""What allocators may keep. A buffer left behind by each transfer would be six times as much, in
every round: one round that grows less proves that none is. More of it once is the process around
the test, such as an arena that a thread of a library has been given."""
SOCKETS_KEPT = 4
"""Of each peer that died: Mooncake's pool of connections never closes them."""


@attrs.frozen
class Census:
    """What this process holds."""

    tasks: int
    threads: int
    descriptors: int
    objects: int
    """Of our own classes: trio's heap of deadlines forgets what is over only now and then."""
    memory_bytes: int

    @classmethod
    def take(cls) -> Census:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        return cls(
            tasks=trio.lowlevel.current_statistics().tasks_living,
            threads=threading.active_count(),
            descriptors=len(list(Path("/proc/self/fd").iterdir())),
            objects=sum(
                str(type(each).__module__).startswith("trinamo.") for each in gc.get_objects()
            ),
            memory_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        )


@pytest.fixture(autouse=True)
async def bounded() -> AsyncIterator[None]:
    with trio.fail_after(120):
        yield


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
async def test_two_hundred_transfers_of_which_many_are_aborted_leave_nothing(
    backend: TransferBackend,
) -> None:
    here, there = Pages(1), Pages(2)
    blocks = list(range(BLOCKS))
    async with backend.open_planes() as (ours, theirs):
        local = await ours.register(here.memory, block_bytes=BLOCK_BYTES)
        owned = await theirs.register(there.memory, block_bytes=BLOCK_BYTES)
        remote = await ours.connect(owned.describe())

        async def move(number: int) -> None:
            direction = Direction.READ if number % 2 else Direction.WRITE
            transfer = ours.start(direction, local, blocks, remote, blocks, deadline_s=30)
            if number % 4 > 1:
                for _ in range(number % 7):
                    await trio.lowlevel.checkpoint()
                transfer.abort()
            # One that was over when it was aborted is done.
            with suppress(KilledError):
                await transfer.wait()
            await transfer.wait_settled()

        async def settled_census() -> Census:
            await ours.probe(remote)
            await trio.testing.wait_all_tasks_blocked(0.01)
            return Census.take()

        for number in range(60):
            await move(number)
        found = [await settled_census()]
        growths: list[int] = []
        while len(growths) < ROUNDS_MAX and min(growths, default=1 << 60) >= GROWTH_BYTES_MAX:
            for number in range(TRANSFERS):
                await move(number)
            found.append(await settled_census())
            growths.append(found[-1].memory_bytes - found[-2].memory_bytes)
    before, after = found[0], found[-1]
    assert after.tasks == before.tasks
    # Fewer, where something that an earlier test has closed was still on its way out.
    assert after.threads <= before.threads
    assert after.descriptors <= before.descriptors
    assert after.objects <= before.objects + 5
    assert min(growths) < GROWTH_BYTES_MAX, growths


@pytest.mark.parametrize("backend", PROCESS_BACKENDS)
async def test_peers_that_died_in_the_middle_leave_no_descriptor_task_or_thread(
    backend: str,
) -> None:
    needs_library_of(backend)
    async with open_backend(backend) as plane:

        async def lose_a_peer() -> Census:
            with running_owner(backend) as owner:
                mover = await connect(plane, owner)
                struck = await strike_at(
                    mover, owner, Direction.READ, 0.5, signal.SIGKILL, deadline_s=20
                )
                with pytest.raises(TrinamoError):
                    await struck.transfer.wait()
                await struck.transfer.wait_settled()
            await plane.forget(mover.remote.description.incarnation)
            await plane.deregister(mover.region)
            await trio.testing.wait_all_tasks_blocked(0.05)
            return Census.take()

        # The first one makes what is made once, such as the pool of worker threads.
        before = await lose_a_peer()
        found = [await lose_a_peer() for _ in range(3)]
    assert [each.tasks for each in found] == [before.tasks] * 3
    assert found[-1].threads <= before.threads
    kept = SOCKETS_KEPT * len(found) if backend == "mooncake tcp" else 0
    assert found[-1].descriptors <= before.descriptors + kept
