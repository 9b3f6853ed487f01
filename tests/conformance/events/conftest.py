"""Fixtures that the suites in this folder share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import trio

from tests.conformance.events.receiving import BROKERS, DEBIAN_SERVER
from tests.conformance.simulated import SimulatedBroker
from tests.transports.nats.brokers import (
    Broker,
    MemoryBrokerUnderTest,
    NatsServerUnderTest,
    fresh_subject,
    private_server,
)
from tests.worlds import in_world
from trinamo.runtime.planes import EventPlane


@pytest.fixture(scope="module")
def debian_url() -> Iterator[str]:
    with private_server(DEBIAN_SERVER) as server:
        yield server.url


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    if request.param == "memory":
        yield MemoryBrokerUnderTest()
    elif request.param == "simulated":
        simulated = SimulatedBroker()
        with in_world(simulated.world):
            yield simulated
    elif request.param == "nats":
        yield NatsServerUnderTest(request.getfixturevalue("nats_server").url)
    else:
        yield NatsServerUnderTest(request.getfixturevalue("debian_url"))


@pytest.fixture
async def plane(broker: Broker) -> AsyncIterator[EventPlane]:
    with trio.fail_after(30):
        async with broker.connect() as plane:
            yield plane


@pytest.fixture
async def other(broker: Broker) -> AsyncIterator[EventPlane]:
    """A second process's plane on the same broker."""
    with trio.fail_after(30):
        async with broker.connect() as plane:
            yield plane


@pytest.fixture
def subject() -> str:
    return fresh_subject()
