"""A control plane whose server is away, restarted, compacted or frozen."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.conformance.control.backends import Backend, eventually
from tests.conformance.control.etcd_members import EtcdBackend
from trinamo.conformance.control import key_of, take, take_one, until
from trinamo.runtime.errors import ConnectError, TrinamoError
from trinamo.runtime.planes import ControlPlane, Put, Resync, Snapshot, WatchEvent
from trinamo.transports.etcd import watching


@pytest.fixture
def late_listing(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real etcd that stalls does not have watches listed while it still sends old changes."""
    if isinstance(backend, EtcdBackend):
        monkeypatch.setattr(watching, "PROOF_S", 60.0)


# --- faults ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("late_listing")
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
        assert [key_of(e).removeprefix(prefix) for e in missed] == ["2", "3", "4", "5", "1"]


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
        assert {e.key: e.value for e in resync.entries} == {
            prefix + "kept": b"1",
            prefix + "new": b"1",
        }
        revision = await other.put(prefix + "kept", b"2")
        after = await take_one(events)
        assert isinstance(after, Put)
        assert after.entry.mod_revision == revision > resync.revision
        behind: list[WatchEvent] = []
        while not isinstance(behind[-1] if behind else None, Resync):
            behind += await take(also)
        assert len(behind) <= 3


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
            assert {e.key: e.value for e in snapshot.entries} == {prefix + "a": b"1"}


@pytest.mark.usefixtures("late_listing")
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
        lease = await plane.grant_lease(120)
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
                    lambda least=acknowledged_before: len(acknowledged) > least + 10  # type: ignore[misc]
                )
                stop.set()
            await until(lambda: set(seen) >= set(acknowledged))
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


@pytest.mark.parametrize("name", [name for name, _ in CALLS])
async def test_an_unreachable_server_is_a_connect_error(
    backend: Backend, prefix: str, name: str
) -> None:
    """Nothing was sent, so even a write that has no guard is definite."""
    async with backend.open_unreachable() as plane:
        with pytest.raises(ConnectError) as caught:
            await dict(CALLS)[name](plane, prefix)
        assert caught.value.definite
