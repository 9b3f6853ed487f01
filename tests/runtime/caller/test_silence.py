"""Silent workers that discovery names are probed: whom that frees, and who loses nothing by it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
import trio
import trio.testing

from tests.runtime.caller.requests import NAME, Request, SeededEnv, ToldPlane, place
from trinamo.runtime.caller.router import Router
from trinamo.runtime.env import RealEnv
from trinamo.runtime.http.metrics import FrontendMetrics
from trinamo.runtime.planes import RequestPlane
from trinamo.runtime.protocol.discovery.instances import Instance, encode_instance
from trinamo.runtime.protocol.streams.request import AckStatus
from trinamo.transports.memory.control import MemoryControlPlane

GRACE_S = 8.0
BOUND_S = 2.25 * GRACE_S


class Listening:
    """A router with the instances 1 and 2, of which 1 can be asked, and streams of instance 1."""

    def __init__(self, *planes: ToldPlane, stale_grace_s: float = 10.0) -> None:
        self.planes = planes or (ToldPlane(),)
        self.plane = self.planes[0]
        self.store = MemoryControlPlane()
        self.metrics = FrontendMetrics(RealEnv())
        self.env = SeededEnv()
        ways = (*self.planes, ToldPlane("other"))
        spoken: dict[str, RequestPlane] = {each.transport: each for each in ways}
        self.router = Router(
            self.store,
            NAME,
            self.env,
            silence_grace_s=GRACE_S,
            stale_grace_s=stale_grace_s,
            metrics=self.metrics,
            request_planes=spoken,
        )
        self.requests: dict[str, Request] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Listening]:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.router.run)
            await self.put("1")
            await self.put("2")
            await self.router.wait_instances(2)
            await trio.testing.wait_all_tasks_blocked()
            yield self
            assert self.router.in_flight == 0
            nursery.cancel_scope.cancel()

    async def put(self, instance_id: str, **changes: Any) -> None:
        one = self.instance(instance_id, **changes)
        await self.store.put(one.key, encode_instance(one))
        await trio.testing.wait_all_tasks_blocked()

    async def delete(self) -> None:
        await self.store.delete(self.instance("1").key)
        await trio.testing.wait_all_tasks_blocked()

    def instance(self, instance_id: str, **changes: Any) -> Instance:
        ways = [each.transport for each in self.planes] if instance_id == "1" else ["other"]
        spoken = dict.fromkeys(ways, place(instance_id))
        return Instance(endpoint=str(NAME), id=instance_id, transports=spoken, **changes)

    def stream(self, name: str = "a", *, is_waiting: bool = False) -> AbstractContextManager[None]:
        """One of which one item has come so far."""
        request = self.requests[name] = Request(is_waiting=is_waiting)
        return self.router.flight(self.instance("1"), request)

    async def speak(self, name: str, *, every_s: float, until_s: float) -> None:
        while trio.current_time() < until_s:
            self.requests[name].came = (self.requests[name].came or 0) + 1
            await trio.sleep(every_s)

    @property
    def ended(self) -> dict[str, tuple[float, str]]:
        return {name: each.ended[0] for name, each in self.requests.items() if each.ended}

    @property
    def chosen(self) -> set[str]:
        return {self.router.choose().id for _ in range(4)}

    def given_up(self, reason: str) -> float:
        return self.metrics.value("silent_requests_total", endpoint=str(NAME), reason=reason)


async def test_one_that_answers_nobody_loses_its_silent_requests_in_two_graces_and_a_quarter(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with Listening().running() as each:
        each.plane.status = None
        with each.stream():
            await trio.sleep(100)
        ended_at, why = each.ended["a"]
        assert 2 * GRACE_S <= ended_at <= BOUND_S
        assert "does not answer" in why
        assert (each.given_up("unanswered"), each.given_up("left")) == (1, 0)


async def test_nobody_is_asked_who_was_heard_from_within_the_grace(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with Listening().running() as each, trio.open_nursery() as nursery:
        with each.stream():
            nursery.start_soon(lambda: each.speak("a", every_s=0.9 * GRACE_S, until_s=200))
            await trio.sleep(200)
        assert each.plane.asked_at == []


@pytest.mark.parametrize("status", AckStatus)
async def test_any_answer_is_life_and_a_slow_worker_is_asked_calmly_for_as_long_as_it_is_silent(
    status: AckStatus, autojump_clock: trio.testing.MockClock
) -> None:
    async with Listening().running() as each:
        each.plane.status = status
        with each.stream():
            await trio.sleep(30 * GRACE_S)
            pauses = [b - a for a, b in pairwise(each.plane.asked_at)]
            each.requests["a"].came = 2
            asked = len(each.plane.asked_at)
            await trio.sleep(0.9 * GRACE_S)
            assert len(each.plane.asked_at) <= asked + 1
        assert each.ended == {}
        assert 4 * 28 <= asked <= 4 * 30
        assert min(pauses) == max(pauses) == GRACE_S / 4


async def test_one_answer_in_two_graces_is_enough_and_may_come_late(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A loop that runs once in a while answers the probe that waits for it then."""
    async with Listening().running() as each:
        with each.stream():
            for _ in range(10):
                each.plane.status = None
                await trio.sleep(1.2 * GRACE_S)
                each.plane.status, each.plane.delay_s = AckStatus.ACCEPTED, 0.24 * GRACE_S
                await trio.sleep(0.5 * GRACE_S)
                each.plane.delay_s = 0.0
        assert each.ended == {}


async def test_an_item_on_another_stream_of_it_is_a_sign_of_life(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Its requests cannot be answered, but it works: only the plane in between is at fault."""
    async with Listening().running() as each, trio.open_nursery() as nursery:
        each.plane.status = None
        with each.stream("silent"), each.stream("lively"):
            nursery.start_soon(lambda: each.speak("lively", every_s=1, until_s=100))
            await trio.sleep(100)
            assert each.ended == {}
            await trio.sleep(2 * BOUND_S)
        assert {*each.ended} == {"silent", "lively"}
        assert all(at <= 100 + BOUND_S + GRACE_S / 4 for at, _ in each.ended.values())


async def test_only_those_are_given_up_that_were_silent_and_could_speak(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with Listening().running() as each:
        each.plane.status = None
        with each.stream("old"), each.stream("unread"):
            each.requests["unread"].came = None
            await trio.sleep(1.9 * GRACE_S)
            with each.stream("young"):
                each.requests["young"].came = 0
                await trio.sleep(0.4 * GRACE_S)
                assert {*each.ended} == {"old"}
                await trio.sleep(GRACE_S)
                assert {*each.ended} == {"old", "young"}
        assert each.given_up("unanswered") == 2


async def test_somebody_else_at_its_address_ends_the_silent_ones_at_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with Listening().running() as each:
        each.plane.status, each.plane.life = AckStatus.UNKNOWN_ENDPOINT, "2"
        with each.stream():
            await trio.sleep(100)
        ended_at, why = each.ended["a"]
        assert ended_at <= 1.25 * GRACE_S
        assert "another answers" in why
        assert each.given_up("replaced") == 1


async def test_a_worker_that_does_not_say_who_it_is_is_believed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with Listening().running() as each:
        each.plane.life = ""
        with each.stream():
            await trio.sleep(100)
        assert each.ended == {}


async def test_one_task_asks_however_many_are_silent_and_it_ends_with_them(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with Listening().running() as each:
        with each.stream("a"), each.stream("b"), each.stream("c"):
            before = trio.lowlevel.current_statistics().tasks_living
            await trio.sleep(10.1 * GRACE_S)
            assert len(each.plane.asked_at) <= 4 * 10
            assert trio.lowlevel.current_statistics().tasks_living == before + 1
        await trio.sleep(GRACE_S)
        assert trio.lowlevel.current_statistics().tasks_living == before
        asked = len(each.plane.asked_at)
        await trio.sleep(100)
        assert len(each.plane.asked_at) == asked


async def test_while_no_plane_can_carry_a_probe_nothing_is_judged(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with Listening().running() as each:
        each.plane.status = None
        with each.stream():
            await trio.sleep(1.9 * GRACE_S)
            each.plane.is_usable = False
            await trio.sleep(10 * GRACE_S)
            assert each.ended == {}
            assert "cannot be asked" in caplog.text
            each.plane.is_usable = True
            usable_at = trio.current_time()
            await trio.sleep(100)
        ended_at, _ = each.ended["a"]
        assert usable_at + GRACE_S <= ended_at <= usable_at + 1.5 * GRACE_S


async def test_while_nats_is_away_the_connection_that_stands_is_asked_over(
    autojump_clock: trio.testing.MockClock,
) -> None:
    nats, tcp = ToldPlane("nats"), ToldPlane("tcp")
    async with Listening(nats, tcp).running() as each:
        nats.is_usable, tcp.status = False, None
        with each.stream():
            await trio.sleep(BOUND_S)
        assert {*each.ended} == {"a"}
        assert nats.asked_at == []


async def test_a_port_that_never_stood_proves_nothing_while_nats_is_away(
    autojump_clock: trio.testing.MockClock,
) -> None:
    nats, tcp = ToldPlane("nats"), ToldPlane("tcp", stands=False)
    async with Listening(nats, tcp).running() as each:
        nats.is_usable = False
        with each.stream():
            await trio.sleep(10 * GRACE_S)
        assert (each.ended, tcp.asked_at) == ({}, [])


async def test_an_answer_by_any_way_is_enough(autojump_clock: trio.testing.MockClock) -> None:
    nats, tcp = ToldPlane("nats"), ToldPlane("tcp")
    async with Listening(nats, tcp).running() as each:
        nats.status = None
        with each.stream():
            await trio.sleep(100)
        assert each.ended == {}
        assert len(nats.asked_at) == len(tcp.asked_at) > 4
        assert (nats.open_count, tcp.open_count) == (0, 0)


async def test_who_does_not_answer_is_passed_over_until_it_does(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A request sent to it would wait for its ACK, and there is somebody else to ask."""
    caplog.set_level("INFO")
    async with Listening().running() as each:
        each.plane.status = None
        with each.stream():
            await trio.sleep(1.6 * GRACE_S)
            assert each.chosen == {"2"}
            await trio.sleep(GRACE_S)
        assert {*each.ended} == {"a"}
        await trio.sleep(5 * GRACE_S)
        assert each.chosen == {"2"}
        each.plane.status = AckStatus.ACCEPTED
        await trio.sleep(GRACE_S)
        assert each.chosen == {"1", "2"}
        assert "generate answers" in caplog.text


async def test_it_is_asked_on_if_discovery_deletes_it_meanwhile(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Otherwise a deletion, which says more, would give its requests more time."""
    async with Listening().running() as each:
        each.plane.status = None
        with each.stream():
            await trio.sleep(1.9 * GRACE_S)
            await each.delete()
            await trio.sleep(100)
        assert each.ended["a"][0] <= BOUND_S


async def test_a_stale_one_has_its_own_probes_and_no_others(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with Listening(stale_grace_s=100).running() as each:
        with each.stream(is_waiting=True):
            await each.delete()
            await trio.sleep(5 * GRACE_S)
        assert each.ended == {}
        assert "instance.stale" in each.env.notes
        assert "router.probe" not in each.env.notes


async def test_one_that_registers_again_begins_anew(autojump_clock: trio.testing.MockClock) -> None:
    async with Listening().running() as each:
        each.plane.status = None
        with each.stream():
            await trio.sleep(1.9 * GRACE_S)
            await each.delete()
            await each.put("1", incarnation=2)
            returned_at = trio.current_time()
            await trio.sleep(100)
        assert returned_at + 2 * GRACE_S <= each.ended["a"][0] <= returned_at + 2.5 * GRACE_S


async def test_one_that_drains_is_asked_too(autojump_clock: trio.testing.MockClock) -> None:
    async with Listening().running() as each:
        await each.put("1", draining=True)
        each.plane.status = AckStatus.DRAINING
        with each.stream():
            await trio.sleep(100)
            assert each.ended == {}
            each.plane.status = None
            await trio.sleep(BOUND_S)
        assert {*each.ended} == {"a"}


async def test_what_waits_for_its_first_item_is_freed_by_no_answer_but_not_by_a_deletion(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A deleted instance that is stale has its own rule for those."""
    async with Listening().running() as each:
        with each.stream(is_waiting=True):
            await each.delete()
            await trio.sleep(1.2 * GRACE_S)
            assert each.ended == {}
            await each.put("1", incarnation=2)
            each.plane.status = None
            await trio.sleep(2.5 * GRACE_S)
        assert {*each.ended} == {"a"}
