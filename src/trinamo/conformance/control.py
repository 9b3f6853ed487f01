"""What every control plane must do, whatever carries it.

Read `histories.py` next: random histories, held to the control plane in memory.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, TypeVar

import pytest
import trio
from pytest_trio import trio_fixture

from trinamo.runtime.errors import ControlPlaneError, LeaseLostError
from trinamo.runtime.planes import (
    ControlPlane,
    Delete,
    Entry,
    Put,
    PutOutcome,
    Resync,
    Snapshot,
    WatchEvent,
)
from trinamo.transports.memory.control import MemoryControlPlane

from .histories import History

F = TypeVar("F", bound=Callable[..., Any])
async_fixture: Callable[[F], F] = trio_fixture
"""It has no types of its own."""
OpenControl = Callable[[], AbstractAsyncContextManager[ControlPlane]]
EVERY_BYTE: Final = bytes(range(256))
_numbers: Final = itertools.count(1)


def fresh_prefix() -> str:
    """A prefix of keys that no other test of this process uses, on whatever server."""
    return f"test-{next(_numbers)}/"


def key_of(event: WatchEvent) -> str:
    """The key that a change is about."""
    assert isinstance(event, Put | Delete)
    return event.entry.key if isinstance(event, Put) else event.key


async def take(events: AsyncIterator[WatchEvent], count: int = 1) -> list[WatchEvent]:
    """The next `count` events; fails if they do not come."""
    with trio.fail_after(120):
        return [await anext(events) for _ in range(count)]


async def take_one(events: AsyncIterator[WatchEvent]) -> WatchEvent:
    """The next event."""
    return (await take(events))[0]


async def until(condition: Callable[[], bool], *, timeout_s: float = 120) -> None:
    """Poll, because a real server tells nobody when it is done."""
    with trio.fail_after(timeout_s):
        while not condition():  # noqa: ASYNC110 -- nobody sets an event
            await trio.sleep(0.002)


async def put_all(plane: ControlPlane, names: Iterable[str]) -> None:
    """Write each of the keys, one after the other."""
    for name in names:
        await plane.put(name, b"x")


@pytest.mark.trio
class ControlPlaneConformance:
    """What every `ControlPlane` promises; `open_plane` opens one more over the same store."""

    @pytest.fixture
    def prefix(self) -> str:
        """Prefix of this test's keys in a store that other tests use too."""
        return fresh_prefix()

    @pytest.fixture
    def value_bytes_max(self) -> int:
        """Bytes of a value that must fit; fewer for a plane that adds bytes of its own."""
        return 1 << 20

    @async_fixture
    async def plane(self, open_plane: OpenControl) -> AsyncIterator[ControlPlane]:
        """One process's plane."""
        async with open_plane() as plane:
            yield plane

    @async_fixture
    async def other(self, open_plane: OpenControl) -> AsyncIterator[ControlPlane]:
        """Another process's plane over the same store."""
        async with open_plane() as plane:
            yield plane

    async def test_a_key_never_written_is_none(self, plane: ControlPlane, prefix: str) -> None:
        assert await plane.get(prefix + "nothing") is None

    async def test_what_is_put_is_got_with_every_byte(
        self, plane: ControlPlane, prefix: str
    ) -> None:
        revision = await plane.put(prefix + "a", EVERY_BYTE)
        assert await plane.get(prefix + "a") == Entry(prefix + "a", EVERY_BYTE, revision, revision)

    async def test_an_empty_value_is_a_value(self, plane: ControlPlane, prefix: str) -> None:
        await plane.put(prefix + "a", b"")
        entry = await plane.get(prefix + "a")
        assert entry is not None
        assert entry.value == b""

    async def test_keys_may_be_any_text(self, plane: ControlPlane, prefix: str) -> None:
        """Order is that of code points, which UTF-8 keeps."""
        names = [prefix + name for name in ("a b", "a/b", "\u00e9", "\u6a21\u578b", "\U0001f600")]
        for name in reversed(names):
            await plane.put(name, name.encode())
        assert {e.key: e.value for e in (await plane.range(prefix)).entries} == {
            name: name.encode() for name in names
        }
        assert [e.key for e in (await plane.range(prefix)).entries] == sorted(names)

    async def test_two_planes_see_the_same_data(
        self, plane: ControlPlane, other: ControlPlane, prefix: str
    ) -> None:
        await plane.put(prefix + "a", b"1")
        entry = await other.get(prefix + "a")
        assert entry is not None
        assert entry.value == b"1"

    async def test_revisions_grow_with_every_write(self, plane: ControlPlane, prefix: str) -> None:
        first = await plane.put(prefix + "a", b"1")
        second = await plane.put(prefix + "b", b"1")
        third = await plane.put(prefix + "a", b"2")
        assert first < second < third
        entry = await plane.get(prefix + "a")
        assert entry is not None
        assert (entry.create_revision, entry.mod_revision) == (first, third)
        assert (await plane.range(prefix)).revision >= third

    async def test_a_range_holds_what_starts_with_the_prefix(
        self, plane: ControlPlane, prefix: str
    ) -> None:
        """A prefix that ends in a slash is exact about segments; one that does not is plain text."""
        for name in ("b", "a/2", "a/10", "ab/1", "a", "a0"):
            await plane.put(prefix + name, b"x")
        assert [e.key for e in (await plane.range(prefix + "a/")).entries] == [
            prefix + "a/10",
            prefix + "a/2",
        ]
        assert [e.key.removeprefix(prefix) for e in (await plane.range(prefix + "a")).entries] == [
            "a",
            "a/10",
            "a/2",
            "a0",
            "ab/1",
        ]
        assert (await plane.range(prefix + "zz")).entries in ((), [])

    async def test_a_large_range_is_complete(self, plane: ControlPlane, prefix: str) -> None:
        """More keys than any transport would put into one answer."""
        names = [f"{prefix}{number:04}" for number in range(700)]
        async with trio.open_nursery() as nursery:
            for start in range(0, len(names), 50):
                nursery.start_soon(put_all, plane, names[start : start + 50])
        assert [e.key for e in (await plane.range(prefix)).entries] == names

    async def test_delete_says_whether_the_key_was_there(
        self, plane: ControlPlane, prefix: str
    ) -> None:
        await plane.put(prefix + "a", b"1")
        await plane.put(prefix + "ab", b"1")
        assert await plane.delete(prefix + "a") is True
        assert await plane.delete(prefix + "a") is False
        assert [e.key for e in (await plane.range(prefix)).entries] == [prefix + "ab"]

    async def test_delete_prefix_counts_and_spares_the_rest(
        self, plane: ControlPlane, prefix: str
    ) -> None:
        for name in ("a/1", "a/2", "b/1"):
            await plane.put(prefix + name, b"x")
        assert await plane.delete_prefix(prefix + "a/") == 2
        assert await plane.delete_prefix(prefix + "a/") == 0
        assert [e.key for e in (await plane.range(prefix)).entries] == [prefix + "b/1"]

    async def test_a_guarded_put_takes_effect_only_on_the_revision_it_names(
        self, plane: ControlPlane, prefix: str
    ) -> None:
        key = prefix + "a"
        created = await plane.compare_and_put(key, b"1", mod_revision=0)
        assert created.succeeded
        again = await plane.compare_and_put(key, b"2", mod_revision=0)
        assert not again.succeeded
        assert again.revision >= created.revision
        changed = await plane.compare_and_put(key, b"3", mod_revision=created.revision)
        assert changed == PutOutcome(succeeded=True, revision=changed.revision)
        stale = await plane.compare_and_put(key, b"4", mod_revision=created.revision)
        assert not stale.succeeded
        entry = await plane.get(key)
        assert entry is not None
        assert (entry.value, entry.mod_revision) == (b"3", changed.revision)

    async def test_of_many_guarded_creates_one_succeeds(
        self, plane: ControlPlane, prefix: str
    ) -> None:
        outcomes = []
        async with trio.open_nursery() as nursery:

            async def create(value: bytes) -> None:
                outcomes.append(await plane.compare_and_put(prefix + "a", value, mod_revision=0))

            for number in range(20):
                nursery.start_soon(create, b"%d" % number)
        assert sum(outcome.succeeded for outcome in outcomes) == 1

    async def test_an_oversize_value_is_refused_and_not_written(
        self, plane: ControlPlane, prefix: str, value_bytes_max: int
    ) -> None:
        await plane.put(prefix + "fits", bytes(value_bytes_max))
        for write in (
            lambda: plane.put(prefix + "a", bytes((1 << 20) + 1)),
            lambda: plane.compare_and_put(prefix + "a", bytes((1 << 20) + 1), mod_revision=0),
        ):
            with pytest.raises(ControlPlaneError) as caught:
                await write()
            assert caught.value.definite
        assert await plane.get(prefix + "a") is None

    async def test_an_empty_key_is_refused(self, plane: ControlPlane) -> None:
        with pytest.raises(ControlPlaneError) as caught:
            await plane.put("", b"1")
        assert caught.value.definite

    async def test_health_is_one_line(self, plane: ControlPlane) -> None:
        line = await plane.check_health()
        assert line
        assert "\n" not in line

    async def test_keys_die_with_an_expired_lease_and_live_while_it_is_kept(
        self, plane: ControlPlane, prefix: str
    ) -> None:
        async with plane.watch(prefix) as events:
            await take(events)
            kept = await plane.grant_lease(5)
            left = await plane.grant_lease(5)
            assert kept.ttl_s >= 5
            await plane.put(prefix + "kept", b"1", lease_id=kept.id)
            for name in ("left/1", "left/2"):
                await plane.put(prefix + name, b"1", lease_id=left.id)
            await take(events, 3)
            deletes: list[WatchEvent] = []
            with trio.fail_after(120):
                while len(deletes) < 2:
                    assert 0 < await plane.keep_alive(kept.id) <= kept.ttl_s
                    with trio.move_on_after(0.4):
                        deletes.append(await anext(events))
            assert [event.key for event in deletes if isinstance(event, Delete)] == [
                prefix + "left/1",
                prefix + "left/2",
            ]
            assert len({event.revision for event in deletes if isinstance(event, Delete)}) == 1
            assert [e.key for e in (await plane.range(prefix)).entries] == [prefix + "kept"]
            with pytest.raises(LeaseLostError):
                await plane.keep_alive(left.id)

    async def test_revoking_a_lease_deletes_its_keys_at_once(
        self, plane: ControlPlane, prefix: str
    ) -> None:
        lease = await plane.grant_lease(60)
        await plane.put(prefix + "a", b"1", lease_id=lease.id)
        entry = await plane.get(prefix + "a")
        assert entry is not None
        assert entry.lease_id == lease.id
        await plane.revoke_lease(lease.id)
        assert await plane.get(prefix + "a") is None
        with pytest.raises(LeaseLostError):
            await plane.keep_alive(lease.id)
        await plane.revoke_lease(lease.id)

    async def test_a_put_without_its_lease_outlives_it(
        self, plane: ControlPlane, prefix: str
    ) -> None:
        lease = await plane.grant_lease(60)
        await plane.put(prefix + "a", b"1", lease_id=lease.id)
        await plane.put(prefix + "a", b"2")
        await plane.revoke_lease(lease.id)
        entry = await plane.get(prefix + "a")
        assert entry is not None
        assert (entry.value, entry.lease_id) == (b"2", 0)

    async def test_writes_under_an_unknown_lease_are_lease_lost(
        self, plane: ControlPlane, prefix: str
    ) -> None:
        lease = await plane.grant_lease(60)
        await plane.revoke_lease(lease.id)
        with pytest.raises(LeaseLostError) as caught:
            await plane.put(prefix + "a", b"1", lease_id=lease.id)
        assert caught.value.definite
        with pytest.raises(LeaseLostError):
            await plane.compare_and_put(prefix + "a", b"1", mod_revision=0, lease_id=lease.id)
        assert await plane.get(prefix + "a") is None

    async def test_many_leases_are_kept_alive_at_once(self, plane: ControlPlane) -> None:
        leases = [await plane.grant_lease(30) for _ in range(20)]
        kept = []

        async def keep(lease_id: int) -> None:
            kept.append(await plane.keep_alive(lease_id))

        async with trio.open_nursery() as nursery:
            for lease in leases:
                nursery.start_soon(keep, lease.id)
                nursery.start_soon(keep, lease.id)
        assert len(kept) == 40
        assert all(seconds > 0 for seconds in kept)
        for lease in leases:
            await plane.revoke_lease(lease.id)

    async def test_an_impossible_lease_is_refused(self, plane: ControlPlane) -> None:
        for ttl_s in (0, -1, float("nan"), float("inf")):
            with pytest.raises(ControlPlaneError):
                await plane.grant_lease(ttl_s)

    @pytest.mark.parametrize("seed", range(5))
    async def test_a_random_history_is_the_same_as_in_memory(
        self, open_plane: OpenControl, prefix: str, seed: int
    ) -> None:
        """Results, errors, watched events and the order of revisions: what the simulator relies on."""
        model = History(MemoryControlPlane(), prefix, seed)
        await model.run(150)
        async with open_plane() as plane:
            real = History(plane, prefix, seed)
            await real.run(150)
        assert real.ranked() == model.ranked()

    async def test_a_watch_gives_the_snapshot_then_every_change_in_order(
        self, plane: ControlPlane, other: ControlPlane, prefix: str
    ) -> None:
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

    async def test_no_change_falls_between_snapshot_and_stream(
        self, plane: ControlPlane, prefix: str
    ) -> None:
        """Watches that start amid a burst of writes each see every write exactly once."""
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                for number in range(60):
                    await plane.put(f"{prefix}{number:03}", b"1")
                    await trio.sleep(0.001)

            async def watch(started: int) -> None:
                await trio.sleep(started * 0.01)
                seen: list[str] = []
                async with plane.watch(prefix) as events:
                    with trio.fail_after(120):
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
        self, plane: ControlPlane, prefix: str
    ) -> None:
        for name in ("a", "b", "c"):
            await plane.put(prefix + name, b"1")
        async with plane.watch(prefix) as events:
            await take(events)
            await plane.delete_prefix(prefix)
            deletes = [e for e in await take(events, 3) if isinstance(e, Delete)]
            assert [e.key for e in deletes] == [prefix + name for name in ("a", "b", "c")]
            assert len({e.revision for e in deletes}) == 1

    async def test_many_watches_at_once_each_get_everything(
        self, plane: ControlPlane, prefix: str
    ) -> None:
        async with trio.open_nursery() as nursery:
            ready = 0
            finished = []

            async def watch() -> None:
                nonlocal ready
                async with plane.watch(prefix) as events:
                    await take(events)
                    ready += 1
                    finished.append([key_of(e) for e in await take(events, 10)])

            for _ in range(100):
                nursery.start_soon(watch)
            await until(lambda: ready == 100)
            for number in range(10):
                await plane.put(f"{prefix}{number}", b"1")
        assert finished == [[f"{prefix}{number}" for number in range(10)]] * 100

    async def test_a_reader_that_is_slow_loses_nothing_and_holds_up_nobody(
        self, plane: ControlPlane, prefix: str
    ) -> None:
        """The lagging watch is fed again once it reads; the other gets every change meanwhile."""
        count = 3000
        async with plane.watch(prefix) as slow, plane.watch(prefix) as quick:
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
        assert {key_of(e) for e in expected} == {f"{prefix}{n}" for n in range(count)}

    async def test_a_receive_that_is_cancelled_loses_no_event(
        self, plane: ControlPlane, prefix: str
    ) -> None:
        seen: list[str] = []
        async with plane.watch(prefix) as events:
            await take(events)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(put_all, plane, [f"{prefix}{number:03}" for number in range(50)])
                with trio.fail_after(120):
                    while len(seen) < 50:
                        with trio.move_on_after(0.001):
                            seen.append(key_of(await anext(events)))
        assert seen == [f"{prefix}{number:03}" for number in range(50)]

    async def test_cancelled_watches_leave_nothing_behind(
        self, open_plane: OpenControl, prefix: str
    ) -> None:
        async with open_plane() as plane:
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
        async with open_plane() as plane, plane.watch(prefix) as events:
            await take(events)
            await plane.keep_alive((await plane.grant_lease(30)).id)
        await until(lambda: threading.active_count() <= before)

    async def test_two_watches_of_one_plane_are_independent(
        self, plane: ControlPlane, prefix: str
    ) -> None:
        async with plane.watch(prefix + "a/") as kept:
            await take(kept)
            async with plane.watch(prefix + "b/") as closed:
                await take(closed)
            await plane.put(prefix + "b/1", b"1")
            await plane.put(prefix + "a/1", b"1")
            assert key_of(await take_one(kept)) == prefix + "a/1"
