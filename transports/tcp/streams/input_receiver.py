"""The worker's end of a request stream: the caller's input, item by item."""

from __future__ import annotations

import logging
from typing import Self

from trinamo.runtime.context import Context, Reason
from trinamo.runtime.errors import KilledError, RemoteProtocolError
from trinamo.runtime.protocol.streams.control import Closed, Control, Data, Handshake, Stop
from trinamo.runtime.protocol.streams.machine import Role
from trinamo.runtime.protocol.streams.request_stream import request_stream

from .channel import Channel
from .lane import Driver, LinkLane

_log = logging.getLogger("trinamo.tcp")


class InputReceiver(Driver):
    """An iterator over input items."""

    def __init__(self, context: Context, window_bytes: int) -> None:
        self._context = context
        self._machine = request_stream(Role.WORKER)
        self._lane: LinkLane | None = None
        self.channel = Channel(self._machine, window_bytes, self._give, self.close)

    def greeted(self, lane: LinkLane, handshake: Handshake) -> None:
        """Record that the greeting is on its way, on `lane`."""
        self._machine.send(handshake)
        self._lane = lane

    def close(self) -> None:
        """No more input is wanted. Synchronous, idempotent."""
        lane, self._lane = self._lane, None
        if lane is not None:
            self._machine.send(Closed())
            lane.say(Closed())
            lane.hang_up()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """The next item; ends after Sentinel or Stop, raises `KilledError` otherwise."""
        error = self._machine.error
        if error is not None:
            raise error
        return await self.channel.__anext__()

    def _give(self, count: int) -> None:
        if self._lane is not None:
            self._lane.give(count)

    # --- what the caller says ---

    def take(self, items: list[bytes]) -> None:
        self._machine.receive(Data(items[0]))
        if not self.channel.extend(items) and self._lane is not None:
            raise RemoteProtocolError("an item without credit")

    def receive(self, event: Control) -> None:
        had_ended = self._machine.ended is not None
        self._machine.receive(event)
        if isinstance(event, Stop):
            self._context.stop(event.reason)
        ended = self._machine.ended
        if ended is None or had_ended:
            return
        if self._machine.error is None:
            self.channel.ended()
        else:
            self._kill(ended.reason)

    def lost(self, why: str) -> None:
        if self._machine.allows(Role.CALLER, Closed):
            self.receive(Closed(why))

    def broken(self, error: RemoteProtocolError) -> None:
        _log.warning("request %s: the caller broke the protocol: %s", self._context.id, error)
        self._machine.broken(error)
        self._kill(Reason.PROTOCOL_ERROR)

    def _kill(self, reason: Reason) -> None:
        """Drop what has come of it: truncated input is no input."""
        self._context.kill(reason)
        self.channel.abandon(
            KilledError(
                "the input ended without an end mark", reason=str(self._context.reason or reason)
            )
        )
        self.close()
