"""The router: what discovery and our own faults make of the live set, and the flights it ends."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from trinamo.runtime.caller.in_flight import Flight
from trinamo.runtime.caller.router import Router
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import ConnectError, RequestError, UnavailableError
from trinamo.runtime.events.load import LoadReport, LoadTable
from trinamo.runtime.metrics.metrics import FrontendMetrics
from trinamo.runtime.planes import Delete, Entry, Put, Resync, Snapshot
from trinamo.runtime.protocol.discovery.instances import (
    EndpointName,
    Instance,
    Standing,
    encode_instance,
)
from trinamo.runtime.protocol.discovery.routing import Policy
from trinamo.runtime.protocol.streams.request import AckStatus, Answer, Envelope, RequestKind
from trinamo.transports.memory.control import ControlFaults, MemoryControlPlane
from trinamo.transports.memory.events import MemoryBroker, MemoryEventPlane

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


class Watched:
    """A router that runs on a store of its own, on a virtual clock."""

    def __init__(self, faults: ControlFaults | None = None, **settings: Any) -> None:
        self.store = MemoryControlPlane()
        self.metrics = FrontendMetrics(RealEnv())
        self.router = Router(
            MemoryControlPlane(self.store.store, faults=faults),
            NAME,
            SeededEnv(),
            metrics=self.metrics,
            silence_grace_s=8.0,
            **settings,
        )
        self.given_up: list[float] = []
        self.count: int | None = 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Watched]:
        async with trio.open_nursery() as nursery:
            await self.put()
            await nursery.start(self.router.run)
            yield self
            nursery.cancel_scope.cancel()

    async def put(self, incarnation: int = 1) -> None:
        each = instance("1", incarnation=incarnation)
        await self.store.put(each.key, encode_instance(each))

    async def delete(self) -> None:
        await self.store.delete(instance("1").key)

    @contextmanager
    def streaming(self) -> Iterator[Flight]:
        """A stream of the instance that has begun."""
        with self.router.flight(instance("1")) as flight:
            flight.heard = lambda: self.count
            flight.on_silent = lambda _: self.given_up.append(trio.current_time())
            yield flight

    @property
    def silent_count(self) -> float:
        return self.metrics.value("silent_requests_total", endpoint=str(NAME), reason="left")


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


async def test_entries_that_make_no_sense_are_counted_and_what_is_known_stays() -> None:
    """Not an instance, nested too deep, under another's key, outside the layout: the watch lives."""
    async with Watched().running() as watched:
        strange = encode_instance(instance("7"))
        for key, value in (
            (instance("1").key, b"junk"),
            (f"{NAME.key_prefix}2", b'{"x":' + b"[" * 100_000),
            (f"{NAME.key_prefix}3", strange),
            (f"{NAME.key_prefix}7/extra", strange),
            (NAME.key_prefix, strange),
        ):
            await watched.store.put(key, value)
        sane = instance("8")
        await watched.store.put(sane.key, encode_instance(sane))
        known = await watched.router.wait_instances(2)
        assert [each.id for each in known] == ["1", "8"]
        assert watched.metrics.value("discovery_entries_refused_total", kind="instance") == 5


# --- streams of an instance that was deleted -----------------------------------------------------


async def test_a_deleted_and_silent_instance_s_stream_is_given_up_after_the_grace(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with Watched().running() as watched:
        with watched.streaming():
            await trio.sleep(100)
            assert watched.given_up == []
            await watched.delete()
            await trio.sleep(100)
            assert watched.given_up == [108.0]
            assert watched.silent_count == 1


async def test_items_begin_the_grace_anew_and_a_slow_consumer_is_nobody_s_silence(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with Watched().running() as watched:
        with watched.streaming():
            await watched.delete()
            for watched.count in range(2, 12):
                await trio.sleep(6)
            watched.count = None
            await trio.sleep(60)
            assert watched.given_up == []
            watched.count = 12
            await trio.sleep(60)
            assert len(watched.given_up) == 1


async def test_an_instance_that_registers_again_keeps_its_streams(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """It lost its lease in an outage; its silence is a long prefill. A second loss counts anew."""
    async with Watched().running() as watched:
        with watched.streaming():
            for incarnation in (2, 3):
                await watched.delete()
                await trio.sleep(7)
                await watched.put(incarnation)
                await trio.sleep(50)
            assert watched.given_up == []
            await watched.delete()
            await trio.sleep(20)
            assert len(watched.given_up) == 1


async def test_a_store_that_is_away_gives_nobody_up(
    autojump_clock: trio.testing.MockClock,
) -> None:
    faults = ControlFaults()
    async with Watched(faults).running() as watched:
        with watched.streaming():
            with faults.outage():
                await watched.delete()
                await trio.sleep(100)
                assert watched.given_up == []
            await trio.sleep(20)
            assert len(watched.given_up) == 1


async def test_a_draining_instance_gives_nobody_up(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with Watched().running() as watched:
        with watched.streaming():
            each = instance("1", draining=True)
            await watched.store.put(each.key, encode_instance(each))
            await trio.sleep(100)
            assert watched.given_up == []


async def test_a_vigil_ends_with_the_last_request_of_its_instance(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with Watched().running() as watched:
        await trio.testing.wait_all_tasks_blocked()
        before = trio.lowlevel.current_statistics().tasks_living
        with watched.streaming():
            await watched.delete()
            await trio.sleep(1)
            assert trio.lowlevel.current_statistics().tasks_living >= before
        await trio.sleep(10)
        assert trio.lowlevel.current_statistics().tasks_living < before + 1
        assert watched.given_up == []


# --- the connection as a witness -----------------------------------------------------------------


async def test_a_plane_that_can_carry_nothing_now_is_passed_over_while_another_can(
    autojump_clock: MockClock,
) -> None:
    nats, tcp = Witness("nats"), Witness("tcp")
    async with witnessed(nats, tcp) as made:
        instance = made.choose(instance_id="1")
        assert made.route(instance) == (nats, place("1"))
        nats.is_usable = False
        assert made.route(instance) == (tcp, place("1"))
        tcp.is_usable = False
        assert made.route(instance) == (nats, place("1"))


def place(instance_id: str) -> str:
    """The address of an instance, whatever the transport."""
    return f"host-{instance_id}:1"


class Witness:
    """A request plane whose connections stand or not, as told; it carries no request but a probe."""

    def __init__(self, transport: str, *, can_tell: bool = True, stands: bool = True) -> None:
        self.transport = transport
        self.is_usable = True
        self._can_tell = can_tell
        self.stands = stands
        self.answer: AckStatus | None = AckStatus.ACCEPTED
        self.probe_count = 0
        self._lost = trio.Event()

    async def hold(
        self, address: str, on_connected: Callable[[], None], *, instance_id: str = ""
    ) -> None:
        await trio.lowlevel.checkpoint()
        if not self.stands:
            raise ConnectError(f"{address} refuses")
        on_connected()
        if self._can_tell:
            await self._lost.wait()
        else:
            await trio.sleep_forever()

    def break_off(self) -> None:
        self.stands = False
        self._lost.set()
        self._lost = trio.Event()

    async def send(self, address: str, envelope: Envelope, payload: bytes) -> Answer:
        assert (envelope.kind, payload) == (RequestKind.PROBE, b"")
        assert (envelope.endpoint, place(envelope.instance_id)) == (str(NAME), address)
        self.probe_count += 1
        await trio.lowlevel.checkpoint()
        if self.answer is None:
            await trio.sleep_forever()
            raise AssertionError
        return Answer(id=envelope.id, status=self.answer)

    async def call(self, address: str, envelope: Envelope, payload: bytes) -> bytes:
        raise AssertionError


@asynccontextmanager
async def witnessed(*planes: Witness) -> AsyncIterator[Router]:
    store = MemoryControlPlane()
    # The second instance is reached by a way of its own, which always stands.
    known = {p.transport: p for p in (*planes, Witness("other"))}
    made = Router(store, NAME, SeededEnv(), request_planes=known)
    async with trio.open_nursery() as nursery:
        await nursery.start(made.run)
        for each in ("1", "2"):
            spoken = [p.transport for p in planes] if each == "1" else ["other"]
            one = Instance(
                endpoint=str(NAME), id=each, transports=dict.fromkeys(spoken, place(each))
            )
            await store.put(one.key, encode_instance(one))
        await made.wait_instances(2)
        await trio.sleep(1)
        yield made
        nursery.cancel_scope.cancel()


async def test_where_requests_take_nats_a_tcp_connection_tells_of_a_death(
    autojump_clock: trio.testing.MockClock,
) -> None:
    tcp = Witness("tcp")
    async with witnessed(Witness("nats", can_tell=False), tcp) as made:
        assert set(choices(made)) == {"1", "2"}
        tcp.break_off()
        await trio.sleep(0.01)
        assert choices(made) == "2222"
        tcp.stands = True
        await trio.sleep(10)
        assert set(choices(made)) == {"1", "2"}


async def test_a_second_port_that_never_stood_is_no_witness(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Requests take NATS because the way over TCP is closed: that says nothing of the worker."""
    async with witnessed(Witness("nats", can_tell=False), Witness("tcp", stands=False)) as made:
        await trio.sleep(60)
        assert set(choices(made)) == {"1", "2"}


async def test_the_port_that_requests_take_is_a_witness_from_the_start(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with witnessed(Witness("tcp", stands=False)) as made:
        assert choices(made) == "2222"


async def test_one_that_answers_nonsense_stays_inhibited_over_a_reconnect(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A lost connection is over when there is another; what somebody says may be wrong again."""
    tcp = Witness("tcp")
    async with witnessed(tcp) as made:
        for is_nonsensical, chosen in ((False, {"1", "2"}), (True, {"2"})):
            made.inhibit(made.choose(instance_id="1"), is_nonsensical=is_nonsensical)
            tcp.break_off()
            tcp.stands = True
            await trio.sleep(1)
            assert set(choices(made)) == chosen
        await trio.sleep(5)
        assert set(choices(made)) == {"1", "2"}


async def test_an_answer_ends_the_inhibition_of_one_that_answered_nonsense() -> None:
    made = router("1", "2")
    made.inhibit(instance("1"), is_nonsensical=True)
    made.restore(instance("1"))
    assert set(choices(made)) == {"1", "2"}
    # Nor does it make the next inhibition one of that kind.
    made.inhibit(instance("1"))
    made._live.suspect("1")
    made._live.trust("1")
    assert set(choices(made)) == {"1", "2"}


async def test_one_instance_that_cannot_be_followed_takes_no_other_along(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a plane raises for one address, the live set of the others is followed on."""

    class Broken(Witness):
        async def hold(
            self, address: str, on_connected: Callable[[], None], *, instance_id: str = ""
        ) -> None:
            raise ValueError("an address that nothing was made for")

    async with witnessed(Broken("tcp")) as made:
        await trio.sleep(30)
        assert choices(made) == "2222"
        assert "cannot be followed" in caplog.text


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
    loads = LoadTable(MemoryEventPlane(MemoryBroker()), NAME)
    made = Router(MemoryControlPlane(), NAME, SeededEnv(), policy=Policy.LEAST_LOADED, loads=loads)
    made.apply(Snapshot(1, [entry(instance(each)) for each in "123"]))

    def says(instance_id: str, active: int) -> None:
        loads._take(instance_id, msgspec.msgpack.encode(LoadReport(active)))

    says("1", 2)
    says("2", 1)
    assert choices(made) == "3333"
    with made.flight(instance("3")), made.flight(instance("3")):
        # Ours to the third are more than it has said, which is nothing.
        assert choices(made) == "2222"
        with made.flight(instance("2")), made.flight(instance("2")), made.flight(instance("2")):
            says("1", 1)
            assert choices(made) == "1111"


# --- deleted, but reached ------------------------------------------------------------------------


class Reached:
    """One instance with a connection to it, and a request that waits for its first item."""

    def __init__(self, *, linger_s: float | None = 10.0) -> None:
        self.tcp = Witness("tcp")
        self.store = MemoryControlPlane()
        self.metrics = FrontendMetrics(RealEnv())
        self.router = Router(
            self.store,
            NAME,
            SeededEnv(),
            linger_s=linger_s,
            silence_grace_s=8.0,
            metrics=self.metrics,
            request_planes={"tcp": self.tcp},
        )
        self.gone: list[float] = []
        self.silent: list[float] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Reached]:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.router.run)
            await self.put()
            await self.router.wait_instances()
            with self.flight() as flight:
                flight.on_gone = lambda: self.gone.append(trio.current_time())
                # Until the connection stands; the clock then shows 1.
                await trio.sleep(1)
                yield self
            nursery.cancel_scope.cancel()

    @contextmanager
    def flight(self) -> Iterator[Flight]:
        with self.router.flight(instance("1")) as flight:
            yield flight

    async def put(self, *, incarnation: int = 1, draining: bool = False) -> None:
        one = Instance(
            endpoint=str(NAME),
            id="1",
            transports={"tcp": place("1")},
            incarnation=incarnation,
            draining=draining,
        )
        await self.store.put(one.key, encode_instance(one))
        await trio.testing.wait_all_tasks_blocked()

    async def delete(self) -> None:
        await self.store.delete(instance("1").key)
        await trio.testing.wait_all_tasks_blocked()

    @property
    def lingering_count(self) -> float:
        return self.metrics.value("lingering_instances", endpoint=str(NAME))

    @property
    def live_count(self) -> float:
        return self.metrics.value("live_instances", endpoint=str(NAME))


async def test_a_lost_lease_changes_nothing_if_the_worker_answers_and_registers_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    probed = 0
    async with Reached().running() as reached:
        for incarnation in (2, 3):
            await reached.delete()
            assert (reached.lingering_count, reached.live_count) == (1, 1)
            ((_, standing, _),) = reached.router.standings()
            assert standing is Standing.LINGERING
            await trio.sleep(9)
            assert choices(reached.router) == "1111"
            await reached.put(incarnation=incarnation)
            assert (reached.lingering_count, reached.live_count) == (0, 1)
            probed = reached.tcp.probe_count
            await trio.sleep(60)
            assert reached.tcp.probe_count == probed
        assert probed >= 12
        assert reached.gone == []


async def test_who_does_not_register_again_within_the_grace_is_dropped(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with Reached().running() as reached:
        await reached.delete()
        await trio.sleep(60)
        assert reached.gone == [11.0]
        assert (reached.router.instances, reached.lingering_count) == ([], 0)


async def test_a_stopped_process_s_connection_stands_but_it_is_dropped_after_one_probe(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with Reached().running() as reached:
        reached.tcp.answer = None
        await reached.delete()
        await trio.sleep(60)
        assert (reached.gone, reached.tcp.probe_count) == ([2.0], 1)


async def test_one_that_stops_while_it_lingers_is_found_out(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with Reached().running() as reached:
        await reached.delete()
        await trio.sleep(4)
        reached.tcp.answer = None
        await trio.sleep(4)
        assert len(reached.gone) == 1
        assert 5 < reached.gone[0] <= 8


@pytest.mark.parametrize("answer", [AckStatus.DRAINING, AckStatus.UNKNOWN_ENDPOINT])
async def test_one_that_says_it_leaves_or_is_another_is_dropped_at_once(
    answer: AckStatus, autojump_clock: trio.testing.MockClock
) -> None:
    async with Reached().running() as reached:
        reached.tcp.answer = answer
        await reached.delete()
        assert reached.gone == [1.0]


async def test_the_end_of_the_connection_ends_the_lingering(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with Reached().running() as reached:
        await reached.delete()
        await trio.sleep(2)
        reached.tcp.break_off()
        await trio.sleep(10)
        assert reached.gone == [3.0]
        await reached.put(incarnation=2)
        assert [each.incarnation for each in reached.router.instances] == [2]


@pytest.mark.parametrize("why", ["draining", "broken", "not wanted"])
async def test_who_drains_or_is_not_reached_is_dropped_as_soon_as_discovery_says(
    why: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with Reached(linger_s=None if why == "not wanted" else 10.0).running() as reached:
        if why == "draining":
            await reached.put(draining=True)
        if why == "broken":
            reached.tcp.break_off()
            await trio.testing.wait_all_tasks_blocked()
        await reached.delete()
        assert (reached.gone, reached.tcp.probe_count) == ([1.0], 0)


async def test_a_stream_of_one_that_lingers_must_not_be_silent_either(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The rule of silence counts from the deletion, also for what begins while it lingers."""
    async with Reached().running() as reached:
        await reached.delete()
        await trio.sleep(2)
        with reached.flight() as flight:
            flight.heard = lambda: 1
            flight.on_silent = lambda _: reached.silent.append(trio.current_time())
            await trio.sleep(30)
        assert len(reached.silent) == 1
        assert 11 <= reached.silent[0] <= 15
        assert reached.gone == [11.0]


async def test_the_news_that_somebody_came_left_or_is_leaving_can_be_waited_for(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with Reached().running() as reached:
        seen = await reached.router.wait_change(-1)
        patience = [reached.router.patience_s(each) for each in ("1", "2")]
        for news in (
            reached.delete,
            lambda: reached.put(incarnation=2),
            lambda: reached.put(incarnation=3),
        ):
            await news()
            with trio.move_on_after(0.1) as waiting:
                await reached.router.wait_change(seen)
            assert waiting.cancelled_caught
        patience.append(reached.router.patience_s("1"))
        with trio.fail_after(1):
            await reached.put(draining=True)
            after = await reached.router.wait_change(seen)
            patience.append(reached.router.patience_s("1"))
            await reached.delete()
            assert await reached.router.wait_change(after) > after > seen
        assert patience == [10.0, 0.0, 10.0, 0.0]


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
