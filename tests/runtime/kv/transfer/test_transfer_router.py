"""A chain of backends moves every block or says why not, and loses nothing on the way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
import trio.testing

from tests.runtime.kv.transfer.routers import (
    BLOCKS,
    FAULTY,
    READ,
    SIZE,
    WRITE,
    Clock,
    House,
    open_house,
)
from trinamo.runtime.errors import (
    ConnectError,
    DeadlineError,
    RemoteProtocolError,
    RequestError,
    StaleMemoryError,
    TransferError,
)
from trinamo.runtime.protocol.transfer.description import (
    Direction,
    decode_descriptions,
    encode_descriptions,
)
from trinamo.transports.memory.transfer import TransferFaults


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with open_house() as found:
        yield found


@pytest.mark.parametrize("direction", Direction)
async def test_the_first_backend_of_the_chain_moves_the_blocks(
    house: House, autojump_clock: Clock, direction: Direction
) -> None:
    assert house.peer.usable == ["fast", "slow"]
    assert await house.move(direction) == ["fast"]
    assert (
        house.metrics.value("trinamo_transfer_fallbacks_total", **{"from": "fast", "to": "slow"})
        == 0
    )
    assert house.metrics.value(
        "trinamo_transfer_bytes_total", backend="fast", direction=direction
    ) == len(house.here)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("faults", FAULTY, ids=lambda faults: next(iter(faults)))
async def test_a_transfer_falls_back_in_the_middle_and_every_block_arrives(
    house: House, autojump_clock: Clock, direction: Direction, faults: dict[str, int]
) -> None:
    for name, value in faults.items():
        setattr(house.fast.mover.faults, name, value)
    assert await house.move(direction, notify=b"done") == ["slow"]
    # What was confirmed before the fault is not moved again.
    moved = house.metrics.value("trinamo_transfer_bytes_total", backend="slow", direction=direction)
    assert moved == (BLOCKS - (0 if "is_unreachable" in faults else 5)) * SIZE
    assert (
        house.metrics.value("trinamo_transfer_fallbacks_total", **{"from": "fast", "to": "slow"})
        == 1
    )
    assert house.peer.usable == ["slow"]
    assert house.heard == [b"done"]
    await house.leases.drain()
    assert house.pool.used_count == BLOCKS


async def test_a_caller_s_own_deadline_says_nothing_about_a_backend(
    house: House, autojump_clock: Clock
) -> None:
    """The next caller still tries the first backend first, and nobody probes it."""
    house.fast.mover.faults.stalls_after = 5
    with pytest.raises(DeadlineError):
        await house.move(READ, deadline_s=0.2)
    assert house.peer.usable == ["fast", "slow"]
    house.fast.mover.faults.stalls_after = None
    assert await house.move(READ) == ["fast"]


async def test_a_caller_s_deadline_while_connecting_says_nothing_either(
    house: House, autojump_clock: Clock
) -> None:
    async def never(_: bytes) -> Any:
        await trio.sleep_forever()

    for route in house.peer.routes:
        route._remote = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(house.fast, "connect", never)
        with pytest.raises(DeadlineError):
            await house.move(READ, deadline_s=0.2)
    assert house.peer.usable == ["fast", "slow"]


async def test_a_backend_that_stands_still_for_long_has_failed_though_nothing_is_left_to_try(
    house: House, autojump_clock: Clock
) -> None:
    house.slow.mover.faults.is_unreachable = True
    with trio.move_on_after(1):
        await house.router.probe(house.peer)
    house.fast.mover.faults.stalls_after = 5
    with pytest.raises(DeadlineError):
        await house.move(READ, deadline_s=30)
    assert house.peer.usable == []


@pytest.mark.parametrize("deadline_s", [0.2, 1.0, 12.0])
async def test_a_move_keeps_its_deadline_and_leaves_its_blocks_leased_until_they_settle(
    house: House, autojump_clock: Clock, deadline_s: float
) -> None:
    """What it left is drained elsewhere: here it goes on landing for a while."""
    house.fast.mover.faults.stalls_after = 2
    house.fast.mover.faults.lands_late = True
    house.fast.mover.faults.block_s = 0.3
    started_at = trio.current_time()
    with pytest.raises((DeadlineError, TransferError)):
        await house.move(WRITE, deadline_s=deadline_s)
    assert trio.current_time() - started_at <= deadline_s + 0.001
    assert house.pool.in_flight_count == BLOCKS
    await trio.sleep(200)
    assert (house.pool.in_flight_count, house.pool.quarantined_count) == (0, 0)
    house.fast.mover.faults = TransferFaults()
    assert await house.move(WRITE) == ["fast"]


async def test_a_peer_that_could_not_be_connected_to_leaves_nothing_behind(
    house: House, autojump_clock: Clock
) -> None:
    """No task that probes it for ever, no series, no peer in the statistics."""
    await house.router.forget(house.peer)
    await trio.testing.wait_all_tasks_blocked()
    tasks = trio.lowlevel.current_statistics().tasks_living
    house.fast.mover.faults.is_unreachable = house.slow.mover.faults.is_unreachable = True
    for _ in range(3):
        with pytest.raises(ConnectError):
            await house.router.connect(house.owned.describe())
    await trio.sleep(100)
    assert trio.lowlevel.current_statistics().tasks_living == tasks
    assert house.router.statistics().peers == 0
    for backend, region in house.owned.regions.items():
        labels = {"backend": backend, "peer": region.description.incarnation}
        name = "trinamo_transfer_backend_usable"
        assert house.registry.get_sample_value(name, labels) is None


async def test_the_statistics_show_a_switch_and_its_reason(
    house: House, autojump_clock: Clock
) -> None:
    before = house.router.statistics()
    assert [(b.backend, b.peers, b.usable_peers, b.problem) for b in before.chain] == [
        ("fast", 1, 1, ""),
        ("slow", 1, 1, ""),
    ]
    house.fast.mover.faults.breaks_after = 5
    await house.move(READ)
    after = house.router.statistics()
    assert (after.peers, after.fallbacks) == (1, 1)
    fast, slow = after.chain
    assert (fast.usable_peers, slow.usable_peers) == (0, 1)
    assert fast.problem
    assert not slow.problem
    house.slow.mover.faults.block_s = 1
    async with trio.open_nursery() as nursery:
        nursery.start_soon(house.move, READ)
        await trio.sleep(1.5)
        assert [b.in_flight for b in house.router.statistics().chain] == [0, 1]
        assert house.router.statistics().leased == 1
    assert [b.in_flight for b in house.router.statistics().chain] == [0, 0]


async def test_a_backend_that_failed_is_left_alone_until_a_probe_says_it_works(
    house: House,
    autojump_clock: Clock,
) -> None:
    house.fast.mover.faults.is_unreachable = True
    assert await house.move(READ) == ["slow"]
    assert await house.move(READ) == ["slow"]
    assert (
        house.metrics.value(
            "trinamo_transfer_attempts_total", backend="fast", direction="read", outcome="connect"
        )
        == 1
    )
    house.fast.mover.faults.is_unreachable = False
    await trio.sleep(11)
    assert house.peer.usable == ["fast", "slow"]
    assert await house.move(READ) == ["fast"]


async def test_a_backend_that_does_not_work_at_the_start_is_not_used(
    house: House, autojump_clock: Clock
) -> None:
    house.fast.mover.faults.is_unreachable = True
    house.peer = await house.router.connect(house.owned.describe())
    assert house.peer.usable == ["slow"]
    assert await house.move(WRITE) == ["slow"]


async def hanging(_: Any) -> None:
    await trio.sleep_forever()


@pytest.mark.parametrize(
    ("hangs", "works", "waits_s"), [("slow", "fast", 0.0), ("fast", "slow", 0.5)]
)
async def test_the_first_transfer_waits_for_no_backend_that_hangs(
    house: House, autojump_clock: Clock, hangs: str, works: str, waits_s: float
) -> None:
    """Not for one behind the one that answers, and for one before it a head start; it is tried on."""
    await house.router.forget(house.peer)
    plane = getattr(house, hangs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plane, "probe", hanging)
        began = trio.current_time()
        house.peer = await house.router.connect(house.owned.describe())
        assert trio.current_time() - began == pytest.approx(waits_s)
        assert house.peer.usable == [works]
        assert await house.move(READ) == [works]
        # The probes behind its back are bounded, and leave it alone in between, as others do.
        await trio.sleep(3)
        (problem,) = (e.problem for e in house.router.statistics().chain if e.backend == hangs)
        assert problem == "no answer within 2 s"
    await trio.sleep(10)
    assert house.peer.usable == ["fast", "slow"]
    assert await house.move(READ) == ["fast"]


async def test_a_backend_that_answers_late_is_used_as_soon_as_it_does(
    house: House, autojump_clock: Clock
) -> None:
    await house.router.forget(house.peer)
    probe, begun = house.fast.probe, []

    async def late(remote: Any) -> None:
        begun.append(trio.current_time())
        await trio.sleep(1)
        await probe(remote)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(house.fast, "probe", late)
        house.peer = await house.router.connect(house.owned.describe())
        assert house.peer.usable == ["slow"]
        await trio.sleep(1.1)
        assert house.peer.usable == ["fast", "slow"]
        await trio.sleep(20)
    assert len(begun) == 2
    assert trio.current_time() - begun[1] == pytest.approx(21.1)


async def test_no_backend_that_reaches_the_peer_is_an_error(
    house: House, autojump_clock: Clock
) -> None:
    house.fast.mover.faults.is_unreachable = house.slow.mover.faults.is_unreachable = True
    with pytest.raises(ConnectError, match="no backend reaches the peer"):
        await house.router.connect(house.owned.describe())
    with pytest.raises(ConnectError):
        await house.move(READ)


async def test_the_last_backend_s_error_is_raised_and_nothing_is_reported(
    house: House, autojump_clock: Clock
) -> None:
    house.fast.mover.faults.breaks_after = 3
    house.slow.mover.faults.corrupts = 3
    with pytest.raises(TransferError):
        await house.move(READ)
    await house.leases.drain()
    assert house.pool.used_count == BLOCKS
    assert house.metrics.value("nixl_error_rate", backend="fast") == 1


async def test_what_every_backend_would_refuse_is_not_tried_again(
    house: House, autojump_clock: Clock
) -> None:
    for plane in (house.fast, house.slow):
        plane.mover.faults.block_s = 1
    for region in house.owned.regions.values():
        region.renew()
    with pytest.raises(StaleMemoryError):
        await house.move(READ)
    with pytest.raises(RequestError):
        await house.router.move(READ, house.local, [BLOCKS], house.peer, [0], deadline_s=5)
    assert house.peer.usable == ["fast", "slow"]


async def test_a_transfer_that_still_moves_is_not_given_up_for_its_length(
    house: House, autojump_clock: Clock
) -> None:
    """Three seconds a block: much longer than `attempt_s`, but never long without a block."""
    house.fast.mover.faults.block_s = 3
    assert await house.move(READ, deadline_s=100) == ["fast"]
    house.fast.mover.faults.stalls_after = 5
    started = trio.current_time()
    assert await house.move(READ, deadline_s=100) == ["slow"]
    assert trio.current_time() - started < 5 * 3 + 10 + 10


async def test_a_deadline_holds_over_all_backends(house: House, autojump_clock: Clock) -> None:
    house.fast.mover.faults.stalls_after = house.slow.mover.faults.stalls_after = 1
    started = trio.current_time()
    with pytest.raises(DeadlineError):
        await house.move(READ, deadline_s=25)
    assert trio.current_time() - started <= 25


async def test_blocks_still_touched_by_a_failed_attempt_are_not_moved_by_another_one(
    house: House,
    autojump_clock: Clock,
) -> None:
    """Late bytes of the first backend could overwrite what the second one has brought."""
    house.fast.mover.faults.stalls_after = 5
    house.fast.mover.faults.lands_late = True
    house.fast.mover.faults.block_s = 2
    with pytest.raises(TransferError, match="has not settled"):
        await house.move(READ, deadline_s=100)
    assert house.pool.in_flight_count == BLOCKS


async def test_a_cancelled_move_is_drained_behind_the_caller_s_back(
    house: House, autojump_clock: Clock
) -> None:
    house.fast.mover.faults.block_s = 1
    house.fast.mover.faults.lands_late = True
    with trio.move_on_after(3.5):
        await house.move(READ)
    assert house.pool.in_flight_count == BLOCKS
    before = bytes(house.here)
    await trio.sleep(2)
    assert bytes(house.here) != before, "bytes land late, so the blocks must be leased"
    house.pool.give_back(range(BLOCKS))
    assert house.pool.free_count == 0
    with trio.move_on_after(60):
        await house.leases.drain()
    assert house.pool.free_count + house.pool.quarantined_count == BLOCKS


async def test_a_peer_that_was_forgotten_is_not_probed_any_more(
    house: House, autojump_clock: Clock
) -> None:
    await house.router.forget(house.peer)
    with pytest.raises(ConnectError):
        await house.move(READ)
    await trio.sleep(100)
    assert house.peer.usable == []


async def test_an_offer_is_checked(house: House, autojump_clock: Clock) -> None:
    other = await house.fast.register(bytearray(64), block_bytes=32)
    different = encode_descriptions([house.owned.describe()[:40], b"x"])
    for garbage in (b"", b"\x90", b"\xc1", different, bytes(2 << 20), encode_descriptions([])):
        with pytest.raises(RemoteProtocolError):
            await house.router.connect(garbage)
    mixed = encode_descriptions(
        [*decode_descriptions(house.owned.describe()).values(), other.describe()]
    )
    with pytest.raises(RemoteProtocolError, match="different shapes"):
        await house.router.connect(mixed)


async def test_grants_hold_on_every_backend(house: House, autojump_clock: Clock) -> None:
    for region in house.owned.regions.values():
        region.renew()
    with pytest.raises(StaleMemoryError):
        await house.move(READ)
