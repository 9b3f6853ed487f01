"""Connecting to NATS: where, how, and what holds the connection."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from trinamo.runtime.config.planes import NatsConfig, need_servers
from trinamo.runtime.env import Env, RealEnv
from trinamo.runtime.errors import ConfigError
from trinamo.runtime.nurseries import open_nursery
from trinamo.transports.security.sealing import Sealer

from .options import NatsOptions, tls_context
from .plane import NatsEventPlane


@asynccontextmanager
async def open_nats(
    servers: str | Sequence[str],
    section: NatsConfig = NatsConfig(),  # noqa: B008 -- frozen
    *,
    tls: ssl.SSLContext | None = None,
    env: Env | None = None,
    sealer: Sealer | None = None,
) -> AsyncIterator[NatsEventPlane]:
    """Connect to one of `servers` (`nats://host:port`, `tls://…`) and hold the connection.

    Everything else is as the section `event_plane.nats` says; `tls` is used instead of its own. `sealer`
    seals the jobs of work queues; without one they go as they are.
    Opening tries each server twice, `connect_timeout_s` each, and raises `ConnectError` if none
    takes the connection, `ConfigError` if an option is wrong or needs a package that is missing.
    Once open, it reconnects for ever; meanwhile up to `outgoing_messages_max` messages and
    64 MiB wait. A server that leaves two pings unanswered counts as gone.

    With `tls`, or an address of `tls://`, a server that offers no TLS is sent nothing, not even a
    greeting: opening raises `ConnectError`, and later the plane stays away.

    Leaving, also by cancellation, takes at most `drain_timeout_s` and a second. Several planes may
    be open in one process.
    """
    # nats-py brings asyncio along, which nobody pays for who only simulates.
    from .island import Island  # noqa: PLC0415

    addresses = (servers,) if isinstance(servers, str) else tuple(servers)
    if not addresses:
        raise ConfigError("no NATS server is given")
    try:
        need_servers(addresses)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    env = env or RealEnv()
    options = NatsOptions(addresses, section, tls or tls_context(section.tls))
    island = Island(options, rng=env.rng)
    plane = NatsEventPlane(
        island,
        inbox=f"_INBOX.{env.rng.getrandbits(128):032x}",
        env=env,
        sealer=sealer or Sealer([], env.rng),
        stream_replicas=section.stream_replicas,
    )
    async with open_nursery() as nursery:
        nursery.start_soon(island.run)
        try:
            await island.wait_open()
            yield plane
        finally:
            plane.close()
            island.close()
