"""What a simulated store's faults look like to its clients."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from tests.sim.net.talk import dice
from trinamo.runtime.errors import (
    ConnectError,
    DeadlineError,
    LeaseLostError,
    UnknownOutcomeError,
)
from trinamo.runtime.planes import Delete, Put, PutOutcome, Resync, Snapshot
from trinamo.sim import Network, SeedChoices, World
from trinamo.sim.net.bus import HOLD, Message, Verdict, delay, duplicate, nth
from trinamo.sim.services import SimulatedEtcd, open_simulated_etcd
from trinamo.transports.etcd import EtcdControlPlane

Story = Callable[[EtcdControlPlane, SimulatedEtcd], Awaitable[None]]


def play(story: Story, *, seed: int = 1, tear_one_in: int = 0) -> str:
    """Run `story` on a client host, with a plane over one store; the digest."""
    world = World(SeedChoices(seed), ambient="raise")
    Network(world, tear_one_in=tear_one_in)
    etcd = SimulatedEtcd(world)

    async def client() -> None:
        async with open_simulated_etcd(rng=world.choices.stream("client")) as plane:
            await story(plane, etcd)

    async def main() -> None:
        etcd.boot()
        await world.boot("client", client).ended.wait()

    return world.run(main)


def test_a_write_whose_reply_is_lost_has_an_unknown_outcome_and_took_effect() -> None:
    async def story(plane: EtcdControlPlane, etcd: SimulatedEtcd) -> None:
        etcd.lose_replies()
        with pytest.raises(UnknownOutcomeError):
            await plane.put("a", b"1")
        entry = await plane.get("a")
        assert entry is not None
        assert entry.value == b"1"

    play(story)


def test_a_guarded_write_under_a_lease_knows_its_own_lost_success() -> None:
    async def story(plane: EtcdControlPlane, etcd: SimulatedEtcd) -> None:
        lease = await plane.grant_lease(30)
        etcd.lose_replies()
        outcome = await plane.compare_and_put("a", b"1", mod_revision=0, lease_id=lease.id)
        assert outcome == PutOutcome(succeeded=True, revision=2)
        etcd.lose_replies()
        with pytest.raises(UnknownOutcomeError):
            await plane.compare_and_put("b", b"1", mod_revision=0)

    play(story)


def test_a_leader_change_is_waited_out_by_reads_and_not_by_unguarded_writes() -> None:
    async def story(plane: EtcdControlPlane, etcd: SimulatedEtcd) -> None:
        etcd.refuse(2.0)
        with pytest.raises(UnknownOutcomeError):
            await plane.put("a", b"1")
        assert await plane.get("a") is None
        assert trio.current_time() > 2.0
        etcd.refuse(10.0)
        etcd.refuse(1.0)
        with pytest.raises(DeadlineError):
            await plane.get("a")

    play(story)


def test_a_killed_store_is_a_connect_error_and_a_paused_one_a_deadline() -> None:
    async def story(plane: EtcdControlPlane, etcd: SimulatedEtcd) -> None:
        await plane.get("a")
        etcd.kill()
        await trio.sleep(0.1)
        with pytest.raises(ConnectError):
            await plane.put("a", b"1")
        etcd.restart()
        await plane.put("a", b"1")
        etcd.pause()
        with pytest.raises(DeadlineError):
            await plane.get("a")
        etcd.resume()
        await plane.get("a")

    play(story)


def test_a_store_that_is_switched_off_is_missed_after_the_silence() -> None:
    """No FIN comes; the pings find out, and the watch goes on with the next connection."""

    async def story(plane: EtcdControlPlane, etcd: SimulatedEtcd) -> None:
        async with plane.watch("a") as events:
            assert isinstance(await anext(events), Snapshot)
            await plane.put("a", b"0")
            assert isinstance(await anext(events), Put)
            etcd.power_off()
            await trio.sleep(10)
            etcd.restart()
            await plane.put("a", b"1")
            with trio.fail_after(120):
                assert isinstance(await anext(events), Put)

    play(story)


def test_a_store_that_lost_its_disk_resyncs_its_watches() -> None:
    async def story(plane: EtcdControlPlane, etcd: SimulatedEtcd) -> None:
        lease = await plane.grant_lease(30)
        for name in ("a", "b", "c"):
            await plane.put(name, b"1")
        async with plane.watch("") as events:
            assert isinstance(await anext(events), Snapshot)
            etcd.kill()
            etcd.restart(keeps_disk=False)
            resync = await anext(events)
            assert isinstance(resync, Resync)
            assert not resync.entries
        with pytest.raises(LeaseLostError):
            await plane.keep_alive(lease.id)

    play(story)


def test_a_lease_ends_on_the_store_s_clock_and_not_before() -> None:
    async def story(plane: EtcdControlPlane, etcd: SimulatedEtcd) -> None:
        etcd.clock.rate = 2.0
        asked_s = trio.current_time()
        lease = await plane.grant_lease(10)
        await plane.put("a", b"1", lease_id=lease.id)
        async with plane.watch("a") as events:
            await anext(events)
            assert isinstance(await anext(events), Delete)
            assert 5.0 < trio.current_time() - asked_s < 5.1

    play(story)


def test_repeated_and_reordered_messages_bring_a_watch_nothing_twice() -> None:
    """Every third message twice, every fifth late: revisions still come in order, once each."""

    async def story(plane: EtcdControlPlane, etcd: SimulatedEtcd) -> None:
        seen = 0

        def rule(message: Message) -> Verdict | None:
            nonlocal seen
            # A write that is done twice is two writes; everything else may be repeated.
            if message.channel == "etcd.request":
                return None
            seen += 1
            if seen % 3 == 0:
                return duplicate(gap_s=0.02)
            return delay(0.05) if seen % 5 == 0 else None

        async with plane.watch("") as events:
            await anext(events)
            etcd.interceptor.rules.append(rule)
            written = [await plane.put("a", b"%d" % number) for number in range(30)]
            revisions: list[int] = []
            with trio.fail_after(120):
                while len(revisions) < 30:
                    event = await anext(events)
                    assert isinstance(event, Put)
                    revisions.append(event.entry.mod_revision)
        assert revisions == written

    play(story)


def test_a_reply_that_is_held_back_arrives_when_it_is_released() -> None:
    """And what was asked after it was answered before it."""

    async def story(plane: EtcdControlPlane, etcd: SimulatedEtcd) -> None:
        got: list[str] = []

        async def put(name: str) -> None:
            await plane.put(name, b"1")
            got.append(name)

        etcd.interceptor.rules.append(nth(1, HOLD, channel="etcd.reply"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(put, "a")
            await trio.sleep(0.5)
            nursery.start_soon(put, "b")
            await trio.sleep(0.5)
            assert got == ["b"]
            assert etcd.interceptor.release() == 1
        assert got == ["b", "a"]

    play(story)


@pytest.mark.parametrize("seed", range(3))
def test_reads_get_through_messages_that_are_dropped_at_random(seed: int) -> None:
    async def story(plane: EtcdControlPlane, etcd: SimulatedEtcd) -> None:
        await plane.put("a", b"1")
        etcd.interceptor.rules.append(
            dice(etcd.world, drop_one_in=10, duplicate_one_in=4, delay_one_in=4)
        )
        for _ in range(20):
            entry = await plane.get("a")
            assert entry is not None
            assert entry.value == b"1"

    assert play(story, seed=seed, tear_one_in=3) == play(story, seed=seed, tear_one_in=3)
