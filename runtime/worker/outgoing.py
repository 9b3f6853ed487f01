"""One answer on its way out of the worker: what a handler hands over is encoded and queued at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ..context import Context
from ..errors import EngineError
from ..planes import ResponseSender
from ..sinks import Sink
from ..traces.trace import Leg
from .metrics import EndpointTally

_TAKES_WITHOUT_ROOM_MAX: Final = 64
"""What a source may still have had on its way; one that does not heed us would fill the memory."""


class OutgoingAnswer(Sink[Any]):
    """Encodes items into the response stream, and counts them. The first one brings the prologue.

    What comes after a shutdown has stopped the request is dropped: such as an end that looks whole.
    Whoever runs the handler calls `finish`, unless the handler's source has said `end`.
    """

    __slots__ = (
        "_context",
        "_encode",
        "_is_open",
        "_leg",
        "_send",
        "_sender",
        "_takes_without_room",
        "_tally",
        "is_complete",
    )

    def __init__(
        self,
        sender: ResponseSender,
        encode: Callable[[Any], bytes],
        tally: EndpointTally,
        leg: Leg,
        context: Context,
    ) -> None:
        super().__init__()
        self._sender = sender
        self._send = sender.send_nowait
        self._encode = encode
        self._tally = tally
        self._leg = leg
        self._context = context
        self._is_open = False
        self.is_complete = False
        """The end mark is on its way behind all items: nothing that happens later makes it less."""
        self._takes_without_room = 0

    def on_room(self, listener: Callable[[], None]) -> None:
        """Have the source go on when the connection has room again."""
        super().on_room(listener)
        self._sender.on_room(self.room_again)

    def room_again(self) -> None:
        """Tell the source so."""
        self._takes_without_room = 0
        super().room_again()

    def open(self) -> None:
        """The answer begins: say so, once, unless an item did."""
        if not self._is_open:
            self._is_open = True
            self._leg.mark("first_item")
            self._sender.open()

    def end(self) -> None:
        """See `Sink.end`: so the end mark leaves with the last item."""
        context = self._context
        if context.cut_by is None and not context.scope.cancel_called:
            self.finish()

    def finish(self) -> None:
        """Say that the answer is complete. Idempotent."""
        if not self.is_complete:
            self.is_complete = True
            self.open()
            self._sender.finish()

    def take(self, items: list[Any]) -> bool:
        """Queue items for the caller.

        Raises if one cannot be encoded, and `EngineError` if the source goes on all the same after
        it was told that there is no room.
        """
        if self._context.cut_by is not None:
            return True
        if not self._is_open:
            self.open()
        has_room = True
        for item in items:
            self._tally.items.value += 1
            has_room = self._send(self._encode(item))
        if not has_room:
            self._takes_without_room += 1
            if self._takes_without_room > _TAKES_WITHOUT_ROOM_MAX:
                raise EngineError("the handler pushes on although its sink has no room")
        return has_room
