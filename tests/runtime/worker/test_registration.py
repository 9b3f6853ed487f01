"""Registration under a lease that is kept, lost, and granted anew; on a mock clock."""

from __future__ import annotations

import itertools
import re
from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing

from tests.runtime.worker.registering import TTL_S, Registered, SeededEnv, render, running
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import ConnectError, FencedError, UnavailableError
from trinamo.runtime.worker.metrics import WorkerMetrics
from trinamo.runtime.worker.registration import Registrar
from trinamo.transports.memory.control import ControlFaults, MemoryControlPlane
from trinamo.transports.memory.store import MemoryStore


@pytest.fixture
async def registered() -> AsyncIterator[Registered]:
    async with running() as registered:
        yield registered


async def test_a_key_is_there_when_register_returns_and_stays_by_renewal(
    registered: Registered,
    autojump_clock: trio.testing.MockClock,
) -> None:
    await registered.registrar.register("k", render)
    assert await registered.value() == b"incarnation 1"
    await trio.sleep(20 * TTL_S)
    assert await registered.value() == b"incarnation 1"
    assert registered.registrar.state.lost_count == 0


async def test_a_key_registered_again_is_written_again(
    registered: Registered, autojump_clock: trio.testing.MockClock
) -> None:
    await registered.registrar.register("k", render)
    await registered.registrar.register("k", lambda _: b"draining")
    assert await registered.value() == b"draining"


async def test_a_key_registered_again_while_it_is_being_written_ends_as_the_later_one(
    registered: Registered,
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Or an instance that leaves during a re-registration would never be seen draining."""
    registered.faults.delay_s = 1.0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(registered.registrar.register, "k", render)
        await trio.sleep(0.5)
        await registered.registrar.register("k", lambda _: b"draining")
    await trio.sleep(5)
    assert await registered.value() == b"draining"


async def test_in_a_store_that_began_anew_a_key_is_registered_at_any_revision(
    registered: Registered, autojump_clock: trio.testing.MockClock
) -> None:
    """As when etcd has lost its disk, and the key is put there before its watch is."""
    control = registered.registrar._control
    assert isinstance(control, MemoryControlPlane)
    for number in range(100):
        await control.put(f"other/{number}", b"")
    await registered.registrar.register("k", render)
    control.store.is_up, control.store = False, MemoryStore()
    await trio.sleep(2 * TTL_S)
    assert await control.get("k") is not None
    with trio.fail_after(TTL_S):
        await registered.registrar.register("k", lambda _: b"draining")


async def test_an_instance_id_that_another_process_holds_is_refused(
    registered: Registered, autojump_clock: trio.testing.MockClock
) -> None:
    """Two workers claim one id: the second is told so, counted, and changes nothing."""
    await registered.registrar.register("k", render)
    metrics = WorkerMetrics(RealEnv())
    second = Registrar(registered.others, SeededEnv(), ttl_s=TTL_S, metrics=metrics)
    async with trio.open_nursery() as nursery:
        await nursery.start(second.run)
        with pytest.raises(FencedError, match="held by another process") as caught:
            await second.register("k", lambda _: b"usurper")
        assert caught.value.definite
        await second.register("l", lambda _: b"its own")
        await second.withdraw("k")
        await trio.sleep(3 * TTL_S)
        nursery.cancel_scope.cancel()
    assert await registered.value() == b"incarnation 1"
    assert metrics.value("registrations_fenced_total") == 1


async def test_a_key_without_a_lease_is_nobody_s_to_take(
    registered: Registered, autojump_clock: trio.testing.MockClock
) -> None:
    await registered.others.put("k", b"an operator's")
    with pytest.raises(FencedError, match="no lease"):
        await registered.registrar.register("k", render)
    assert await registered.value() == b"an operator's"


async def test_who_comes_back_to_a_taken_id_waits_until_it_is_free(
    registered: Registered, autojump_clock: trio.testing.MockClock
) -> None:
    """It lost its lease in an outage, and somebody else registered under its id meanwhile."""
    await registered.registrar.register("k", render)
    with registered.faults.outage():
        await trio.sleep(3 * TTL_S)
        lease = await registered.others.grant_lease(1000)
        await registered.others.put("k", b"usurper", lease_id=lease.id)
    await trio.sleep(5 * TTL_S)
    assert await registered.value() == b"usurper"
    assert registered.registrar.state.lease_id
    await registered.others.revoke_lease(lease.id)
    await registered.wait_value(b"incarnation 2")


async def test_what_somebody_puts_back_under_an_earlier_lease_is_ours_to_overwrite(
    registered: Registered, autojump_clock: trio.testing.MockClock
) -> None:
    """Before: with one write, under a lease whose number etcd grants to who asks for it, it stood for good."""
    registrar, others = registered.registrar, registered.others
    await registrar.register("k", render)
    old = await others.get("k")
    assert old is not None
    await others.revoke_lease(old.lease_id)
    await registered.wait_value(b"incarnation 2")
    others.store._last_lease_id = old.lease_id - 1
    assert (await others.grant_lease(40_000)).id == old.lease_id
    await others.put("k", old.value, lease_id=old.lease_id)
    await registered.wait_value(b"incarnation 2")
    await others.put("k", old.value, lease_id=old.lease_id)
    await registrar.withdraw("k")
    assert await registered.value() is None


async def test_a_rewrite_changes_nothing_that_became_another_s(
    registered: Registered, autojump_clock: trio.testing.MockClock
) -> None:
    """Guarded by what our own last write left: a write on top of a stranger's does not happen."""
    await registered.registrar.register("k", render)
    lease = await registered.others.grant_lease(1000)
    await registered.others.put("k", b"usurper", lease_id=lease.id)
    with trio.move_on_after(5 * TTL_S):
        await registered.registrar.register("k", lambda _: b"draining")
    assert await registered.value() == b"usurper"
    await registered.others.delete("k")
    await registered.wait_value(b"draining")


async def test_a_key_somebody_deleted_is_written_again(
    registered: Registered, autojump_clock: trio.testing.MockClock
) -> None:
    await registered.registrar.register("k", render)
    await registered.others.delete("k")
    await registered.registrar.register("k", lambda _: b"draining")
    assert await registered.value() == b"draining"


async def test_a_withdrawn_key_is_gone_and_stays_gone(
    registered: Registered, autojump_clock: trio.testing.MockClock
) -> None:
    await registered.registrar.register("k", render)
    await registered.registrar.withdraw("k")
    assert await registered.value() is None
    await trio.sleep(5 * TTL_S)
    assert await registered.value() is None


async def test_a_key_withdrawn_while_it_is_being_written_stays_gone(
    registered: Registered, autojump_clock: trio.testing.MockClock
) -> None:
    registered.faults.delay_s = 0.5
    with trio.move_on_after(0.1):
        await registered.registrar.register("k", render)
    await registered.registrar.withdraw("k")
    await trio.sleep(5)
    assert await registered.value() is None


async def test_a_lost_lease_is_granted_anew_and_every_key_put_again(
    registered: Registered, autojump_clock: trio.testing.MockClock
) -> None:
    for key in ("k", "l"):
        await registered.registrar.register(key, render)
    first = registered.registrar.state.lease_id
    await registered.others.revoke_lease(first)
    assert await registered.value() is None
    for key in ("k", "l"):
        await registered.wait_value(b"incarnation 2", key)
    state = registered.registrar.state
    assert (state.incarnation, state.lost_count) == (2, 1)
    assert state.lease_id not in (0, first)
    assert [bool(each.lease_id) for each in registered.changes] == [True, False, True]


@pytest.mark.parametrize("outage_s", [TTL_S / 4, 3 * TTL_S])
async def test_a_store_that_was_away_is_registered_with_again(
    registered: Registered, autojump_clock: trio.testing.MockClock, outage_s: float
) -> None:
    """Shorter than the lease nothing is lost; longer, the instance returns by itself."""
    await registered.registrar.register("k", render)
    with registered.faults.outage():
        await trio.sleep(outage_s)
        is_short = outage_s < TTL_S
        assert (await registered.value() is not None) is is_short
    await registered.wait_value(b"incarnation 1" if is_short else b"incarnation 2")


async def test_a_key_registered_during_an_outage_appears_after_it(
    registered: Registered, autojump_clock: trio.testing.MockClock
) -> None:
    with registered.faults.outage():
        with trio.move_on_after(1) as scope:
            await registered.registrar.register("k", render)
        assert scope.cancelled_caught
    await registered.wait_value(b"incarnation 1")


async def test_a_put_whose_answer_was_lost_is_repeated(
    registered: Registered, autojump_clock: trio.testing.MockClock
) -> None:
    registered.faults.lose_replies(1)
    await registered.registrar.register("k", render)
    assert await registered.value() == b"incarnation 1"


async def test_a_withdrawal_waits_for_a_store_that_is_away(
    registered: Registered, autojump_clock: trio.testing.MockClock
) -> None:
    await registered.registrar.register("k", render)
    async with trio.open_nursery() as nursery:
        with registered.faults.outage():
            nursery.start_soon(registered.registrar.withdraw, "k")
            await trio.sleep(2)
    assert await registered.value() is None


async def test_revoking_deletes_every_key_at_once(
    registered: Registered, autojump_clock: trio.testing.MockClock
) -> None:
    await registered.registrar.register("k", render)
    await registered.registrar.revoke()
    assert await registered.value() is None
    assert registered.registrar.state.lease_id == 0


async def test_a_revoked_lease_is_not_granted_anew(
    registered: Registered, autojump_clock: trio.testing.MockClock
) -> None:
    """Shutdown revokes while the keeper still runs; the instance must not come back to life."""
    await registered.registrar.register("k", render)
    await registered.registrar.revoke()
    await trio.sleep(3 * TTL_S)
    assert await registered.value() is None


async def test_a_process_without_a_store_starts_once_there_is_one(
    autojump_clock: trio.testing.MockClock,
) -> None:
    faults = ControlFaults()
    faults.cut_link()
    registrar = Registrar(MemoryControlPlane(faults=faults), SeededEnv(), ttl_s=TTL_S)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def mend() -> None:
            await trio.sleep(7)
            faults.mend_link()

        await nursery.start(registrar.run)
        assert trio.current_time() >= 7
        assert registrar.state.incarnation == 1
        nursery.cancel_scope.cancel()


async def test_a_key_that_the_store_refuses_does_not_keep_the_others_out(
    registered: Registered, autojump_clock: trio.testing.MockClock
) -> None:
    """Neither now nor after a lost lease, when all are put again in their old order."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(registered.registrar.register, "big", lambda _: bytes(2 << 20))
        await trio.testing.wait_all_tasks_blocked()
        await registered.registrar.register("k", render)
        assert await registered.value("big") is None
        await registered.others.revoke_lease(registered.registrar.state.lease_id)
        await registered.wait_value(b"incarnation 2")
        nursery.cancel_scope.cancel()


# --- renewals beside registrations ---


@pytest.mark.parametrize("delay_s", [1.5, 3.0])
async def test_renewals_do_not_wait_behind_registrations(
    registered: Registered, autojump_clock: trio.testing.MockClock, delay_s: float
) -> None:
    """Three keys at three seconds a call take longer than the lease of ten seconds lasts."""
    registered.faults.delay_s = delay_s
    for _ in range(10):
        async with trio.open_nursery() as nursery:
            for key in ("k", "l", "m"):
                nursery.start_soon(registered.registrar.register, key, render)
        await trio.sleep(TTL_S)
    registered.faults.delay_s = 0
    assert registered.registrar.state.lost_count == 0
    assert [await registered.value(key) for key in ("k", "l", "m")] == [b"incarnation 1"] * 3


@pytest.mark.parametrize("takes_s", [0.0, 0.3, 2.0])
async def test_a_renewal_that_failed_is_asked_again_before_it_is_due(
    autojump_clock: trio.testing.MockClock, takes_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of what is left, and no more than a second, after it was asked; however long it took."""
    asked: list[float] = []

    async def keep_alive(_: object, lease_id: int) -> float:
        asked.append(trio.current_time())
        await trio.sleep(takes_s)
        raise ConnectError(f"lease {lease_id} was not renewed")

    monkeypatch.setattr(MemoryControlPlane, "keep_alive", keep_alive)
    async with running() as registered:
        granted_at = trio.current_time()
        await trio.sleep(TTL_S)
        assert registered.registrar.state.lost_count == 0
    for before, after in itertools.pairwise([at for at in asked if at < granted_at + TTL_S]):
        left_s = granted_at + TTL_S - before
        due = before + max(min(left_s / 2, 1.0), 0.05)
        assert after <= max(due, before + takes_s) + 1e-6


async def test_who_waits_for_a_registration_hears_of_its_end(
    registered: Registered, autojump_clock: trio.testing.MockClock
) -> None:
    """Withdrawn or revoked meanwhile, it will never be there; nobody waits for ever."""
    registered.faults.delay_s = 1.0
    for end in (lambda: registered.registrar.withdraw("k"), registered.registrar.revoke):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end)
            with pytest.raises(UnavailableError):
                await registered.registrar.register("k", render)
    with pytest.raises(UnavailableError, match="given up"):
        await registered.registrar.register("k", render)


async def test_a_lease_that_has_run_out_is_told_in_words(
    registered: Registered,
    autojump_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with registered.faults.outage():
        await trio.sleep(4 * TTL_S)
    told = [
        each.getMessage() for each in caplog.records if "lease not renewed" in each.msg % each.args
    ]
    assert re.search(r"; \d+\.\d s left$", told[0])
    assert re.search(r"; it ran out \d+\.\d s ago", told[-1])
