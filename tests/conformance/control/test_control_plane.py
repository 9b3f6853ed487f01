"""What every control plane must do, whatever carries it.

One body over every backend of `backends.py` and `etcd_members.py`. Real servers are
killed with SIGKILL, frozen with SIGSTOP and cut off by a proxy; memory does the same by its hooks.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.conformance.control.backends import (
    Backend,
    MemoryBackend,
    eventually,
    run_on_fitting_clock,
    until,
)
from tests.conformance.control.etcd_members import SYSTEM_ETCD, EtcdBackend
from tests.conformance.control.histories import History, normalised
from tests.conformance.simulated import SimulatedEtcdBackend
from tests.servers import session_etcd
from tests.session import needs
from tests.worlds import in_world
from trinamo.runtime.errors import (
    ConnectError,
    ControlPlaneError,
    LeaseLostError,
    TrinamoError,
)
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

on_fitting_clock = pytest.mark.trio(run=run_on_fitting_clock)

EVERY_BYTE = bytes(range(256))
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def system_etcd() -> Iterator[str]:
    """The endpoint of the distribution's own etcd, an older release, if it is installed."""
    if not SYSTEM_ETCD.exists():
        needs.SYSTEM_ETCD.lacking()
    with session_etcd(SYSTEM_ETCD) as server:
        yield server.endpoint


@pytest.fixture(
    params=[
        "memory",
        "simulated",
        pytest.param("etcd", marks=pytest.mark.services),
        pytest.param("system-etcd", marks=pytest.mark.services),
    ]
)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The implementation under test."""
    if request.param == "memory":
        yield MemoryBackend()
    elif request.param == "simulated":
        simulated = SimulatedEtcdBackend()
        with in_world(simulated.world):
            yield simulated
    elif request.param == "system-etcd":
        yield EtcdBackend(request.getfixturevalue("system_etcd"), binary=SYSTEM_ETCD)
    else:
        yield EtcdBackend(request.getfixturevalue("etcd_server").endpoint)


@pytest.fixture
def prefix() -> str:
    """Where this test's keys are, in a store that others use too."""
    return f"test-{next(_numbers)}/"


def key_of(event: Put | Delete) -> str:
    return event.entry.key if isinstance(event, Put) else event.key


async def take(events: AsyncIterator[WatchEvent], count: int = 1) -> list[WatchEvent]:
    """The next `count` events; fails if they do not come."""
    found: list[WatchEvent] = []
    with trio.fail_after(15):
        while len(found) < count:
            found.append(await anext(events))
    return found


async def take_one(events: AsyncIterator[WatchEvent]) -> WatchEvent:
    return (await take(events))[0]


def values(snapshot: Snapshot | Resync) -> dict[str, bytes]:
    return {entry.key: entry.value for entry in snapshot.entries}


# --- keys and values -------------------------------------------------------------------------


async def test_a_key_never_written_is_none(backend: Backend, prefix: str) -> None:
    async with backend.open_plane() as plane:
        assert await plane.get(prefix + "nothing") is None


async def test_what_is_put_is_got_with_every_byte(backend: Backend, prefix: str) -> None:
    async with backend.open_plane() as plane:
        revision = await plane.put(prefix + "a", EVERY_BYTE)
        assert await plane.get(prefix + "a") == Entry(prefix + "a", EVERY_BYTE, revision, revision)


async def test_an_empty_value_is_a_value(backend: Backend, prefix: str) -> None:
    async with backend.open_plane() as plane:
        await plane.put(prefix + "a", b"")
        entry = await plane.get(prefix + "a")
        assert entry is not None
        assert entry.value == b""


async def test_keys_may_be_any_text(backend: Backend, prefix: str) -> None:
    """Order is that of code points, which UTF-8 keeps."""
    names = [prefix + name for name in ("a b", "a/b", "\u00e9", "\u6a21\u578b", "\U0001f600")]
    async with backend.open_plane() as plane:
        for name in reversed(names):
            await plane.put(name, name.encode())
        assert values(await plane.range(prefix)) == {name: name.encode() for name in names}
        assert [e.key for e in (await plane.range(prefix)).entries] == sorted(names)


async def test_two_planes_see_the_same_data(backend: Backend, prefix: str) -> None:
    async with backend.open_plane() as one, backend.open_plane() as other:
        await one.put(prefix + "a", b"1")
        entry = await other.get(prefix + "a")
        assert entry is not None
        assert entry.value == b"1"


async def test_revisions_grow_with_every_write(backend: Backend, prefix: str) -> None:
    async with backend.open_plane() as plane:
        first = await plane.put(prefix + "a", b"1")
        second = await plane.put(prefix + "b", b"1")
        third = await plane.put(prefix + "a", b"2")
        assert first < second < third
        entry = await plane.get(prefix + "a")
        assert entry is not None
        assert (entry.create_revision, entry.mod_revision) == (first, third)
        assert (await plane.range(prefix)).revision >= third


async def test_a_range_holds_what_starts_with_the_prefix(backend: Backend, prefix: str) -> None:
    """A prefix that ends in a slash is exact about segments; one that does not is plain text."""
    async with backend.open_plane() as plane:
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


async def test_a_large_range_is_complete(backend: Backend, prefix: str) -> None:
    """More keys than any transport would put into one answer."""
    names = [f"{prefix}{number:04}" for number in range(700)]
    async with backend.open_plane() as plane:
        async with trio.open_nursery() as nursery:
            for part in _parts(names):
                nursery.start_soon(_put_all, plane, part)
        assert [e.key for e in (await plane.range(prefix)).entries] == names


def _parts(names: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(names), 50):
        yield names[start : start + 50]


async def _put_all(plane: ControlPlane, names: Any) -> None:
    for name in names:
        await plane.put(name, b"x")


async def test_delete_says_whether_the_key_was_there(backend: Backend, prefix: str) -> None:
    async with backend.open_plane() as plane:
        await plane.put(prefix + "a", b"1")
        await plane.put(prefix + "ab", b"1")
        assert await plane.delete(prefix + "a") is True
        assert await plane.delete(prefix + "a") is False
        assert [e.key for e in (await plane.range(prefix)).entries] == [prefix + "ab"]


async def test_delete_prefix_counts_and_spares_the_rest(backend: Backend, prefix: str) -> None:
    async with backend.open_plane() as plane:
        for name in ("a/1", "a/2", "b/1"):
            await plane.put(prefix + name, b"x")
        assert await plane.delete_prefix(prefix + "a/") == 2
        assert await plane.delete_prefix(prefix + "a/") == 0
        assert [e.key for e in (await plane.range(prefix)).entries] == [prefix + "b/1"]


async def test_a_guarded_put_takes_effect_only_on_the_revision_it_names(
    backend: Backend, prefix: str
) -> None:
    key = prefix + "a"
    async with backend.open_plane() as plane:
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


async def test_of_many_guarded_creates_one_succeeds(backend: Backend, prefix: str) -> None:
    outcomes = []
    async with backend.open_plane() as plane, trio.open_nursery() as nursery:

        async def create(value: bytes) -> None:
            outcomes.append(await plane.compare_and_put(prefix + "a", value, mod_revision=0))

        for number in range(20):
            nursery.start_soon(create, b"%d" % number)
    assert sum(outcome.succeeded for outcome in outcomes) == 1


async def test_an_oversize_value_is_refused_and_not_written(backend: Backend, prefix: str) -> None:
    async with backend.open_plane() as plane:
        await plane.put(prefix + "fits", bytes(1 << 20))
        for write in (
            lambda: plane.put(prefix + "a", bytes((1 << 20) + 1)),
            lambda: plane.compare_and_put(prefix + "a", bytes((1 << 20) + 1), mod_revision=0),
        ):
            with pytest.raises(ControlPlaneError) as caught:
                await write()
            assert caught.value.definite
        assert await plane.get(prefix + "a") is None


async def test_an_empty_key_is_refused(backend: Backend) -> None:
    async with backend.open_plane() as plane:
        with pytest.raises(ControlPlaneError) as caught:
            await plane.put("", b"1")
        assert caught.value.definite


async def test_health_is_one_line(backend: Backend) -> None:
    async with backend.open_plane() as plane:
        line = await plane.check_health()
        assert line
        assert "\n" not in line


# --- leases ----------------------------------------------------------------------------------


@pytest.mark.slow
@on_fitting_clock
async def test_keys_die_with_an_expired_lease_and_live_while_it_is_kept(
    backend: Backend, prefix: str
) -> None:
    async with backend.open_plane() as plane, plane.watch(prefix) as events:
        await take(events)
        kept = await plane.grant_lease(2)
        left = await plane.grant_lease(2)
        assert kept.ttl_s >= 2
        await plane.put(prefix + "kept", b"1", lease_id=kept.id)
        for name in ("left/1", "left/2"):
            await plane.put(prefix + name, b"1", lease_id=left.id)
        await take(events, 3)
        deletes: list[WatchEvent] = []
        with trio.fail_after(20):
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


async def test_revoking_a_lease_deletes_its_keys_at_once(backend: Backend, prefix: str) -> None:
    async with backend.open_plane() as plane:
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


async def test_a_put_without_its_lease_outlives_it(backend: Backend, prefix: str) -> None:
    async with backend.open_plane() as plane:
        lease = await plane.grant_lease(60)
        await plane.put(prefix + "a", b"1", lease_id=lease.id)
        await plane.put(prefix + "a", b"2")
        await plane.revoke_lease(lease.id)
        entry = await plane.get(prefix + "a")
        assert entry is not None
        assert (entry.value, entry.lease_id) == (b"2", 0)


async def test_writes_under_an_unknown_lease_are_lease_lost(backend: Backend, prefix: str) -> None:
    async with backend.open_plane() as plane:
        lease = await plane.grant_lease(60)
        await plane.revoke_lease(lease.id)
        with pytest.raises(LeaseLostError) as caught:
            await plane.put(prefix + "a", b"1", lease_id=lease.id)
        assert caught.value.definite
        with pytest.raises(LeaseLostError):
            await plane.compare_and_put(prefix + "a", b"1", mod_revision=0, lease_id=lease.id)
        assert await plane.get(prefix + "a") is None


async def test_many_leases_are_kept_alive_at_once(backend: Backend) -> None:
    async with backend.open_plane() as plane:
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


async def test_an_impossible_lease_is_refused(backend: Backend) -> None:
    async with backend.open_plane() as plane:
        for ttl_s in (0, -1, float("nan"), float("inf")):
            with pytest.raises(ControlPlaneError):
                await plane.grant_lease(ttl_s)


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
        assert trio.lowlevel.current_statistics().tasks_living == tasks
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


# --- the model -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
async def test_a_random_history_is_the_same_as_in_memory(
    backend: Backend, prefix: str, seed: int
) -> None:
    """Results, errors, watched events and the order of revisions: what the simulator relies on."""
    model = History(MemoryControlPlane(), prefix, seed)
    await model.run(150)
    async with backend.open_plane() as plane:
        real = History(plane, prefix, seed)
        await real.run(150)
    assert normalised(real.facts) == normalised(model.facts)


# --- faults ----------------------------------------------------------------------------------


@pytest.mark.slow
@on_fitting_clock
async def test_a_watch_cut_off_resumes_where_it_was(backend: Backend, prefix: str) -> None:
    async with (
        backend.open_plane() as other,
        backend.open_linked_plane() as (plane, link),
        plane.watch(prefix) as events,
    ):
        await take(events)
        await other.put(prefix + "1", b"1")
        await take(events)
        await link.cut()
        for number in range(2, 6):
            await other.put(f"{prefix}{number}", b"1")
        await other.delete(prefix + "1")
        await link.mend()
        missed = await take(events, 5)
        assert [key_of(e).removeprefix(prefix) for e in missed] == ["2", "3", "4", "5", "1"]  # type: ignore[arg-type]


@pytest.mark.slow
@on_fitting_clock
async def test_history_compacted_during_an_outage_gives_one_resync(
    backend: Backend, prefix: str
) -> None:
    """Deletes that happened meanwhile show as names missing from the resync."""
    async with (
        backend.open_plane() as other,
        backend.open_linked_plane() as (plane, link),
        plane.watch(prefix) as events,
        plane.watch(prefix) as also,
    ):
        await take(events)
        await take(also)
        await other.put(prefix + "gone", b"1")
        await other.put(prefix + "kept", b"1")
        await take(events, 2)
        await link.cut()
        await other.delete(prefix + "gone")
        await other.put(prefix + "new", b"1")
        await backend.compact()
        await link.mend()
        resync = await take_one(events)
        assert isinstance(resync, Resync)
        assert values(resync) == {prefix + "kept": b"1", prefix + "new": b"1"}
        revision = await other.put(prefix + "kept", b"2")
        after = await take_one(events)
        assert isinstance(after, Put)
        assert after.entry.mod_revision == revision > resync.revision
        behind: list[WatchEvent] = []
        while not isinstance(behind[-1] if behind else None, Resync):
            behind += await take(also)
        assert len(behind) <= 3


@pytest.mark.slow
@on_fitting_clock
async def test_a_watch_started_in_an_outage_begins_when_it_ends(
    backend: Backend, prefix: str
) -> None:
    async with backend.open_linked_plane() as (plane, link):
        await plane.put(prefix + "a", b"1")
        await link.cut()
        async with plane.watch(prefix) as events:
            with trio.move_on_after(0.3) as scope:
                await anext(events)
            assert scope.cancelled_caught
            await link.mend()
            snapshot = await take_one(events)
            assert isinstance(snapshot, Snapshot)
            assert values(snapshot) == {prefix + "a": b"1"}


@pytest.mark.slow
@on_fitting_clock
async def test_a_killed_and_restarted_server_costs_the_watch_nothing(
    backend: Backend, prefix: str, tmp_path: Path
) -> None:
    """Every acknowledged write is seen exactly once, in order, and the lease is still alive."""
    acknowledged: list[int] = []
    seen: list[int] = []
    async with (
        backend.open_server(tmp_path) as server,
        server.open_plane() as writer,
        server.open_plane() as plane,
        plane.watch(prefix) as events,
    ):
        await take(events)
        lease = await plane.grant_lease(30)
        await plane.put(prefix + "leased", b"1", lease_id=lease.id)
        await take(events)

        async def write(stop: trio.Event) -> None:
            for number in itertools.count():
                if stop.is_set():
                    return
                with contextlib.suppress(TrinamoError):
                    acknowledged.append(await writer.put(f"{prefix}{number % 7}", b"%d" % number))
                await trio.sleep(0.01)

        async def read() -> None:
            async for event in events:
                assert isinstance(event, Put)
                seen.append(event.entry.mod_revision)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            for _ in range(2):
                stop = trio.Event()
                nursery.start_soon(write, stop)
                await until(lambda: len(acknowledged) > 20)
                await server.kill()
                await trio.sleep(0.3)
                await server.restart()
                acknowledged_before = len(acknowledged)
                await until(
                    lambda least=acknowledged_before: len(acknowledged) > least + 10,  # type: ignore[misc]
                    timeout_s=20,
                )
                stop.set()
            await until(lambda: set(seen) >= set(acknowledged), timeout_s=20)
            nursery.cancel_scope.cancel()
        assert seen == sorted(set(seen))
        assert await eventually(lambda: plane.keep_alive(lease.id)) > 0
        assert await plane.get(prefix + "leased") is not None


CALLS: list[tuple[str, Callable[[ControlPlane, str], Any]]] = [
    ("get", lambda plane, key: plane.get(key)),
    ("range", lambda plane, key: plane.range(key)),
    ("put", lambda plane, key: plane.put(key, b"1")),
    ("compare_and_put", lambda plane, key: plane.compare_and_put(key, b"1", mod_revision=0)),
    ("delete", lambda plane, key: plane.delete(key)),
    ("delete_prefix", lambda plane, key: plane.delete_prefix(key)),
    ("grant_lease", lambda plane, key: plane.grant_lease(5)),
    ("keep_alive", lambda plane, key: plane.keep_alive(123)),
    ("revoke_lease", lambda plane, key: plane.revoke_lease(123)),
    ("check_health", lambda plane, key: plane.check_health()),
]


@pytest.mark.slow
@on_fitting_clock
async def test_every_call_to_a_frozen_server_can_be_cancelled(
    backend: Backend, prefix: str, tmp_path: Path
) -> None:
    async with backend.open_server(tmp_path) as server, server.open_plane() as plane:
        await plane.put(prefix, b"1")
        await server.freeze()
        try:
            for name, call in CALLS:
                with trio.move_on_after(0.1) as scope:
                    await call(plane, prefix)
                assert scope.cancelled_caught, name
            with trio.move_on_after(0.1):
                async with plane.watch(prefix) as events:
                    async for _ in events:
                        pass
        finally:
            await server.thaw()
        await eventually(lambda: plane.get(prefix))


@pytest.mark.slow
@on_fitting_clock
@pytest.mark.parametrize("name", [name for name, _ in CALLS])
async def test_an_unreachable_server_is_a_connect_error(
    backend: Backend, prefix: str, name: str
) -> None:
    """Nothing was sent, so even a write that has no guard is definite."""
    async with backend.open_unreachable() as plane:
        with pytest.raises(ConnectError) as caught:
            await dict(CALLS)[name](plane, prefix)
        assert caught.value.definite
