"""What nats-py's client leaves to its user: to be sure, to part in good order, to part at once.

asyncio-flavoured, called by `island.py` alone. `_writer` is the one place that looks at a private
name of nats-py; without it an abort does nothing, and the loop's end closes the socket.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 -- part of the island
import contextlib
from collections.abc import Awaitable
from typing import Any

import nats.errors

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
