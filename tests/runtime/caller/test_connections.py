"""What the connections to an instance say of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from tests.runtime.caller.requests import NAME, Request, SeededEnv, ToldPlane, place
from trinamo.runtime.caller.router import Router
from trinamo.runtime.context import Context
from trinamo.runtime.errors import DisconnectedError, RemoteProtocolError
from trinamo.runtime.protocol.discovery.instances import Instance, encode_instance
from trinamo.transports.memory.control import MemoryControlPlane


def choices(made: Router, count: int = 4) -> str:
    return "".join(made.choose().id for _ in range(count))


@asynccontextmanager
async def with_planes(*planes: ToldPlane) -> AsyncIterator[Router]:
    store = MemoryControlPlane()
    # The second instance is reached by a way of its own, which always stands.
    known = {p.transport: p for p in (*planes, ToldPlane("other"))}
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


async def test_a_plane_that_can_carry_nothing_now_is_passed_over_while_another_can(
    autojump_clock: MockClock,
) -> None:
    nats, tcp = ToldPlane("nats"), ToldPlane("tcp")
    async with with_planes(nats, tcp) as made:
        instance = made.choose(instance_id="1")
        assert made.route(instance) == (nats, place("1"))
        nats.is_usable = False
        assert made.route(instance) == (tcp, place("1"))
        tcp.is_usable = False
        assert made.route(instance) == (nats, place("1"))


async def test_where_requests_take_nats_a_tcp_connection_tells_of_a_death(
    autojump_clock: MockClock,
) -> None:
    tcp = ToldPlane("tcp")
    async with with_planes(ToldPlane("nats", can_break=False), tcp) as made:
        assert set(choices(made)) == {"1", "2"}
        tcp.break_off()
        await trio.sleep(0.01)
        assert choices(made) == "2222"
        tcp.stands = True
        await trio.sleep(10)
        assert set(choices(made)) == {"1", "2"}


async def test_a_second_port_that_was_never_connected_says_nothing(
    autojump_clock: MockClock,
) -> None:
    """Requests take NATS because the way over TCP is closed: that says nothing of the worker."""
    async with with_planes(
        ToldPlane("nats", can_break=False), ToldPlane("tcp", stands=False)
    ) as made:
        await trio.sleep(60)
        assert set(choices(made)) == {"1", "2"}


async def test_the_port_that_requests_take_tells_from_the_start(
    autojump_clock: MockClock,
) -> None:
    async with with_planes(ToldPlane("tcp", stands=False)) as made:
        assert choices(made) == "2222"


async def test_one_that_answers_nonsense_stays_inhibited_over_a_reconnect(
    autojump_clock: MockClock,
) -> None:
    """A lost connection is over when there is another; what somebody says may be wrong again."""
    tcp = ToldPlane("tcp")
    async with with_planes(tcp) as made:
        for kind, chosen in ((DisconnectedError, {"1", "2"}), (RemoteProtocolError, {"2"})):
            made.fail(made.choose(instance_id="1"), kind("wrong"), Context("r"))
            tcp.break_off()
            tcp.stands = True
            await trio.sleep(1)
            assert set(choices(made)) == chosen
        await trio.sleep(5)
        assert set(choices(made)) == {"1", "2"}


async def test_one_instance_that_cannot_be_monitored_takes_no_other_along(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a plane raises for one address, the live set of the others is followed on."""

    class Broken(ToldPlane):
        async def hold(
            self, address: str, on_connected: Callable[[], None], *, instance_id: str = ""
        ) -> None:
            raise ValueError("an address that nothing was made for")

    async with with_planes(Broken("tcp")) as made:
        await trio.sleep(30)
        assert choices(made) == "2222"
        assert "cannot be monitored" in caplog.text


class Steps(trio.abc.Instrument):
    """Counts how often the tasks that watch instances run."""

    count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += task.name.endswith("Monitor.watch")


async def test_a_request_to_an_instance_at_rest_wakes_nobody_who_watches_it(
    autojump_clock: MockClock,
) -> None:
    """A fleet in which each request goes to another instance pays for no look at each."""
    async with with_planes(ToldPlane("tcp")) as made:
        one = made.choose(instance_id="1")
        await trio.sleep(60)
        steps = Steps()
        trio.lowlevel.add_instrument(steps)
        for _ in range(3):
            with made.flight(one, Request()):
                await trio.testing.wait_all_tasks_blocked()
        assert steps.count == 0
        # One look at what has become of them, and rest again.
        await trio.sleep(60)
        assert steps.count == 1
        with made.flight(one, Request()):
            await trio.sleep(9)
            # Four times in a grace, and the first look was no step.
            assert steps.count == 4
        trio.lowlevel.remove_instrument(steps)
