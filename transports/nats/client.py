"""nats-py's client with one promise more: where TLS is configured, nothing is said in clear.

A NATS server speaks first, in clear, and its INFO says whether TLS follows. nats-py believes it,
so whoever sits on the way could say `tls_required: false` and be handed the token.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 -- part of the island
import contextlib
from collections.abc import Awaitable
from typing import Any

import nats.errors
from nats.aio.client import Client


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
