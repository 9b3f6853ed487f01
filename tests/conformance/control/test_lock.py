"""The lock of a cluster, on every control plane."""

from __future__ import annotations

import pytest
import trio

from tests.conformance.control.backends import Backend
from tests.conformance.control.etcd_members import EtcdBackend
from trinamo.runtime.errors import LeaseLostError, RequestError
from trinamo.runtime.process import lock as locking
from trinamo.runtime.process.lock import LOCKS_KEY, find_holder, open_lock


@pytest.fixture(autouse=True)
def patient_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that stalls does not keep the lease of a lock that is left."""
    monkeypatch.setattr(locking, "_LEAVING_S", 60.0)


@pytest.fixture
def name(prefix: str) -> str:
    return prefix.rstrip("/").replace("/", "-")


async def test_one_after_the_other_in_the_order_they_came(backend: Backend, name: str) -> None:
    """Each with a higher revision, and others are told who it is."""
    held: list[tuple[bytes, int]] = []

    async def take(who: bytes) -> None:
        async with (
            backend.open_plane() as control,
            open_lock(control, name, value=who, ttl_s=60) as lock,
        ):
            holder = await find_holder(control, name)
            assert holder is not None
            held.append((holder.value, lock.revision))
            await trio.sleep(0.05)

    async with backend.open_plane() as control:
        async with trio.open_nursery() as nursery:
            for who in (b"a", b"b", b"c"):
                nursery.start_soon(take, who)
                while who not in (*(each for each, _ in held), *await waiting(backend, name)):
                    await trio.sleep(0.01)
        assert await find_holder(control, name) is None

    assert [who for who, _ in held] == [b"a", b"b", b"c"]
    assert [revision for _, revision in held] == sorted({revision for _, revision in held})


async def waiting(backend: Backend, name: str) -> list[bytes]:
    """Who has the lock, or waits for it."""
    async with backend.open_plane() as control:
        return [each.value for each in (await control.range(f"{LOCKS_KEY}{name}/")).entries]


async def test_whoever_is_cancelled_leaves_nothing(backend: Backend, name: str) -> None:
    """In line, and while it has the lock; the next one does not wait for its lease."""
    async with backend.open_plane() as control:

        async def wait_in_line() -> None:
            async with open_lock(control, name, ttl_s=60):
                raise AssertionError("two have it")

        with trio.CancelScope() as scope:
            async with open_lock(control, name, ttl_s=60):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(wait_in_line)
                    with trio.fail_after(120):
                        while len(await waiting(backend, name)) < 2:
                            await trio.sleep(0.01)
                    nursery.cancel_scope.cancel()
                assert len(await waiting(backend, name)) == 1
                scope.cancel()
                await trio.sleep_forever()
        assert await waiting(backend, name) == []
        with trio.fail_after(120):
            async with open_lock(control, name):
                pass


async def test_a_lock_that_is_lost_cancels_the_block(backend: Backend, name: str) -> None:
    async with backend.open_plane() as control, backend.open_plane() as other:

        async def lose() -> None:
            async with open_lock(control, name, ttl_s=60):
                holder = await find_holder(other, name)
                assert holder is not None
                await other.revoke_lease(holder.lease_id)
                await trio.sleep_forever()

        with trio.fail_after(120), pytest.raises(LeaseLostError, match="was lost"):
            await lose()


async def test_one_that_is_thrown_out_of_the_line_is_told(backend: Backend, name: str) -> None:
    """It never had it: so it is no error of the block, which has not begun."""
    async with backend.open_plane() as control, open_lock(control, name, ttl_s=60):

        async def stand() -> None:
            with pytest.raises(LeaseLostError, match="was lost"):
                await open_lock(control, name, ttl_s=60).__aenter__()

        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stand)
                while len(await waiting(backend, name)) < 2:
                    await trio.sleep(0.01)
                last = max(
                    (await control.range(f"{LOCKS_KEY}{name}/")).entries,
                    key=lambda each: each.create_revision,
                )
                await control.revoke_lease(last.lease_id)


async def test_a_lock_is_renewed_while_it_is_held(backend: Backend, name: str) -> None:
    ttl_s, held_s = (6, 6) if isinstance(backend, EtcdBackend) else (3, 5)
    async with backend.open_plane() as control:
        # A lock that is not renewed is lost after most of its `ttl_s`.
        async with open_lock(control, name, ttl_s=ttl_s):
            await trio.sleep(held_s)
        with pytest.raises(RequestError, match="no name of a lock"):
            await open_lock(control, "a/b").__aenter__()
