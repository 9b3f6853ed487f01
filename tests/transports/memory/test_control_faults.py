"""What tests and the simulator can do to the memory control plane, on virtual time."""

from __future__ import annotations

import pytest
import trio

from trinamo.runtime.errors import ConnectError, UnknownOutcomeError
from trinamo.runtime.planes import Delete, Put, Resync, Snapshot
from trinamo.transports.memory.control import ControlFaults, MemoryControlPlane
from trinamo.transports.memory.store import MemoryStore


async def test_a_lost_reply_is_an_unknown_outcome_of_a_write_that_happened() -> None:
    plane = MemoryControlPlane()
    plane.faults.lose_replies(2)
    with pytest.raises(UnknownOutcomeError) as caught:
        await plane.compare_and_put("a", b"1", mod_revision=0)
    assert not caught.value.definite
    with pytest.raises(UnknownOutcomeError):
        await plane.delete("b")
    assert not (await plane.compare_and_put("a", b"2", mod_revision=0)).succeeded


async def test_an_outage_of_one_plane_leaves_the_other_alone() -> None:
    store = MemoryStore()
    cut, whole = MemoryControlPlane(store), MemoryControlPlane(store)
    with cut.faults.outage():
        with pytest.raises(ConnectError):
            await cut.get("a")
        await whole.put("a", b"1")
    assert await cut.get("a") is not None


async def test_a_watch_is_told_after_the_outage(autojump_clock: trio.abc.Clock) -> None:
    store = MemoryStore()
    plane, other = MemoryControlPlane(store), MemoryControlPlane(store)
    async with plane.watch("") as events:
        assert isinstance(await anext(events), Snapshot)
        plane.faults.cut_link()
        await other.put("a", b"1")
        with trio.move_on_after(5) as scope:
            await anext(events)
        assert scope.cancelled_caught
        plane.faults.mend_link()
        assert isinstance(await anext(events), Put)


async def test_a_delay_is_virtual_and_cancelled_before_the_effect(
    autojump_clock: trio.abc.Clock,
) -> None:
    faults = ControlFaults()
    plane = MemoryControlPlane(faults=faults)
    faults.delay_s = 10
    with trio.move_on_after(5):
        await plane.put("a", b"1")
    faults.delay_s = 0
    assert await plane.get("a") is None


async def test_a_write_cancelled_while_its_reply_travels_has_happened(
    autojump_clock: trio.abc.Clock,
) -> None:
    plane = MemoryControlPlane()
    plane.faults.reply_delay_s = 10
    with trio.move_on_after(5):
        await plane.put("a", b"1")
    plane.faults.reply_delay_s = 0
    assert await plane.get("a") is not None


async def test_a_watcher_alone_sees_a_lease_expire_on_time(autojump_clock: trio.abc.Clock) -> None:
    """No task and no other call lets the time pass."""
    plane = MemoryControlPlane()
    async with plane.watch("") as events:
        await anext(events)
        lease = await plane.grant_lease(7)
        started = trio.current_time()
        await plane.put("a", b"1", lease_id=lease.id)
        await anext(events)
        assert isinstance(await anext(events), Delete)
        assert trio.current_time() - started == 7


async def test_a_watcher_asleep_wakes_for_a_lease_granted_later(
    autojump_clock: trio.abc.Clock,
) -> None:
    plane = MemoryControlPlane()
    async with plane.watch("") as events, trio.open_nursery() as nursery:
        await anext(events)
        long = await plane.grant_lease(1000)
        await plane.put("long", b"1", lease_id=long.id)
        await anext(events)

        async def grant_later() -> None:
            await trio.sleep(5)
            short = await plane.grant_lease(2)
            await plane.put("short", b"1", lease_id=short.id)

        nursery.start_soon(grant_later)
        started = trio.current_time()
        await anext(events)
        assert isinstance(await anext(events), Delete)
        assert trio.current_time() - started == 7


async def test_a_watcher_behind_a_bounded_history_is_resynced() -> None:
    plane = MemoryControlPlane(MemoryStore(history_max=10))
    async with plane.watch("") as events:
        await anext(events)
        for number in range(100):
            await plane.put(f"{number % 3}", b"%d" % number)
        event = await anext(events)
        assert isinstance(event, Resync)
        assert [entry.value for entry in event.entries] == [b"99", b"97", b"98"]


async def test_a_halted_store_stalls_watches_until_it_restarts(
    autojump_clock: trio.abc.Clock,
) -> None:
    plane = MemoryControlPlane()
    lease = await plane.grant_lease(5)
    await plane.put("a", b"1", lease_id=lease.id)
    async with plane.watch("") as events:
        await anext(events)
        plane.store.halt()
        with trio.move_on_after(60) as scope:
            await anext(events)
        assert scope.cancelled_caught
        restarted = trio.current_time()
        plane.store.restart(now=restarted)
        assert isinstance(await anext(events), Delete)
        assert trio.current_time() - restarted == 5
