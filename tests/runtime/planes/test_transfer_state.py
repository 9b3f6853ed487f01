"""What every transfer is, whatever moves its blocks: one outcome, told to everybody who asks."""

from __future__ import annotations

import pytest
import trio

from trinamo.runtime.errors import (
    DisconnectedError,
    KilledError,
    RequestError,
    StaleMemoryError,
)
from trinamo.runtime.planes import RemoteMemory, Transfer
from trinamo.runtime.planes.regions import HostRegion
from trinamo.runtime.protocol.transfer.description import (
    Direction,
    MemoryDescription,
    decode_description,
)


def region(blocks: int = 4) -> HostRegion:
    return region_of(bytearray(4 * blocks))


def region_of(memory: bytearray) -> HostRegion:
    described = MemoryDescription(
        backend="memory",
        incarnation="i",
        region=1,
        generation=1,
        fingerprint="",
        length=4,
        block_bytes=4,
    )
    return HostRegion(memory, described, needs_ticket=True)


def transfer_of(
    direction: Direction,
    local: HostRegion,
    here: list[int],
    there: list[int],
    notify: bytes | None = None,
) -> Transfer:
    return Transfer(
        direction=direction,
        local=local,
        local_blocks=here,
        remote=RemoteMemory(region(8).description),
        remote_blocks=there,
        deadline_s=1,
        notify=notify,
        backend="memory",
        path="memory",
    )


def started() -> Transfer:
    transfer = transfer_of(Direction.READ, region(), [0], [0])
    transfer.begin()
    return transfer


async def test_the_first_outcome_stays_and_everybody_hears_it() -> None:
    """Each waiter gets an error of its own: one that is raised twice grows two tracebacks."""
    transfer = started()
    heard: list[BaseException] = []

    async def listen() -> None:
        with pytest.raises(DisconnectedError, match="gone") as found:
            await transfer.wait()
        heard.append(found.value)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        nursery.start_soon(listen)
        await trio.testing.wait_all_tasks_blocked()
        transfer.fail(DisconnectedError("the peer is gone"))
        transfer.abort()
        transfer.succeed(is_verified=True)

    assert heard[0] is not heard[1]


async def test_what_is_done_cannot_be_aborted() -> None:
    transfer = started()
    transfer.succeed(is_verified=True)
    transfer.abort()
    report = await transfer.wait()
    assert (report.block_count, report.byte_count, report.is_verified) == (1, 4, True)
    assert (report.backend, report.path) == ("memory", "memory")


async def test_an_abort_says_why() -> None:
    transfer = started()
    transfer.abort()
    with pytest.raises(KilledError) as found:
        await transfer.wait()
    assert found.value.reason == "aborted"


async def test_over_is_not_yet_settled() -> None:
    transfer = started()
    transfer.let_go = lambda: False
    transfer.abort()
    await transfer.wait_over()
    assert not transfer.is_settled
    transfer.settle()
    await transfer.wait_settled()


def test_a_plan_keeps_the_lists_it_was_given_and_counts_them() -> None:
    local, blocks = region(), [2, 0]
    plan = transfer_of(Direction.WRITE, local, blocks, [7, 6])
    blocks.clear()
    assert (plan.local_blocks, plan.block_count, plan.byte_count) == ((2, 0), 2, 8)


@pytest.mark.parametrize(
    ("direction", "here", "there"),
    [
        (Direction.READ, [0], [0, 1]),
        (Direction.READ, [4], [0]),
        (Direction.WRITE, [0], [8]),
        (Direction.READ, [1, 1], [0, 1]),
        (Direction.WRITE, [0, 1], [1, 1]),
    ],
)
def test_a_plan_that_names_wrong_blocks_is_refused(
    direction: Direction, here: list[int], there: list[int]
) -> None:
    with pytest.raises(RequestError):
        transfer_of(direction, region(), here, there)


def test_a_withdrawn_region_is_in_no_plan() -> None:
    local = region()
    local.withdraw()
    with pytest.raises(StaleMemoryError):
        transfer_of(Direction.READ, local, [], [])


def test_a_region_describes_its_generation_as_it_is_now() -> None:
    memory = region()
    before = memory.description
    assert memory.description is before
    assert memory.renew() == 2
    assert decode_description(memory.describe()).generation == 2


@pytest.mark.parametrize("length", [8, 9, 11])
def test_a_tail_shorter_than_a_block_is_left_out(length: int) -> None:
    assert region_of(bytearray(length)).views[0].nbytes == 8


def test_a_notification_without_a_ticket_is_in_no_plan() -> None:
    with pytest.raises(RequestError, match="needs its ticket"):
        transfer_of(Direction.READ, region(), [0], [0], notify=b"done")
