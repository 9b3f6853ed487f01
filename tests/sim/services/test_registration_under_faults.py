"""Scenarios S2, S3 and S4: the real registrar against a store that goes away and comes back."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from tests.sim.services.clusters import TTL_S, Herd
from trinamo.runtime.protocol.discovery.lease import LeaseTimer
from trinamo.runtime.worker.registration import Registrar
from trinamo.sim.services.etcd.channel import SimulatedChannel
from trinamo.transports.etcd.client import EtcdClient

SEEDS = range(4)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cut_longer_than_the_lease_ends_in_a_new_incarnation_of_the_same_instance(
    seed: int,
) -> None:
    """S2: nothing exits; the key is gone while the lease is, and returns under the same name."""

    async def story(herd: Herd) -> None:
        (member,) = herd.members
        assert herd.instances() == {member.key: b"worker-0 life 1"}
        herd.cut()
        await trio.sleep(TTL_S + 1)
        assert herd.instances() == {}
        await trio.sleep(20)
        herd.heal()
        await herd.settled()
        assert herd.instances() == {member.key: b"worker-0 life 2"}
        assert member.registrar is not None
        assert member.registrar.state.lost_count == 1

    Herd(seed).run(story)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_store_that_was_down_gives_every_lease_its_full_time_again(seed: int) -> None:
    """S2, the other way: a store that is away deregisters nobody, so nobody registers again."""

    async def story(herd: Herd) -> None:
        herd.etcd.kill()
        await trio.sleep(3 * TTL_S)
        herd.etcd.restart()
        await trio.sleep(2 * TTL_S)
        assert len(herd.instances()) == 3
        assert all(not member.losses for member in herd.members)

    Herd(seed, 3).run(story)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_store_that_lost_its_disk_is_filled_again(seed: int) -> None:
    async def story(herd: Herd) -> None:
        herd.etcd.power_off()
        await trio.sleep(1)
        herd.etcd.restart(keeps_disk=False)
        assert herd.instances() == {}
        await herd.settled()
        assert all(value.endswith(b"life 2") for value in herd.instances().values())

    Herd(seed, 3).run(story)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ttl_s", [10.0, 30.0])
@pytest.mark.parametrize("outage_s", [1.0, 3.0, 7.0, 12.0])
def test_an_outage_shorter_than_the_lease_costs_no_lease(
    seed: int, ttl_s: float, outage_s: float
) -> None:
    """S3: wherever in the period it falls, the renewal after it comes before the deadline."""
    play_short_outages(seed, outage_s, ttl_s=ttl_s)


def play_short_outages(seed: int, outage_s: float, *, ttl_s: float) -> None:
    """Cuts that begin at several points after a renewal and leave 3 s of the lease at least."""

    async def story(herd: Herd) -> None:
        (member,) = herd.members
        for part in (0.0, 0.15, 0.3, 0.45, 0.499):
            await herd.renewed.park()
            await trio.sleep(part * ttl_s)
            herd.cut()
            await trio.sleep(min(outage_s, (1 - part) * ttl_s - 3.0))
            herd.heal()
            await trio.sleep(ttl_s)
            assert member.losses == []

    Herd(seed, ttl_s=ttl_s).run(story)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lease_whose_store_counts_fast_is_still_kept(seed: int) -> None:
    """A store whose clock runs half as fast again ends a lease of 10 s after 6.7 s."""

    async def story(herd: Herd) -> None:
        herd.etcd.clock.rate = 1.5
        await trio.sleep(60)
        assert herd.members[0].losses == []
        herd.etcd.clock.skip(TTL_S)
        await trio.sleep(0.001)
        assert herd.instances() == {}
        await herd.settled()

    Herd(seed).run(story)


def renewals_per_slot(seed: int) -> Counter[int]:
    """In tenths of a second after a restart, how often 50 members that lost the store renewed."""
    per_slot: Counter[int] = Counter()

    async def story(herd: Herd) -> None:
        await trio.sleep(1)
        herd.etcd.kill()
        await trio.sleep(20)
        restarted_s = trio.current_time()
        herd.etcd.restart()
        herd.renewals.clear()
        await trio.sleep(2 * TTL_S)
        assert len(herd.instances()) == 50
        assert all(not member.losses for member in herd.members)
        per_slot.update(int((at - restarted_s) / 0.1) for at in herd.renewals)

    Herd(seed, 50).run(story)
    return per_slot


@pytest.mark.check
@pytest.mark.parametrize("seed", range(2))
def test_a_herd_that_reconnects_spreads_its_renewals(seed: int) -> None:
    """S4: members whose store was away do not renew in one instant, and drift apart from then on."""
    per_slot = renewals_per_slot(seed)
    assert max(per_slot.values()) <= 15, per_slot
    third_period = [slot for slot in per_slot if 110 < slot < 155]
    assert max(third_period) - min(third_period) >= 15


@pytest.mark.check
def test_a_herd_without_dice_stays_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """S4's planted mutant: with the jitter taken out, all renew in the same tenth of a second."""
    steady = SimpleNamespace(uniform=lambda _low, _high: 1.0, getrandbits=lambda _bits: 0)
    start = SimulatedChannel.__init__
    monkeypatch.setattr(
        SimulatedChannel,
        "__init__",
        lambda self, *args, **options: start(self, *args, **options | {"rng": steady}),
    )
    monkeypatch.setattr(EtcdClient, "jittered", lambda _, pause_s: pause_s)
    begin = Registrar.__init__

    def without_dice(self: Registrar, control: Any, env: Any, **options: Any) -> None:
        begin(
            self,
            control,
            cast("Any", SimpleNamespace(rng=steady, note=env.note, clock=env.clock)),
            **options,
        )

    monkeypatch.setattr(Registrar, "__init__", without_dice)
    assert max(renewals_per_slot(1).values()) == 50


def test_a_renewal_that_waits_a_ttl_after_one_that_failed_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S3's planted mutant: whatever is left of the lease, it misses the deadline."""
    monkeypatch.setattr(LeaseTimer, "retry_s", lambda self, now: self.ttl_s)

    def play_many() -> None:
        for seed in range(20):
            play_short_outages(seed, 12.0, ttl_s=30.0)

    with pytest.raises(AssertionError):
        play_many()


def test_the_same_seed_gives_the_same_run() -> None:
    async def story(herd: Herd) -> None:
        herd.cut()
        await trio.sleep(15)
        herd.heal()
        await herd.settled()
        herd.etcd.kill()
        await trio.sleep(2)
        herd.etcd.restart()
        await trio.sleep(10)

    digests = [Herd(seed, 5).run(story) for seed in (7, 7, 8)]
    assert digests[0] == digests[1] != digests[2]
