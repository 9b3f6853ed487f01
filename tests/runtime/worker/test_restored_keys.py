"""A registered key that others delete, overwrite or hold."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing

from tests.runtime.worker.registering import TTL_S, Registered, render, running
from trinamo.transports.memory.control import MemoryControlPlane


@pytest.fixture
async def registered() -> AsyncIterator[Registered]:
    async with running() as registered:
        yield registered


# --- what others do to our keys ---


async def vandalize(store: MemoryControlPlane, how: str, key: str = "k") -> None:
    match how:
        case "delete":
            await store.delete(key)
        case "overwrite":
            await store.put(key, b"a stranger's")
        case "take the lease off":
            held = await store.get(key)
            assert held is not None
            await store.put(key, held.value)
        case _:  # Under our own lease.
            held = await store.get(key)
            assert held is not None
            await store.put(key, b"a stranger's", lease_id=held.lease_id)


@pytest.mark.parametrize("how", ["delete", "overwrite", "take the lease off", "under our lease"])
async def test_a_key_that_a_stranger_removes_or_changes_is_put_back(
    registered: Registered, autojump_clock: trio.testing.MockClock, how: str
) -> None:
    for key in ("k", "k/longer", "l"):
        await registered.registrar.register(key, render)
    for times in (1, 2):
        await vandalize(registered.others, how)
        await registered.wait_value(b"incarnation 1")
        await trio.sleep(1)
        held = await registered.others.get("k")
        assert held is not None
        assert held.lease_id == registered.registrar.state.lease_id
        assert registered.metrics.value("registrations_restored_total") == times
    assert registered.registrar.state.lost_count == 0


async def test_a_stranger_that_goes_on_gets_no_more_than_a_write_every_second(
    registered: Registered, autojump_clock: trio.testing.MockClock
) -> None:
    await registered.registrar.register("k", render)
    for _ in range(2000):
        await registered.others.put("k", b"a stranger's")
        await trio.sleep(0.05)
    assert registered.metrics.value("registrations_restored_total") <= 120
    await registered.wait_value(b"incarnation 1")


async def test_a_key_that_is_withdrawn_is_not_put_back(
    registered: Registered, autojump_clock: trio.testing.MockClock
) -> None:
    await registered.registrar.register("k", render)
    await vandalize(registered.others, "delete")
    await registered.registrar.withdraw("k")
    await registered.others.put("k", b"an operator's")
    await trio.sleep(3 * TTL_S)
    assert await registered.value() == b"an operator's"


async def test_another_living_process_s_hold_on_our_key_stands_until_it_ends(
    registered: Registered, autojump_clock: trio.testing.MockClock
) -> None:
    """Whoever writes under a living lease is another incarnation, not a vandal."""
    await registered.registrar.register("k", render)
    lease = await registered.others.grant_lease(1000)
    await registered.others.put("k", b"another's", lease_id=lease.id)
    await trio.sleep(3 * TTL_S)
    assert await registered.value() == b"another's"
    assert registered.metrics.value("registrations_fenced_total") > 1
    await registered.others.revoke_lease(lease.id)
    await registered.wait_value(b"incarnation 1")


async def test_what_stands_for_hours_is_written_anew(
    registered: Registered, autojump_clock: trio.testing.MockClock
) -> None:
    """It is signed for hours; each key at its own time, and nobody takes it for a repair."""
    await registered.registrar.register("k", render)
    await trio.sleep(3600)
    await registered.registrar.register("l", render)
    first = await registered.others.get("k")
    assert first is not None
    revisions = []
    for _ in range(3):
        await trio.sleep(7200)
        held = await registered.others.get("k")
        assert held is not None
        assert (held.value, held.lease_id) == (first.value, first.lease_id)
        revisions.append(held.mod_revision)
    assert len({first.mod_revision, *revisions}) == 4
    held = await registered.others.get("l")
    assert held is not None
    # Of seven hours it stood six.
    assert held.mod_revision <= revisions[-1] + 1
    assert registered.metrics.value("registrations_restored_total") == 0
