"""What every control plane must do, whatever carries it.

One body over every backend of `backends.py` and `etcd_members.py`. Real servers are
killed with SIGKILL, frozen with SIGSTOP and cut off by a proxy; memory does the same by its hooks.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import trio

from tests.conformance.control.backends import Backend
from tests.conformance.control.histories import History, normalised
from tests.conformance.control.watched import EVERY_BYTE, _put_all, on_fitting_clock, take, values
from trinamo.runtime.errors import ControlPlaneError, LeaseLostError
from trinamo.runtime.planes import Delete, Entry, PutOutcome, WatchEvent
from trinamo.transports.memory.control import MemoryControlPlane

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
