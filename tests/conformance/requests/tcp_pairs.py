"""A worker and a caller over loopback, for tests of the tcp request plane."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio
import trio.testing

from tests.conformance.requests.service import Service
from tests.transports.tcp.ends import PATIENCE_S, eventually, options
from trinamo.runtime.env import RealEnv
from trinamo.transports.tcp import (
    TcpRequestPlane,
    TcpRequestServer,
    open_request_plane,
    open_request_server,
)


@attrs.frozen
class Pair:
    """A worker and a caller over loopback."""

    service: Service
    server: TcpRequestServer
    plane: TcpRequestPlane
    address: str


@asynccontextmanager
async def connected(**changes: Any) -> AsyncIterator[Pair]:
    using = options(**changes)
    with trio.fail_after(PATIENCE_S):
        async with (
            open_request_server(using, RealEnv(), instance_id="a1") as server,
            open_request_plane(using, RealEnv()) as plane,
            trio.open_nursery() as nursery,
        ):
            service = Service()
            await nursery.start(server.serve, service)
            yield Pair(service, server, plane, server.address)
            await eventually(lambda: service.running == 0)
            nursery.cancel_scope.cancel()
