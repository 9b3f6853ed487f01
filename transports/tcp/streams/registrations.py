"""The caller's ends of streams: a subject, held open for one worker's call.

Of a response stream what comes in, items and one terminal out; of a request stream input items out.

Whoever reads for it is a task of the server, not of the request, so that a consumer which leaves
while it is being cancelled need not wait for anything: `close()` says Kill without a checkpoint, and
what still arrives is dropped.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Self

import trio

from trinamo.runtime.context import Context, Reason, State
from trinamo.runtime.errors import DisconnectedError, KilledError, RemoteProtocolError, TrinamoError
from trinamo.runtime.protocol.streams.control import (
    Closed,
    Control,
    Data,
    Handshake,
    Kill,
    Opened,
    Sentinel,
    Stop,
)
from trinamo.runtime.protocol.streams.machine import End, Ended, Machine, Role
from trinamo.runtime.protocol.streams.request import ConnectionInfo
from trinamo.runtime.protocol.streams.request_stream import request_stream
from trinamo.runtime.protocol.streams.response_stream import WorkerHalf, response_stream

from .channel import Channel
from .link import Driver, LinkLane


class OpenSubject(Driver):
    """One subject and, once the worker has called, its lane; leaving it calls `close`."""

    _machine: Machine

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
        """The worker has opened the stream, on `lane`."""

    def lost(self, why: str) -> None:
        if self._machine.allows(Role.WORKER, Closed):
            self._machine.receive(Closed(why))
        self._over()

    @abstractmethod
    def _over(self) -> None:
        """The worker has said its last word, or never will."""

    def _hang_up(self) -> None:
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.hang_up()


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
        self.channel.detach()

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

    def broken(self, error: RemoteProtocolError) -> None:
        self._machine.broken(error)
        self._say(Kill(Reason.PROTOCOL_ERROR))
        self._over()

    def _over(self) -> None:
        self._is_streaming = False
        self.channel.ended()
        self._hang_up()


class InputRegistration(OpenSubject):
    """One subject for a worker that wants to be streamed to; also the sender itself.

    Leaving it before `finish` is Kill: the worker must not take half an input for a whole one.
    """

    def __init__(
        self, connection: ConnectionInfo, context: Context, forget: Callable[[OpenSubject], None]
    ) -> None:
        self._machine = request_stream(Role.CALLER)
        self._called = trio.Event()
        self._due: Stop | Kill | None = None
        """Decided before the worker has called: said when it does."""
        self._way: LinkLane | None = None
        """The lane, from the worker's call on."""
        # Last: a context that has ended says so at once.
        super().__init__(connection, context, forget)

    def close(self) -> None:
        super().close()
        self._end(Kill(self._context.why_left()))

    def _on_context(self, state: State) -> None:
        reason = self._context.why_left()
        self._end(Kill(reason) if state is State.KILLED else Stop(reason))

    def _end(self, event: Sentinel | Stop | Kill) -> None:
        if self._machine.ended is not None:
            return
        if not self._machine.allows(Role.CALLER, type(event)):
            assert isinstance(event, Stop)
            self._due = event
            return
        self._machine.send(event)
        if self._lane is None:
            assert isinstance(event, Kill)
            # A worker may be dialling already.
            self._due = event
        else:
            self._lane.say(event)
            self._hang_up()
        self._called.set()

    async def send(self, item: bytes) -> None:
        """Queue one input item, waiting for the worker's call and while the bound is reached.

        Cancelled while waiting for the call it has queued nothing. Raises `DisconnectedError` if
        the worker is gone and `KilledError` once the request was stopped or killed.
        """
        assert item, "an empty item would be an empty frame, which means nothing"
        await self._called.wait()
        if self._machine.ended is not None:
            raise self._why_over(self._machine.ended)
        assert self._way is not None
        self._machine.send(Data(item))
        if not self._way.put(item):
            await self._way.wait_room()

    def _why_over(self, ended: Ended) -> TrinamoError:
        match ended.word:
            case RemoteProtocolError() as error:
                return error
            case Closed(why) if ended.by is Role.WORKER:
                how = (
                    f"{why}; the input was not complete"
                    if why
                    else "the worker takes no more input"
                )
                return DisconnectedError(how)
        return KilledError(
            "the request was ended; no more input is taken",
            reason=self._context.reason or Reason.CONSUMER_DROPPED,
        )

    async def finish(self) -> None:
        """Say that the input is complete, once the worker has called."""
        await self._called.wait()
        self._end(Sentinel())

    # --- what the worker says ---

    def called(self, lane: LinkLane, handshake: Handshake) -> None:
        self._machine.receive(handshake)
        self._lane = self._way = lane
        self._called.set()
        if isinstance(self._due, Kill):
            lane.say(self._due)
            self._hang_up()
        elif self._due is not None:
            self._end(self._due)

    def take(self, items: list[bytes]) -> None:
        self._machine.receive(Data(items[0]))

    def receive(self, event: Control) -> None:
        """It says nothing more; anything but its end is a protocol error."""
        self._machine.receive(event)
        self._over()

    def broken(self, error: RemoteProtocolError) -> None:
        self._machine.broken(error)
        self._over()

    def _over(self) -> None:
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.discard()
