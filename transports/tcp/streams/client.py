"""The worker's side of the response plane where it calls home: dial the caller, open, stream the answer.

On what, the caller has said in the envelope: on the link that all streams to it share, or on one that
carries this stream alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from trinamo.runtime.context import Context
from trinamo.runtime.env import Env
from trinamo.runtime.errors import ConnectError
from trinamo.runtime.logs.fields import start_nameless
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.protocol.streams.membership import Purpose
from trinamo.runtime.protocol.streams.request import Carrier, ConnectionInfo
from trinamo.transports.sockets.wire import Wire

from ..greeting import dial_member
from ..sockets import TcpOptions
from .link import Link
from .linked import OpensStreams, check_killed


class TcpClient(OpensStreams):
    """On links to the callers, which it dials."""

    def __init__(self, options: TcpOptions, env: Env, nursery: trio.Nursery) -> None:
        super().__init__(options)
        self.links: dict[Link, None] = {}
        """Those that stand."""
        self._env = env
        self._nursery = nursery
        self._shared: dict[str, _Dialled] = {}
        """By the address of the caller at their other end."""

    @property
    def open_count(self) -> int:
        """Streams held now; zero at quiescence."""
        return sum(len(link.lanes) for link in self.links)

    def ready(self, connection: ConnectionInfo) -> Link | None:
        if connection.carrier is Carrier.DEDICATED:
            return None
        held = self._shared.get(connection.address)
        return held.link if held is not None and held.takes_streams else None

    async def wait_ready(self, connection: ConnectionInfo, context: Context) -> Link:
        """See `OpensStreams`; dialled if need be: once, however many wait to share it."""
        if connection.carrier is Carrier.DEDICATED:
            # A link that is closed once it has no stream: the one that is opened before it runs.
            with context.cancelled_by_kill():
                link = Link(await self._dial(connection.address), self.options)
                link.close()
                self.links[link] = None
                start_nameless(self._nursery, self._serve, link)
                return link
            check_killed(context)
            raise AssertionError("cancelled by a kill that was none")
        address = connection.address
        held = self._shared.get(address)
        if held is None or not (held.is_dialling or held.takes_streams):
            held = self._shared[address] = _Dialled()
            start_nameless(self._nursery, self._share, address, held)
        with context.cancelled_by_kill():
            await held.settled.wait()
        check_killed(context)
        if held.error is not None:
            # An exception of its own for every stream: a shared one would mix their tracebacks.
            raise type(held.error)(held.error.message)
        if held.link is None or not held.link.takes_streams:
            raise ConnectError(f"the connection to {address} was lost as soon as it stood")
        return held.link

    async def _share(self, address: str, held: _Dialled) -> None:
        try:
            wire = await self._dial(address)
            held.link = link = Link(wire, self.options, idle_s=self.options.idle_s)
            self.links[link] = None
            held.settled.set()
            await self._serve(link)
        except ConnectError as error:
            held.error = error
        finally:
            if self._shared.get(address) is held:
                del self._shared[address]
            held.settled.set()

    async def _dial(self, address: str) -> Wire:
        wire, _ = await dial_member(address, self.options, self._env, Purpose.STREAMS)
        return wire

    async def _serve(self, link: Link) -> None:
        try:
            await link.run()
        finally:
            del self.links[link]

    def close(self) -> None:
        """Close each link once its streams are over and all is sent."""
        for link in self.links:
            link.close()


class _Dialled:
    """A link to share, from the first stream that wants it."""

    __slots__ = ("error", "link", "settled")

    def __init__(self) -> None:
        self.link: Link | None = None
        self.error: ConnectError | None = None
        self.settled = trio.Event()

    @property
    def is_dialling(self) -> bool:
        return not self.settled.is_set()

    @property
    def takes_streams(self) -> bool:
        """Whether it stands, and another stream may be opened on it."""
        return self.link is not None and self.link.takes_streams


@asynccontextmanager
async def open_client(options: TcpOptions, env: Env) -> AsyncIterator[TcpClient]:
    """The worker's end; leaving it sends what is left, and closes every link within `linger_s`."""
    async with open_nursery() as nursery:
        client = TcpClient(options, env, nursery)
        yield client
        client.close()
        nursery.cancel_scope.deadline = trio.current_time() + options.linger_s
