"""A TCP proxy in the test's own process, whose link can be cut and mended.

For real servers what `ControlFaults.cut_link` is for memory: connections are reset at once and
new ones are refused, while the server and its other clients go on.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
import trio.testing


class Proxy:
    """One loopback port in front of another, or of a socket of the file system."""

    def __init__(self, target: str, *, bind: str = "127.0.0.1") -> None:
        self._target = target
        self._listening = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._address = (bind, 0)
        # Drops what the server says while set, so that a write takes effect and nobody hears.
        self.is_mute = False

    @property
    def address(self) -> str:
        return f"{self._address[0]}:{self._address[1]}"

    async def cut(self) -> None:
        """Reset every connection and refuse new ones."""
        self._listening.cancel()
        await trio.testing.wait_all_tasks_blocked(0.01)

    async def mend(self) -> None:
        """Accept connections again, on the same port."""
        assert self._nursery is not None
        await self._nursery.start(self._listen)

    async def _listen(
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        with trio.CancelScope() as self._listening, trio.socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            await listener.bind(self._address)
            listener.listen()
            self._address = listener.getsockname()
            task_status.started()
            async with trio.open_nursery() as connections:
                while True:
                    client, _ = await listener.accept()
                    connections.start_soon(self._serve, trio.SocketStream(client))

    async def _serve(self, client: trio.SocketStream) -> None:
        # A lingering time of zero makes closing a reset, so no port is left in TIME_WAIT.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        async with client:
            try:
                server = await self._dial()
            except OSError:
                return
            async with server, trio.open_nursery() as nursery:
                nursery.start_soon(self._pump, client, server, nursery.cancel_scope)
                nursery.start_soon(self._pump, server, client, nursery.cancel_scope)

    async def _dial(self) -> trio.SocketStream:
        if self._target.startswith("unix:"):
            return await trio.open_unix_socket(self._target.removeprefix("unix:"))
        host, _, port = self._target.rpartition(":")
        return await trio.open_tcp_stream(host, int(port))

    async def _pump(
        self, source: trio.SocketStream, sink: trio.SocketStream, scope: trio.CancelScope
    ) -> None:
        is_reply = sink.socket.getsockname() == self._address
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for data in source:
                if not (is_reply and self.is_mute):
                    await sink.send_all(data)
        scope.cancel()


@asynccontextmanager
async def open_proxy(target: str, *, bind: str = "127.0.0.1") -> AsyncIterator[Proxy]:
    """A proxy in front of `host:port`, its link whole, for as long as inside."""
    proxy = Proxy(target, bind=bind)
    async with trio.open_nursery() as nursery:
        proxy._nursery = nursery
        await proxy.mend()
        yield proxy
        nursery.cancel_scope.cancel()
