"""What carries requests and responses: in the simulator as in life, on whatever sockets there are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from trinamo.runtime.config.config import Config
from trinamo.runtime.env import Env
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.planes.transports import DataPlane
from trinamo.transports.security.sealing import Sealer, sealed_events
from trinamo.transports.tcp import (
    TcpOptions,
    open_client,
    open_request_plane,
    open_request_server,
    open_stream_server,
)

if TYPE_CHECKING:
    from trinamo.runtime.planes import EventPlane, RequestPlane, RequestServer


REQUESTS_SUBJECT: Final = "trinamo.requests"
"""Behind it an instance's id: where it takes requests by NATS."""


@asynccontextmanager
async def open_data_plane(
    config: Config,
    env: Env,
    events: EventPlane,
    options: TcpOptions,
    sealer: Sealer,
    *,
    serving: str | None,
) -> AsyncIterator[DataPlane]:
    """TCP for responses; for requests TCP, and NATS beside it if configured, by which all is sealed.

    `serving` is the id of an instance that takes requests; the server of TCP is its first.
    """
    # Whoever serves takes requests on the configured port; who only calls is called there.
    home_options = msgspec.structs.replace(options, port=0) if serving else options
    async with AsyncExitStack() as stack:
        home = await stack.enter_async_context(open_stream_server(home_options, env))
        tcp = await stack.enter_async_context(open_request_plane(options, env, home))
        planes: dict[str, RequestPlane] = {tcp.transport: tcp}
        servers: list[RequestServer] = []
        if serving:
            server = open_request_server(options, env, instance_id=serving)
            servers.append(await stack.enter_async_context(server))
        if config.data_plane.requests == "nats":
            # nats-py brings asyncio along, which most processes and worlds never need.
            from trinamo.transports.nats import NatsRequestPlane, NatsRequestServer

            nursery = await stack.enter_async_context(open_nursery())
            stack.callback(nursery.cancel_scope.cancel)
            ack_timeout_s = config.event_plane.nats.ack_timeout_s
            nats = NatsRequestPlane(events, nursery, sealer=sealer, ack_timeout_s=ack_timeout_s)
            planes = {nats.transport: nats, **planes}
            if serving:
                address = f"{REQUESTS_SUBJECT}.{serving}"
                servers.append(NatsRequestServer(events, address, sealer=sealer))
        calls = await stack.enter_async_context(open_client(options, env))
        yield DataPlane(
            request_planes=planes,
            request_servers=servers,
            response_plane=home,
            call_home=calls,
            home_address=home.address,
            secret=options.secret,
            keep_certificate=None if options.fleet is None else options.fleet.keep,
            told=sealed_events(events, sealer),
        )
