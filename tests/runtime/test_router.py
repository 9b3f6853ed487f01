"""The router: what discovery and our own faults make of the live set, and the flights it ends."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing

from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import RequestError, UnavailableError
from trinamo.runtime.planes import Delete, Entry, Put, Resync, Snapshot
from trinamo.runtime.protocol.instances import EndpointName, Instance, encode_instance
from trinamo.runtime.protocol.routing import Policy
from trinamo.runtime.router import Router
from trinamo.transports.memory.control import ControlFaults, MemoryControlPlane

NAME = EndpointName("ns", "engine", "generate")


def instance(instance_id: str, *, draining: bool = False, incarnation: int = 1) -> Instance:
    return Instance(
        endpoint=str(NAME),
        id=instance_id,
        transports={},
        draining=draining,
        incarnation=incarnation,
    )


def entry(each: Instance) -> Entry:
    return Entry(each.key, encode_instance(each), 1, 1)


class SeededEnv(RealEnv):
    """The dice always fall alike."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(7)


def router(*ids: str, policy: Policy = Policy.ROUND_ROBIN) -> Router:
    made = Router(MemoryControlPlane(), NAME, SeededEnv(), policy=policy, inhibit_s=5)
    made.apply(Snapshot(1, [entry(instance(each)) for each in ids]))
    return made


def choices(made: Router, count: int = 4) -> str:
    return "".join(made.choose().id for _ in range(count))


async def test_a_faulty_instance_is_avoided_until_its_inhibition_expires(
    autojump_clock: trio.testing.MockClock,
) -> None:
    made = router("1", "2")
    made.inhibit(instance("1"))
    assert choices(made) == "2222"
    await trio.sleep(5.1)
    assert set(choices(made)) == {"1", "2"}


async def test_an_answer_ends_inhibition() -> None:
    made = router("1", "2")
    made.inhibit(instance("1"))
    made.restore(instance("1"))
    assert set(choices(made)) == {"1", "2"}


async def test_when_all_are_faulty_somebody_is_asked_all_the_same() -> None:
    made = router("1", "2")
    made.inhibit(instance("1"))
    made.inhibit(instance("2"))
    assert set(choices(made)) == {"1", "2"}


async def test_who_was_tried_is_not_chosen_again() -> None:
    made = router("1", "2")
    assert made.choose(exclude=["1"]).id == "2"
    with pytest.raises(UnavailableError, match="another live instance"):
        made.choose(exclude=["1", "2"])


async def test_nobody_and_nobody_of_that_name() -> None:
    with pytest.raises(UnavailableError, match="a live instance"):
        router().choose()
    with pytest.raises(UnavailableError, match="9"):
        router("1").choose(instance_id="9")


async def test_direct_needs_a_name_and_overrides_inhibition() -> None:
    made = router("1", "2", policy=Policy.DIRECT)
    made.inhibit(instance("1"))
    assert made.choose(instance_id="1").id == "1"
    with pytest.raises(RequestError):
        made.choose()


async def test_a_draining_instance_is_left_alone() -> None:
    made = router("1", "2")
    made.apply(Put(entry(instance("1", draining=True))))
    assert choices(made) == "2222"
    made.apply(Put(entry(instance("2", draining=True))))
    with pytest.raises(UnavailableError):
        made.choose()


async def test_least_loaded_counts_the_requests_in_flight() -> None:
    made = router("1", "2", policy=Policy.LEAST_LOADED)
    with made.flight(instance("1")), made.flight(instance("1")), made.flight(instance("2")):
        assert made.in_flight == 3
        assert choices(made) == "2222"
    assert made.in_flight == 0


async def test_an_instance_that_leaves_ends_the_flights_to_it_and_to_no_other() -> None:
    made, gone = router("1", "2"), list[str]()
    with made.flight(instance("1")) as first, made.flight(instance("2")) as second:
        first.on_gone = lambda: gone.append("1")
        second.on_gone = lambda: gone.append("2")
        made.apply(Delete(instance("1").key, 2))
        assert gone == ["1"]
        assert (first.is_gone, second.is_gone) == (True, False)
    assert made.in_flight == 0


async def test_a_resync_ends_the_flights_to_whom_it_does_not_name() -> None:
    made = router("1", "2")
    with made.flight(instance("1")) as first, made.flight(instance("2")) as second:
        made.apply(Resync(9, [entry(instance("2", incarnation=2))]))
        assert (first.is_gone, second.is_gone) == (True, False)


async def test_a_bad_entry_is_logged_and_the_watch_lives_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = router("1")
    made.apply(Put(Entry(f"{NAME.key_prefix}2", b"junk", 1, 1)))
    assert choices(made) == "1111"
    assert "discovery entry refused" in caplog.text


async def test_it_follows_the_store_through_an_outage() -> None:
    faults = ControlFaults()
    store = MemoryControlPlane()
    watching = MemoryControlPlane(store.store, faults=faults)
    made = Router(watching, NAME, SeededEnv())
    async with trio.open_nursery() as nursery:
        await nursery.start(made.run)
        await store.put(instance("1").key, encode_instance(instance("1")))
        assert [each.id for each in await made.wait_instances()] == ["1"]
        with faults.outage():
            await store.put(instance("2").key, encode_instance(instance("2")))
            await store.delete(instance("1").key)
            await trio.testing.wait_all_tasks_blocked()
            assert choices(made) == "1111"
        await made.wait_instances(1)
        while [each.id for each in made.instances] != ["2"]:
            await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
