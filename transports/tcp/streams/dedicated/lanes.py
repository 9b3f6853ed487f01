"""The lanes of connections that carry one stream each: where items and words go on the socket."""

from __future__ import annotations

from collections.abc import Callable

import trio

from trinamo.runtime.protocol.streams.codec import data_prefix
from trinamo.runtime.protocol.streams.control import Closed, Control, encode_control

from ..carrier import ItemLane, Lane
from ..outbox import Outbox
from .controls import ControlWriter


class ConnectionLane(ItemLane):
    """For an end that sends items: everything in order, through the connection's writer."""

    __slots__ = ("_hung_up", "_outbox")

    has_credit = False

    def __init__(self, outbox: Outbox, hung_up: Callable[[], None]) -> None:
        self._outbox = outbox
        self._hung_up = hung_up

    def put(self, item: bytes) -> bool:
        return self._outbox.put_nowait(data_prefix(len(item)), item)

    def say(self, event: Control) -> None:
        if not isinstance(event, Closed):
            self._outbox.put_nowait(encode_control(event))

    def give(self, count: int) -> None:
        """What comes to this end is words, which are not counted."""

    def hang_up(self) -> None:
        self._outbox.close()
        self._hung_up()

    def discard(self) -> None:
        self._outbox.discard()

    def on_room(self, listener: Callable[[], None]) -> None:
        self._outbox.on_room(listener)

    async def drain(self) -> None:
        await self._outbox.drain()


class WordLane(Lane):
    """For an end that reads items, and says a word now and then."""

    __slots__ = ("_controls", "_hung_up", "_room")

    has_credit = False

    def __init__(self, controls: ControlWriter, hung_up: Callable[[], None]) -> None:
        self._controls = controls
        self._hung_up = hung_up
        self._room = trio.Event()

    def say(self, event: Control) -> None:
        self._controls.put(encode_control(event))

    def give(self, count: int) -> None:  # noqa: ARG002 -- the reader looks for itself
        self._room.set()

    async def wait_room(self) -> None:
        """Return once the consumer has taken half a window, or wants nothing more."""
        self._room = trio.Event()
        await self._room.wait()

    def hang_up(self) -> None:
        self._controls.finish()
        self._hung_up()

    def discard(self) -> None:
        """Nothing is queued but words."""
