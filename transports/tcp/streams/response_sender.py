"""The worker's end of one response stream: items out, Stop and Kill in."""

from __future__ import annotations

import logging
from collections.abc import Callable

from trinamo.runtime.context import Context
from trinamo.runtime.errors import LocalProtocolError, RemoteProtocolError, TrinamoError
from trinamo.runtime.protocol.streams.control import (
    Closed,
    Control,
    Data,
    Declined,
    Failed,
    Handshake,
    Opened,
    Refused,
    Sentinel,
    Stop,
)
from trinamo.runtime.protocol.streams.machine import Role
from trinamo.runtime.protocol.streams.response_stream import WorkerHalf, response_stream

from .lane import Driver, LinkLane

_log = logging.getLogger("trinamo.tcp")


class TcpResponseSender(Driver):
    """The handler's end of one response stream: every method returns at once."""

    __slots__ = ("_context", "_is_streaming", "_lane", "_machine")

    def __init__(self, lane: LinkLane, context: Context) -> None:
        self._machine = response_stream(Role.WORKER)
        self._lane = lane
        self._context = context
        self._is_streaming = False
        """The one state of ours that is asked for with every token."""

    @property
    def is_over(self) -> bool:
        """Whether the stream has ended, whoever ended it: nothing more is said on it."""
        return self._machine.ended is not None

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
            ended = self._machine.ended
            if ended is not None and ended.by is Role.CALLER:
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

    def finish(self) -> None:
        """Sentinel: the answer is complete."""
        self._say(Sentinel())

    def fail(self, error: TrinamoError) -> None:
        """The handler failed: a declining prologue before `open`, a `failed` frame after it."""
        opening = self._machine.states[Role.WORKER] is WorkerHalf.OPENING
        self._say(Declined(error) if opening else Failed(error))

    def _say(self, event: Opened | Declined | Sentinel | Failed) -> None:
        if self.is_over:
            return
        self._machine.send(event)
        self._lane.say(event)
        self._is_streaming = isinstance(event, Opened)

    # --- what the caller says ---

    def take(self, items: list[bytes]) -> None:
        self._machine.receive(Data(items[0]))

    def receive(self, event: Control) -> None:
        self._machine.receive(event)
        if isinstance(event, Stop):
            self._context.stop(event.reason)
        elif isinstance(event, Refused):
            _log.warning("request %s: refused by the caller: %s", self._context.id, event.message)
        self._check_end()

    def lost(self, why: str) -> None:
        """FIN or RST: normal after our last word, a Kill before it."""
        if self._machine.allows(Role.CALLER, Closed):
            self._machine.receive(Closed(why))
        self._check_end()

    def broken(self, error: RemoteProtocolError) -> None:
        _log.warning("request %s: the caller broke the protocol: %s", self._context.id, error)
        self._lane.say(Closed())
        self._machine.broken(error)
        self._check_end()

    def _check_end(self) -> None:
        """If the caller has ended it, nobody wants the rest: drop it, and end the handler."""
        ended = self._machine.ended
        if ended is not None and ended.by is Role.CALLER:
            self._is_streaming = False
            self._lane.discard()
            self._context.kill(ended.reason)
