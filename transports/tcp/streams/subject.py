"""A subject of the stream server, held open for one worker's call: what both kinds of stream share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Self

import trio

from trinamo.runtime.context import Context, State
from trinamo.runtime.protocol.streams.codec import Frame, FrameDecoder
from trinamo.runtime.protocol.streams.control import Handshake
from trinamo.runtime.protocol.streams.request import ConnectionInfo

from ..sockets import TcpOptions

__all__ = ["OpenSubject"]


class OpenSubject(ABC):
    """One subject and, once the worker has called, its connection; leaving it calls `close`."""

    def __init__(
        self,
        connection: ConnectionInfo,
        context: Context,
        options: TcpOptions,
        forget: Callable[[str], None],
    ) -> None:
        self.connection = connection
        self.is_taken = False
        self._context = context
        self._options = options
        self._forget = forget
        context.on_change(self._on_context)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the subject; before the end of the stream this is Kill. Synchronous, idempotent."""
        self._forget(self.connection.subject)
        self._context.off_change(self._on_context)

    @abstractmethod
    def _on_context(self, state: State) -> None:
        """The request was stopped or killed."""

    @abstractmethod
    async def run(
        self,
        stream: trio.SocketStream,
        decoder: FrameDecoder,
        handshake: Handshake,
        frames: list[Frame],
    ) -> None:
        """Serve one connection to its end; `frames` came behind the handshake.

        Called by the server, in the server's nursery.
        """
