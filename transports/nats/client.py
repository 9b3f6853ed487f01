"""nats-py's client with one promise more: where TLS is configured, nothing is said in clear.

A NATS server speaks first, in clear, and its INFO says whether TLS follows. nats-py believes it,
so whoever sits on the way could say `tls_required: false` and be handed the token.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 -- part of the island
import contextlib
import ssl
from collections.abc import Awaitable, Sequence
from typing import Any, Final

import attrs
import nats.errors
from nats.aio.client import Client

from trinamo.runtime.config.planes import NatsConfig, TlsConfig


class TlsRefusedError(nats.errors.Error):  # type: ignore[misc]  # nats-py has no types
    """The server, or somebody on the way to it, does not offer the TLS that is configured."""

    def __str__(self) -> str:
        return "TLS is configured and the server offers none; nothing was sent to it"


class NatsClient(Client):  # type: ignore[misc]  # nats-py has no types
    """A `Client` that, if it needs TLS, greets only over TLS."""

    def __init__(self, *, needs_tls: bool) -> None:
        super().__init__()
        self._needs_tls = needs_tls

    @property
    def has_jetstream(self) -> bool:
        """Whether the server says that it runs JetStream."""
        return bool(self._server_info.get("jetstream"))

    def _connect_command(self) -> bytes:
        # The first bytes that nats-py sends by itself, and the credentials are in them.
        if self._needs_tls and not _is_encrypted(self._transport):
            raise TlsRefusedError
        return bytes(super()._connect_command())


def _is_encrypted(transport: Any) -> bool:
    """Whether TLS is established. What cannot be told counts as clear text."""
    writer = getattr(transport, "_io_writer", None)
    if writer is not None:
        return writer.get_extra_info("ssl_object") is not None
    return bool(getattr(transport, "_using_tls", False))  # A WebSocket.


# What nats-py's client leaves to its user: to be sure, to part in good order, to part at once.
#
# asyncio-flavoured, called by `island.py` alone. `_writer` is the one place that looks at a private
# name of nats-py; without it an abort does nothing, and the loop's end closes the socket.

SETTLE_TRIES = 100
CONFIRM_TIMEOUT_S = 10.0

CONNECTION_ERRORS = (nats.errors.Error, OSError, asyncio.TimeoutError)
"""All that nats-py raises when it is the network's or the server's doing."""


async def wait_for(awaitable: Awaitable[Any], timeout_s: float) -> None:
    """Wait until done or time is up, whichever is first."""
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if task.done():
            task.result()
    finally:
        task.cancel()


async def settle(client: Any) -> None:
    """Return once the server has processed all that was given to `client` so far.

    nats-py writes the ping of a `flush` past the commands that still wait for its writer task, so
    those must be gone first.
    """
    for _ in range(SETTLE_TRIES):
        await asyncio.sleep(0)
        if client.is_closed or client.pending_data_size == 0:
            break
        await asyncio.sleep(0.001)
    await client.flush(CONFIRM_TIMEOUT_S)


async def say_goodbye(client: Any, closed: asyncio.Event, timeout_s: float) -> None:
    if _writer(client) is None:
        return  # It never got as far as a socket.
    if client.is_connected:
        with contextlib.suppress(*CONNECTION_ERRORS):
            await wait_for(settle(client), timeout_s / 2)
    await client.close()
    # If nats-py is closing it already, `close` returns before the socket is closed.
    await closed.wait()


def _writer(client: Any) -> Any:
    return getattr(getattr(client, "_transport", None), "_io_writer", None)


def abort(client: Any) -> None:
    """Close the socket without flushing. nats-py has no public way to do that."""
    writer = _writer(client)
    if writer is not None:
        writer.transport.abort()


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
