"""The worker's side of the data plane: dial the caller, greet, stream the answer home.

On what, the caller has said in the envelope: on the link that all streams to it share, or on a
connection of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

import trio

from trinamo.runtime.context import Context
from trinamo.runtime.env import Env
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.protocol.streams.request import Carrier, ConnectionInfo

from ..sockets import TcpOptions
from .dedicated.worker import open_input, open_response
from .input_receiver import InputReceiver
from .linked import LinkedInput, LinkedResponse, WorkerLinks
from .response_sender import TcpResponseSender

T = TypeVar("T")


class TcpClient:
    """A `CallHome` over TCP."""

    def __init__(self, options: TcpOptions, env: Env, nursery: trio.Nursery) -> None:
        self.options = options
        self.links = WorkerLinks(options, env, nursery)
        self._dedicated_count = 0

    @property
    def link_count(self) -> int:
        """Links that stand now, or are being made."""
        return self.links.link_count

    @property
    def open_count(self) -> int:
        """Streams held now; zero at quiescence."""
        return self._dedicated_count + self.links.stream_count

    def call_home(
        self, connection: ConnectionInfo, context: Context
    ) -> AbstractAsyncContextManager[TcpResponseSender]:
        """Call the caller, greet, and hold the response stream until all that is queued is sent.

        The caller's Stop and Kill, and its death, reach `context` while inside. After a Kill from
        the caller nothing more is sent. Leaving without `finish` or `fail` ends the stream without
        an end mark, which the caller takes for this worker's death.

        Raises `ConnectError` if the caller cannot be reached and `KilledError` if the context is
        killed before that.
        """
        if connection.carrier is Carrier.MULTIPLEXED:
            return LinkedResponse(self.links, self.options, connection, context)
        return self._counted(open_response(connection, context, self.options))

    def receive_input(
        self, connection: ConnectionInfo, context: Context
    ) -> AbstractAsyncContextManager[InputReceiver]:
        """Call for a request stream; iterate the caller's input items.

        The iterator ends after Sentinel. Stop and Kill reach `context`; a stream that ends without
        an end mark kills it, since truncated input is no input.
        """
        if connection.carrier is Carrier.MULTIPLEXED:
            return LinkedInput(self.links, self.options, connection, context)
        return self._counted(open_input(connection, context, self.options))

    @asynccontextmanager
    async def _counted(self, stream: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
        self._dedicated_count += 1
        try:
            async with stream as end:
                yield end
        finally:
            self._dedicated_count -= 1


@asynccontextmanager
async def open_client(options: TcpOptions, env: Env) -> AsyncIterator[TcpClient]:
    """The worker's end; leaving it sends what is left, and closes every link within `linger_s`."""
    async with open_nursery() as nursery:
        client = TcpClient(options, env, nursery)
        yield client
        client.links.close()
        nursery.cancel_scope.deadline = trio.current_time() + options.linger_s
