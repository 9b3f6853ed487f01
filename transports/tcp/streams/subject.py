"""A subject of the stream server, held open for one worker's call: what both kinds of stream share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Self

from trinamo.runtime.context import Context, Reason, State
from trinamo.runtime.protocol.streams.control import Handshake
from trinamo.runtime.protocol.streams.request import ConnectionInfo

from .lane import Driver, LinkLane


class OpenSubject(Driver):
    """One subject and, once the worker has called, its lane; leaving it calls `close`."""

    def __init__(
        self, connection: ConnectionInfo, context: Context, forget: Callable[[OpenSubject], None]
    ) -> None:
        self.connection = connection
        self.is_taken = False
        self._context = context
        self._forget = forget
        self._lane: LinkLane | None = None
        """Until the end of the stream."""
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
        self._forget(self)
        self._context.off_change(self._on_context)

    def why_left(self) -> Reason:
        """Why whoever leaves now wants no more."""
        return self._context.why_left()

    @abstractmethod
    def _on_context(self, state: State) -> None:
        """The request was stopped or killed."""

    @abstractmethod
    def called(self, lane: LinkLane, handshake: Handshake) -> None:
        """The worker has called home, on `lane`."""

    def _hang_up(self) -> None:
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.hang_up()
