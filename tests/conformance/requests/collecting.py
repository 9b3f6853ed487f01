"""Reading a stream to its end, for tests."""

from __future__ import annotations

import trio
import trio.testing

from tests.transports.tcp.ends import Home
from trinamo.runtime.context import Context
from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.planes import ResponseChannel, ResponseSender
from trinamo.runtime.protocol.streams.request import ConnectionInfo


async def collect(channel: ResponseChannel) -> tuple[list[bytes], TrinamoError | None]:
    """All items, then the one terminal: None for a complete answer. After it nothing comes."""
    items: list[bytes] = []
    error: TrinamoError | None = None
    try:
        async for item in channel:
            items.append(item)  # noqa: PERF401 -- items before the error count
    except TrinamoError as raised:
        error = raised
    assert [item async for item in channel] == []
    return items, error


async def serve_until_killed(home: Home, connection: ConnectionInfo, context: Context) -> None:
    """A handler that streams one item and then sleeps in its scope, as in a long prefill."""
    async with home.call(connection, context) as sender:
        with context.scope:
            sender.send_nowait(b"first")
            await trio.sleep_forever()


async def wait_room(sender: ResponseSender) -> None:
    """Wait until there is room, after a `send_nowait` that was False."""
    room = trio.Event()
    sender.on_room(room.set)
    await room.wait()
