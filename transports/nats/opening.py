"""Connecting to NATS: where, how, and what holds the connection."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs

from trinamo.runtime.config.planes import NatsConfig, TlsConfig, need_servers
from trinamo.runtime.env import Env, RealEnv
from trinamo.runtime.errors import ConfigError
from trinamo.runtime.nurseries import open_nursery
from trinamo.transports.security.sealing import Sealer

from .plane import NatsEventPlane

NAME: Final = "trinamo"
PINGS_OUTSTANDING_MAX: Final = 2


@attrs.frozen
class NatsOptions:
    """Where and how; `servers` win over those of the section."""

    servers: Sequence[str]
    section: NatsConfig
    tls: ssl.SSLContext | None = None

    @property
    def needs_tls(self) -> bool:
        """Whether any server is to be spoken to by TLS; then all are."""
        return self.tls is not None or any(
            server.startswith(("tls://", "wss://")) for server in self.servers
        )

    def client_options(self, servers: Sequence[str]) -> dict[str, Any]:
        """The keyword arguments of nats-py's `connect` for one connection, without callbacks.

        nats-py's own reconnection is off: it gives up for good on some server errors, and hides
        how much of what was published is lost with a connection.
        """
        section = self.section
        options: dict[str, Any] = {
            "servers": list(servers),
            "name": NAME,
            "allow_reconnect": False,
            "max_reconnect_attempts": 1,
            "reconnect_time_wait": 0.01,
            "connect_timeout": section.connect_timeout_s,
            "ping_interval": section.ping_interval_s,
            "max_outstanding_pings": PINGS_OUTSTANDING_MAX,
            # Subjects were checked by the sender's side already.
            "skip_subject_validation": True,
        }
        given = {
            "user": section.username,
            "password": section.password and section.password.reveal(),
            "token": section.token and section.token.reveal(),
            "nkeys_seed": section.nkey_seed_file,
            "user_credentials": section.credentials_file,
            "tls": self.tls,
            "tls_hostname": section.tls.server_name,
        }
        return options | {key: value for key, value in given.items() if value}


def tls_context(section: TlsConfig) -> ssl.SSLContext | None:
    """What the section asks for; None without TLS, or with that of a `tls://` address alone."""
    if not section.enabled:
        return None
    context = ssl.create_default_context(cafile=section.ca_file)
    if section.cert_file is not None:
        context.load_cert_chain(section.cert_file, section.key_file)
    return context


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
