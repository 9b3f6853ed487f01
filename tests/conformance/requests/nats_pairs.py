"""A worker and a caller of the request plane over subjects, each with an event plane of its own."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import trio

from tests.conformance.requests.service import Service
from tests.transports.nats.brokers import Broker
from trinamo.conformance.events import fresh_subject
from trinamo.runtime.planes import EventPlane
from trinamo.transports.nats import NatsRequestPlane, NatsRequestServer
from trinamo.transports.nats.requests import about_request
from trinamo.transports.security.sealing import Sealer

SECRET = bytes(range(32))
RNG = random.Random(1)


@attrs.frozen
class Pair:
    """A worker and a caller, each with an event plane of its own."""

    service: Service
    server: NatsRequestServer
    plane: NatsRequestPlane
    events: EventPlane
    address: str
    nursery: trio.Nursery
    sealer: Sealer
    """Of the caller."""

    def said(self, frame: bytes) -> bytes:
        """A frame to the worker, as the caller seals it."""
        return self.sealer.seal(frame, about_request(self.address))


def member(secret: bytes) -> Sealer:
    return Sealer([secret], RNG)


@asynccontextmanager
async def connected(
    broker: Broker, secret: bytes = b"", *, requests_max: int = 64
) -> AsyncIterator[Pair]:
    address = f"trinamo.requests.{fresh_subject()}"
    with trio.fail_after(120):
        async with (
            broker.connect() as mine,
            broker.connect() as theirs,
            trio.open_nursery() as nursery,
        ):
            server = NatsRequestServer(
                theirs, address, sealer=member(secret), requests_max=requests_max
            )
            service, sealer = Service(), member(secret)
            await nursery.start(server.serve, service)
            plane = NatsRequestPlane(mine, nursery, sealer=sealer)
            # As if discovery named the worker, so that no request is lost while the broker stalls.
            nursery.start_soon(plane.hold, address, lambda: None)
            yield Pair(service, server, plane, mine, address, nursery, sealer)
            nursery.cancel_scope.cancel()
