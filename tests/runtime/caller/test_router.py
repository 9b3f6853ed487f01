"""The router: whom it chooses, and what it makes of discovery."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

import msgspec
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from tests.runtime.caller.requests import NAME, Request, SeededEnv, entry, instance
from trinamo.runtime.caller.router import Router
from trinamo.runtime.context import Context
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import (
    DisconnectedError,
    RemoteProtocolError,
    RequestError,
    UnavailableError,
)
from trinamo.runtime.events.load import LoadReport
from trinamo.runtime.http.metrics import FrontendMetrics
from trinamo.runtime.planes import Delete, Entry, Put, Resync, Snapshot
from trinamo.runtime.protocol.discovery.candidates import Policy
from trinamo.runtime.protocol.discovery.instances import encode_instance
from trinamo.transports.memory.control import ControlFaults, MemoryControlPlane
from trinamo.transports.memory.events import MemoryBroker, MemoryEventPlane


def router(*ids: str, policy: Policy = Policy.ROUND_ROBIN) -> Router:
    made = Router(MemoryControlPlane(), NAME, SeededEnv(), policy=policy, inhibit_s=5)
    made.apply(Snapshot(1, [entry(instance(each)) for each in ids]))
    return made


def under_way(made: Router, *ids: str) -> AbstractContextManager[object]:
    """A request to each of these instances."""
    stack = ExitStack()
    for each in ids:
        stack.enter_context(made.flight(instance(each), Request()))
    return stack


def choices(made: Router, count: int = 4) -> str:
    return "".join(made.choose().id for _ in range(count))


async def test_a_faulty_instance_is_avoided_until_its_inhibition_expires(
    autojump_clock: MockClock,
) -> None:
    made = router("1", "2")
    made.fail(instance("1"), DisconnectedError("gone"), Context("r"))
    assert choices(made) == "2222"
    await trio.sleep(5.1)
    assert set(choices(made)) == {"1", "2"}


async def test_an_answer_ends_inhibition() -> None:
    made = router("1", "2")
    made.fail(instance("1"), DisconnectedError("gone"), Context("r"))
    made.restore(instance("1"))
    assert set(choices(made)) == {"1", "2"}


async def test_an_answer_ends_the_inhibition_of_one_that_answered_nonsense() -> None:
    made = router("1", "2")
    made.fail(instance("1"), RemoteProtocolError("nonsense"), Context("r"))
    made.restore(instance("1"))
    assert set(choices(made)) == {"1", "2"}


async def test_when_all_are_faulty_somebody_is_asked_all_the_same() -> None:
    made = router("1", "2")
    made.fail(instance("1"), DisconnectedError("gone"), Context("r"))
    made.fail(instance("2"), DisconnectedError("gone"), Context("r"))
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


@pytest.mark.parametrize("policy", list(Policy))
async def test_a_named_instance_is_honoured_under_every_policy(policy: Policy) -> None:
    made = router("1", "2", "3", policy=policy)
    assert made.choose(instance_id="3").id == "3"
    with pytest.raises(UnavailableError, match="instance 4 is not live"):
        made.choose(instance_id="4")


@pytest.mark.parametrize("policy", list(Policy))
async def test_nobody_to_choose_is_unavailable(policy: Policy) -> None:
    with pytest.raises(UnavailableError):
        router(policy=policy).choose()


async def test_direct_needs_a_name_and_overrides_inhibition() -> None:
    made = router("1", "2", policy=Policy.DIRECT)
    made.fail(instance("1"), DisconnectedError("gone"), Context("r"))
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
    with under_way(made, "1", "1", "2"):
        assert made.in_flight == 3
        assert choices(made) == "2222"
    assert made.in_flight == 0


async def test_an_instance_that_leaves_ends_what_waits_for_it_and_nothing_else() -> None:
    made = router("1", "2")
    first, begun, second = Request(is_waiting=True), Request(), Request(is_waiting=True)
    with ExitStack() as stack:
        for each, request in (("1", first), ("1", begun), ("2", second)):
            stack.enter_context(made.flight(instance(each), request))
        made.apply(Delete(instance("1").key, 2))
        assert [len(each.ended) for each in (first, begun, second)] == [1, 0, 0]
        assert "vanished" in first.ended[0][1]
        assert made.in_flight == 3
    assert made.in_flight == 0


async def test_a_resync_ends_what_waits_for_whom_it_does_not_name() -> None:
    made = router("1", "2")
    first, second = Request(is_waiting=True), Request(is_waiting=True)
    with made.flight(instance("1"), first), made.flight(instance("2"), second):
        made.apply(Resync(9, [entry(instance("2", incarnation=2))]))
        assert (len(first.ended), second.ended) == (1, [])


async def test_nothing_can_be_under_way_to_one_that_has_left() -> None:
    made = router("1")
    made.apply(Delete(instance("1").key, 2))
    with pytest.raises(UnavailableError, match="has left"), made.flight(instance("1"), Request()):
        raise AssertionError


async def test_a_bad_entry_is_logged_and_the_watch_lives_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = router("1")
    made.apply(Put(Entry(f"{NAME.key_prefix}2", b"junk", 1, 1)))
    assert choices(made) == "1111"
    assert "discovery entry refused" in caplog.text


async def test_entries_that_make_no_sense_are_counted_and_what_is_known_stays() -> None:
    """Not an instance, nested too deep, under another's key, outside the layout: the watch lives."""
    store, metrics = MemoryControlPlane(), FrontendMetrics(RealEnv())
    made = Router(store, NAME, SeededEnv(), metrics=metrics)
    await store.put(instance("1").key, encode_instance(instance("1")))
    async with trio.open_nursery() as nursery:
        await nursery.start(made.run)
        strange = encode_instance(instance("7"))
        for key, value in (
            (instance("1").key, b"junk"),
            (f"{NAME.key_prefix}2", b'{"x":' + b"[" * 100_000),
            (f"{NAME.key_prefix}3", strange),
            (f"{NAME.key_prefix}7/extra", strange),
            (NAME.key_prefix, strange),
        ):
            await store.put(key, value)
        sane = instance("8")
        await store.put(sane.key, encode_instance(sane))
        known = await made.wait_instances(2)
        assert [each.id for each in known] == ["1", "8"]
        assert metrics.value("discovery_entries_refused_total", kind="instance") == 5
        nursery.cancel_scope.cancel()


async def test_only_those_named_are_chosen_among() -> None:
    made = router("1", "2", "3")
    assert {made.choose(among={"2", "3", "4"}).id for _ in range(4)} == {"2", "3"}
    assert made.choose(among={"2", "3"}, exclude=["2"]).id == "3"
    assert made.choose(among={"2"}, instance_id="2").id == "2"
    assert (made.has_live({"2"}), made.has_live({"4"}), made.has_live()) == (True, False, True)
    for among, instance_id in ((set[str](), None), ({"4"}, None), ({"2"}, "1")):
        with pytest.raises(UnavailableError):
            made.choose(among=among, instance_id=instance_id)


async def test_least_loaded_believes_the_larger_of_our_count_and_the_instance_s_word() -> None:
    events = MemoryEventPlane(MemoryBroker())
    made = Router(
        MemoryControlPlane(), NAME, SeededEnv(), policy=Policy.LEAST_LOADED, events=events
    )
    made.apply(Snapshot(1, [entry(instance(each)) for each in "123"]))

    def says(instance_id: str, active: int) -> None:
        assert made.reports is not None
        made.reports.loads.receive(instance_id, msgspec.msgpack.encode(LoadReport(active)))

    says("1", 2)
    says("2", 1)
    assert choices(made) == "3333"
    with under_way(made, "3", "3"):
        # Ours to the third are more than it has said, which is nothing.
        assert choices(made) == "2222"
        with under_way(made, "2", "2", "2"):
            says("1", 1)
            assert choices(made) == "1111"


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
