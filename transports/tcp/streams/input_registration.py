"""The caller's end of one request stream: input items out to the worker that called home."""

from __future__ import annotations

from collections.abc import Callable

import trio

from trinamo.runtime.context import Context, Reason, State
from trinamo.runtime.errors import DisconnectedError, KilledError, RemoteProtocolError, TrinamoError
from trinamo.runtime.protocol.streams.control import (
    Closed,
    Control,
    Data,
    Handshake,
    Kill,
    Sentinel,
    Stop,
)
from trinamo.runtime.protocol.streams.machine import Ended, Role
from trinamo.runtime.protocol.streams.request import ConnectionInfo
from trinamo.runtime.protocol.streams.request_stream import request_stream

from .lane import LinkLane
from .subject import OpenSubject


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

    def lost(self, why: str) -> None:
        if self._machine.allows(Role.WORKER, Closed):
            self._machine.receive(Closed(why))
        self._over()

    def broken(self, error: RemoteProtocolError) -> None:
        self._machine.broken(error)
        self._over()

    def _over(self) -> None:
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.discard()
