"""The caller's end of one response stream: what comes in, items and one terminal out.

Whoever reads for it is a task of the server, not of the request, so that a consumer which leaves
while it is being cancelled need not wait for anything: `close()` says Kill without a checkpoint, and
what still arrives is dropped.
"""

from __future__ import annotations

from collections.abc import Callable

from trinamo.runtime.context import Context, Reason, State
from trinamo.runtime.errors import KilledError, RemoteProtocolError
from trinamo.runtime.protocol.streams.control import (
    Closed,
    Control,
    Data,
    Handshake,
    Kill,
    Opened,
    Stop,
)
from trinamo.runtime.protocol.streams.machine import End, Role
from trinamo.runtime.protocol.streams.request import ConnectionInfo
from trinamo.runtime.protocol.streams.response_stream import WorkerHalf, response_stream

from .channel import Channel
from .lane import LinkLane
from .subject import OpenSubject

_LAST = (WorkerHalf.DONE, WorkerHalf.TRUNCATED)


class ResponseRegistration(OpenSubject):
    """One subject and, once the worker has called, its answer."""

    def __init__(
        self,
        connection: ConnectionInfo,
        context: Context,
        forget: Callable[[OpenSubject], None],
    ) -> None:
        self._machine = response_stream(Role.CALLER)
        self._is_streaming = False
        """The one state of the worker that is asked for with every token."""
        self.channel = Channel(self._machine, connection.window_bytes, self._give, self._kill)
        # Last: a context that has ended says so at once.
        super().__init__(connection, context, forget)

    def close(self) -> None:
        super().close()
        ended = self._machine.ended
        # Ended on this side only, such as by an instance that left discovery, the worker still works.
        if ended is None or ended.end is End.GIVEN_UP:
            self._kill()

    # --- what our side decides ---

    def _on_context(self, state: State) -> None:
        if state is State.KILLED:
            self._kill()
        elif state is State.STOPPED:
            self._say(Stop(self._context.why_left()))

    def _kill(self) -> None:
        reason = self._context.why_left()
        self.channel.abandon(KilledError(f"the request was killed: {reason}", reason=reason))
        self._say(Kill(reason))
        self._hang_up()

    def _give(self, count: int) -> None:
        if self._lane is not None:
            self._lane.give(count)

    def _say(self, event: Stop | Kill) -> None:
        """Say it now, or leave it for the moment the worker calls."""
        if self._lane is not None and self._machine.allows(Role.CALLER, type(event)):
            self._machine.send(event)
            self._lane.say(event)

    # --- what the worker says ---

    def called(self, lane: LinkLane, handshake: Handshake) -> None:
        self._machine.receive(handshake)
        self._lane = lane
        self.channel.call()
        if self.channel.is_ended or self._context.is_killed:
            self._say(Kill(self._context.why_left()))
            self._hang_up()
        elif self._context.is_stopped:
            self._say(Stop(self._context.why_left()))

    def take(self, items: list[bytes]) -> None:
        if not self._is_streaming:
            # Raises, unless nobody wants them any more.
            self._machine.receive(Data(items[0]))
            return
        if not self.channel.extend(items) and self._lane is not None:
            raise RemoteProtocolError("an item without credit")

    def receive(self, event: Control) -> None:
        self._machine.receive(event)
        state = self._machine.states[Role.WORKER]
        self._is_streaming = state is WorkerHalf.STREAMING
        if isinstance(event, Opened):
            self.channel.open()
        elif state in _LAST:
            self._over()

    def lost(self, why: str) -> None:
        if self._machine.allows(Role.WORKER, Closed):
            self._machine.receive(Closed(why))
        self._over()

    def broken(self, error: RemoteProtocolError) -> None:
        self._machine.broken(error)
        self._say(Kill(Reason.PROTOCOL_ERROR))
        self._over()

    def _over(self) -> None:
        self._is_streaming = False
        self.channel.ended()
        self._hang_up()
