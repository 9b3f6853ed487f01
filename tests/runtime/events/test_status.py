"""What instances say of themselves over the event plane is written into the router's records."""

from __future__ import annotations

import msgspec
import pytest
import trio
import trio.testing

from tests.runtime.caller.requests import NAME, SeededEnv, entry, instance
from trinamo.runtime.caller.record import InstanceStatus
from trinamo.runtime.caller.router import Router
from trinamo.runtime.errors import UnavailableError
from trinamo.runtime.events.load import StatusSource
from trinamo.runtime.planes import Put
from trinamo.runtime.protocol.discovery.candidates import Policy
from trinamo.runtime.protocol.discovery.instances import Instance
from trinamo.runtime.protocol.events.sequence import SequencedEvent, encode_event
from trinamo.transports.memory.control import MemoryControlPlane
from trinamo.transports.memory.events import MemoryBroker, MemoryEventPlane


def status(made: Router, one: Instance) -> InstanceStatus:
    return next(status for each, status, _ in made.statuses() if each.id == one.id)


async def test_a_worker_that_says_it_drains_is_passed_over_whatever_discovery_says(
    autojump_clock: trio.testing.MockClock,
) -> None:
    broker, one = MemoryBroker(), instance("1")
    events = MemoryEventPlane(broker)
    made = Router(
        MemoryControlPlane(), NAME, SeededEnv(), policy=Policy.LEAST_LOADED, events=events
    )
    source = StatusSource(MemoryEventPlane(broker), NAME, instance_id="1", incarnation=1)
    async with trio.open_nursery() as nursery:
        await nursery.start(made.run)
        made.apply(Put(entry(one)))
        nursery.start_soon(source.run)
        await trio.sleep(0.1)
        assert made.choose().id == "1"
        source.drain()
        await trio.sleep(0.1)
        assert status(made, one) is InstanceStatus.DRAINING
        with pytest.raises(UnavailableError):
            made.choose()
        # An older word of discovery that comes later.
        made.apply(Put(entry(one)))
        assert status(made, one) is InstanceStatus.DRAINING
        nursery.cancel_scope.cancel()


async def test_a_status_that_was_lost_is_asked_for(
    autojump_clock: trio.testing.MockClock,
) -> None:
    broker, one = MemoryBroker(), instance("1")
    made = Router(
        MemoryControlPlane(),
        NAME,
        SeededEnv(),
        policy=Policy.LEAST_LOADED,
        events=MemoryEventPlane(broker),
    )
    source = StatusSource(MemoryEventPlane(broker), NAME, instance_id="1", incarnation=1)
    async with trio.open_nursery() as nursery:
        await nursery.start(made.run)
        made.apply(Put(entry(one)))
        nursery.start_soon(source.run)
        await trio.sleep(0.1)
        broker.drop_next(1)
        source.drain()
        # Until the next beat tells its number.
        await trio.sleep(12)
        assert status(made, one) is InstanceStatus.DRAINING
        nursery.cancel_scope.cancel()


async def test_a_status_that_makes_no_sense_changes_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    broker, one = MemoryBroker(), instance("1")
    plane = MemoryEventPlane(broker)
    made = Router(MemoryControlPlane(), NAME, SeededEnv(), policy=Policy.LEAST_LOADED, events=plane)
    async with trio.open_nursery() as nursery:
        await nursery.start(made.run)
        made.apply(Put(entry(one)))
        body = msgspec.msgpack.encode("asleep")
        event = encode_event(SequencedEvent("1", 1, 1, body))
        topic = f"trinamo.status.{NAME.namespace}.{NAME.component}.{NAME.endpoint}"
        await plane.publish(f"{topic}.event.1", event)
        await trio.sleep(0.1)
        assert status(made, one) is InstanceStatus.LIVE
        assert made.reports is not None
        assert made.reports.states.follower.malformed == 1
        nursery.cancel_scope.cancel()


async def test_who_registers_anew_drains_no_more(autojump_clock: trio.testing.MockClock) -> None:
    """It was passed over for good, whoever had said so; one that leaves registers as draining."""
    broker, one = MemoryBroker(), instance("1")
    events = MemoryEventPlane(broker)
    made = Router(
        MemoryControlPlane(), NAME, SeededEnv(), policy=Policy.LEAST_LOADED, events=events
    )
    source = StatusSource(MemoryEventPlane(broker), NAME, instance_id="1", incarnation=1)
    async with trio.open_nursery() as nursery:
        await nursery.start(made.run)
        made.apply(Put(entry(one)))
        nursery.start_soon(source.run)
        source.drain()
        await trio.sleep(0.1)
        assert status(made, one) is InstanceStatus.DRAINING
        anew = msgspec.structs.replace(one, incarnation=one.incarnation + 1)
        made.apply(Put(entry(anew)))
        assert status(made, one) is InstanceStatus.LIVE
        made.apply(Put(entry(msgspec.structs.replace(anew, incarnation=3, draining=True))))
        assert status(made, one) is InstanceStatus.DRAINING
        nursery.cancel_scope.cancel()
