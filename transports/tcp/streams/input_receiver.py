"""The worker's end of a request stream: the caller's input, item by item."""

from __future__ import annotations

import logging
from typing import Self

from trinamo.runtime.context import Context, Reason
from trinamo.runtime.errors import KilledError, RemoteProtocolError
from trinamo.runtime.protocol.streams.control import (
    Closed,
    Control,
    Data,
    Handshake,
    Kill,
    Refused,
    Sentinel,
    Stop,
)
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
        self._truncated: KilledError | None = None
        self.channel = Channel(window_bytes, self._give, self._drop)

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
        if self._truncated is not None:
            raise self._truncated
        return await self.channel.__anext__()

    def _give(self, count: int) -> None:
        if self._lane is not None:
            self._lane.give(count)

    def _drop(self) -> None:
        self.close()

    # --- what the caller says ---

    def take(self, items: list[bytes]) -> None:
        self._machine.receive(Data(items[0]))
        if not self.channel.extend(items) and self._lane is not None:
            raise RemoteProtocolError("an item without credit")

    def receive(self, event: Control) -> None:
        self._machine.receive(event)
        match event:
            case Sentinel():
                self.channel.complete()
            case Stop(reason):
                self.channel.complete()
                self._context.stop(reason)
            case Kill(reason):
                self._kill(reason)
            case Closed():
                self._kill(Reason.CONSUMER_DROPPED)
            case Refused(reason=reason):
                self._kill(reason)
            case _:
                raise AssertionError(event)

    def lost(self, why: str) -> None:  # noqa: ARG002 -- the context has a reason, not a sentence
        if self._machine.allows(Role.CALLER, Closed):
            self._machine.receive(Closed())
        if not self.channel.is_ended:
            self._kill(Reason.CONSUMER_DROPPED)

    def broken(self, error: RemoteProtocolError) -> None:
        _log.warning("request %s: the caller broke the protocol: %s", self._context.id, error)
        self._kill(Reason.PROTOCOL_ERROR)

    def _kill(self, reason: Reason) -> None:
        self._context.kill(reason)
        self._truncated = KilledError(
            "the input ended without an end mark", reason=str(self._context.reason or reason)
        )
        self.channel.abandon(self._truncated)
        self.close()
