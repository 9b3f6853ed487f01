"""The worker's end of one response stream: items out, Stop and Kill in."""

from __future__ import annotations

import logging
from collections.abc import Callable

from trinamo.runtime.context import Context, Reason
from trinamo.runtime.errors import LocalProtocolError, RemoteProtocolError, TrinamoError
from trinamo.runtime.protocol.streams.control import (
    Closed,
    Control,
    Data,
    Declined,
    Failed,
    Handshake,
    Kill,
    Opened,
    Refused,
    Sentinel,
    Stop,
)
from trinamo.runtime.protocol.streams.machine import Role
from trinamo.runtime.protocol.streams.response_stream import WorkerState, response_stream

from .lane import Driver, LinkLane

_log = logging.getLogger("trinamo.tcp")


class TcpResponseSender(Driver):
    """The handler's end of one response stream: every method returns at once."""

    __slots__ = ("_context", "_is_streaming", "_lane", "_machine", "is_gone", "is_over")

    def __init__(self, lane: LinkLane, context: Context) -> None:
        self._machine = response_stream(Role.WORKER)
        self._lane = lane
        self._context = context
        self._is_streaming = False
        """The one state of ours that is asked for with every token."""
        self.is_over = False
        """After Sentinel, `failed` or a declining prologue."""
        self.is_gone = False
        """The caller wants nothing more, or is no more."""

    # --- the handler's side ---

    def greeted(self, handshake: Handshake) -> None:
        """Record that the greeting is on its way."""
        self._machine.send(handshake)

    def send_nowait(self, item: bytes) -> bool:
        """Send one item; False once the stream's bound is reached, then wait for `on_room`.

        After a Kill items are dropped and it is always False: a handler that never waits otherwise
        would not notice that its scope is cancelled.
        """
        if not self._is_streaming:
            if self.is_gone:
                return False
            raise LocalProtocolError(f"an item in state {self._machine!r}")
        assert item, "an empty item would be an empty frame, which means nothing"
        return self._lane.put(item)

    def on_room(self, listener: Callable[[], None]) -> None:
        """Call `listener` each time there is room again after a `send_nowait` that was False."""
        self._lane.on_room(listener)

    def open(self) -> None:
        """Prologue: the handler has started."""
        self._say(Opened())
        self._is_streaming = not self.is_gone

    def finish(self) -> None:
        """Sentinel: the answer is complete."""
        self._say(Sentinel(), last=True)

    def fail(self, error: TrinamoError) -> None:
        """The handler failed: a declining prologue before `open`, a `failed` frame after it."""
        opening = self._machine.states[Role.WORKER] is WorkerState.OPENING
        self._say(Declined(error) if opening else Failed(error), last=True)

    def _say(self, event: Opened | Declined | Sentinel | Failed, *, last: bool = False) -> None:
        if self.is_over:
            return
        self._machine.send(event)
        self._lane.say(event)
        if last:
            self.is_over = True
            self._is_streaming = False

    # --- what the caller says ---

    def take(self, items: list[bytes]) -> None:
        self._machine.receive(Data(items[0]))

    def receive(self, event: Control) -> None:
        self._machine.receive(event)
        match event:
            case Stop(reason):
                self._context.stop(reason)
            case Kill(reason):
                self._gone(reason)
            case Refused(_, message, reason):
                _log.warning("request %s: refused by the caller: %s", self._context.id, message)
                self._gone(reason)
            case Closed():
                self._closed()
            case _:
                raise AssertionError(event)

    def lost(self, why: str) -> None:  # noqa: ARG002 -- the context has a reason, not a sentence
        """FIN or RST: normal after our last word, a Kill before it."""
        if self._machine.allows(Role.CALLER, Closed):
            self._machine.receive(Closed())
        self._closed()

    def _closed(self) -> None:
        if self._machine.states[Role.WORKER] is not WorkerState.DONE:
            self._gone(Reason.CONSUMER_DROPPED)

    def broken(self, error: RemoteProtocolError) -> None:
        _log.warning("request %s: the caller broke the protocol: %s", self._context.id, error)
        self._lane.say(Closed())
        self._gone(Reason.PROTOCOL_ERROR)

    def _gone(self, reason: Reason) -> None:
        """Nobody wants the rest: drop it, and end the handler."""
        self.is_gone = True
        self._is_streaming = False
        self._lane.discard()
        self._lane.hang_up()
        self._context.kill(reason)
