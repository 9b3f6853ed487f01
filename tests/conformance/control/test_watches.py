"""Watches, the same on every control plane: snapshot, every change, nothing lost."""

from __future__ import annotations

import threading

import pytest
import trio

from tests.conformance.control.backends import Backend, until
from tests.conformance.control.watched import EVERY_BYTE, _put_all, key_of, take, take_one
from trinamo.runtime.planes import Delete, Entry, Put, Resync, Snapshot

# --- watches ---------------------------------------------------------------------------------


async def test_a_watch_gives_the_snapshot_then_every_change_in_order(
    backend: Backend, prefix: str
) -> None:
    async with backend.open_plane() as plane, backend.open_plane() as other:
        await other.put(prefix + "b", b"1")
        await other.put(prefix + "a", b"1")
        async with plane.watch(prefix) as events:
            first = await take_one(events)
            assert isinstance(first, Snapshot)
            assert [e.key for e in first.entries] == [prefix + "a", prefix + "b"]
            revision = await other.put(prefix + "c", EVERY_BYTE)
            await other.put(prefix.removesuffix("/") + "-not-ours", b"1")
            await other.delete(prefix + "b")
            await other.put(prefix + "c", b"2")
            put, deleted, changed = await take(events, 3)
            assert put == Put(Entry(prefix + "c", EVERY_BYTE, revision, revision))
            assert isinstance(deleted, Delete)
            assert deleted.key == prefix + "b"
            assert isinstance(changed, Put)
            assert revision < deleted.revision < changed.entry.mod_revision


async def test_no_change_falls_between_snapshot_and_stream(backend: Backend, prefix: str) -> None:
    """Watches that start amid a burst of writes each see every write exactly once."""
    async with backend.open_plane() as plane, trio.open_nursery() as nursery:

        async def write() -> None:
            for number in range(60):
                await plane.put(f"{prefix}{number:03}", b"1")
                await trio.sleep(0.001)

        async def watch(started: int) -> None:
            await trio.sleep(started * 0.01)
            seen: list[str] = []
            async with plane.watch(prefix) as events:
                with trio.fail_after(15):
                    while len(seen) < 60:
                        event = await anext(events)
                        if isinstance(event, Snapshot | Resync):
                            seen.extend(entry.key for entry in event.entries)
                        else:
                            seen.append(key_of(event))
            assert seen == [f"{prefix}{number:03}" for number in range(60)]

        nursery.start_soon(write)
        for started in range(8):
            nursery.start_soon(watch, started)


async def test_a_deleted_prefix_is_one_revision_of_many_deletes(
    backend: Backend, prefix: str
) -> None:
    async with backend.open_plane() as plane:
        for name in ("a", "b", "c"):
            await plane.put(prefix + name, b"1")
        async with plane.watch(prefix) as events:
            await take(events)
            await plane.delete_prefix(prefix)
            deletes = [e for e in await take(events, 3) if isinstance(e, Delete)]
            assert [e.key for e in deletes] == [prefix + name for name in ("a", "b", "c")]
            assert len({e.revision for e in deletes}) == 1


async def test_many_watches_at_once_each_get_everything(backend: Backend, prefix: str) -> None:
    async with backend.open_plane() as plane, trio.open_nursery() as nursery:
        ready = 0
        finished = []

        async def watch() -> None:
            nonlocal ready
            async with plane.watch(prefix) as events:
                await take(events)
                ready += 1
                finished.append([key_of(e) for e in await take(events, 10)])  # type: ignore[arg-type]

        for _ in range(100):
            nursery.start_soon(watch)
        await until(lambda: ready == 100)
        for number in range(10):
            await plane.put(f"{prefix}{number}", b"1")
    assert finished == [[f"{prefix}{number}" for number in range(10)]] * 100


@pytest.mark.slow
async def test_a_reader_that_is_slow_loses_nothing_and_holds_up_nobody(
    backend: Backend, prefix: str
) -> None:
    """The lagging watch is fed again once it reads; the other gets every change meanwhile."""
    count = 3000
    async with (
        backend.open_plane() as plane,
        plane.watch(prefix) as slow,
        plane.watch(prefix) as quick,
    ):
        await take(slow)
        await take(quick)

        async def write(start: int) -> None:
            for number in range(start, count, 30):
                await plane.put(f"{prefix}{number}", b"1")

        async with trio.open_nursery() as nursery:
            for start in range(30):
                nursery.start_soon(write, start)
            expected = await take(quick, count)
        assert await take(slow, count) == expected
    assert {key_of(e) for e in expected} == {f"{prefix}{n}" for n in range(count)}  # type: ignore[arg-type]


async def test_a_receive_that_is_cancelled_loses_no_event(backend: Backend, prefix: str) -> None:
    seen: list[str] = []
    async with backend.open_plane() as plane, plane.watch(prefix) as events:
        await take(events)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_put_all, plane, [f"{prefix}{number:03}" for number in range(50)])
            with trio.fail_after(15):
                while len(seen) < 50:
                    with trio.move_on_after(0.001):
                        seen.append(key_of(await anext(events)))  # type: ignore[arg-type]
    assert seen == [f"{prefix}{number:03}" for number in range(50)]


async def test_cancelled_watches_leave_nothing_behind(backend: Backend, prefix: str) -> None:
    async with backend.open_plane() as plane:
        async with plane.watch(prefix) as events:
            await take(events)
        await plane.keep_alive((await plane.grant_lease(30)).id)
        threads = threading.active_count()
        tasks = trio.lowlevel.current_statistics().tasks_living
        for number in range(50):
            with trio.move_on_after(0.002 * (number % 5)):
                async with plane.watch(prefix) as events:
                    async for _ in events:
                        pass
        await until(lambda: threading.active_count() <= threads)
        await until(lambda: trio.lowlevel.current_statistics().tasks_living <= tasks)
        assert await plane.get(prefix) is None
    before = threading.active_count()
    async with backend.open_plane() as plane, plane.watch(prefix) as events:
        await take(events)
        await plane.keep_alive((await plane.grant_lease(30)).id)
    await until(lambda: threading.active_count() <= before)


async def test_two_watches_of_one_plane_are_independent(backend: Backend, prefix: str) -> None:
    async with backend.open_plane() as plane, plane.watch(prefix + "a/") as kept:
        await take(kept)
        async with plane.watch(prefix + "b/") as closed:
            await take(closed)
        await plane.put(prefix + "b/1", b"1")
        await plane.put(prefix + "a/1", b"1")
        assert key_of(await take_one(kept)) == prefix + "a/1"  # type: ignore[arg-type]
