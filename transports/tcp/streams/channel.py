"""Where the items of one stream arrive, between the connection's reader and the consumer.

Of a response that is at its caller, of an input at the worker.

The reader puts items in by the batch, synchronously. A consumer either takes them out one by one,
mostly without a schedule point, or gives a sink, which then gets each batch in the reader's own call;
while the sink has no room, items wait here as they came.
Bounded in bytes: what is taken goes back as credit to whoever sends, which stops without it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, Self

import trio

from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.protocol.streams.credit import ReceiveCredit
from trinamo.runtime.protocol.streams.machine import Machine
from trinamo.runtime.sinks import Sink, Sleeper

_ITEMS_PER_CHECKPOINT: Final = 32
"""A consumer of a stream that is never empty still lets others run this often."""
PUSHED_ITEMS_MAX: Final = 64
"""A sink is asked for room this often: what it makes of items may be many times longer than they are."""


def _tell_nobody(count: int = 0) -> None:
    """What a channel calls that has been detached."""


class Channel:
    """Items, then exactly one terminal: the end of iteration, or one error.

    One consumer at a time. A receive that is cancelled loses nothing.
    """

    __slots__ = (
        "_consumer",
        "_credit",
        "_drop",
        "_give",
        "_is_full",
        "_items",
        "_machine",
        "_opened",
        "_since_checkpoint",
        "_sink",
        "_told",
        "arrival_count",
        "is_called",
        "on_call",
    )

    def __init__(
        self,
        machine: Machine,
        window_bytes: int,
        give: Callable[[int], None],
        drop: Callable[[], None],
    ) -> None:
        self._machine = machine
        """Says whether the stream has ended, and what its consumer then gets."""
        self._items: deque[bytes] = deque()
        self._credit = ReceiveCredit(window_bytes)
        self._give = give
        """Gives credit back to whoever sends."""
        self.arrival_count = 0
        """Batches of items that have come: whether it grows says whether the worker speaks."""
        self._drop = drop
        """Kills the stream: its sink has failed."""
        self._sink: Sink[bytes] | None = None
        self._is_full = False
        """The sink has said that it has no room, and not yet that it has some again."""
        self.is_called = False
        self.on_call: Callable[[], None] | None = None
        """Told of that, if somebody wants to know."""
        self._opened = False
        self._told = False
        """The consumer has had the terminal."""
        self._consumer = Sleeper()
        self._since_checkpoint = 0

    @property
    def is_ended(self) -> bool:
        """Whether the terminal is known; items before it may still wait to be taken."""
        return self._machine.ended is not None

    @property
    def is_paused(self) -> bool:
        """Whether the stream waits for its consumer, so that nothing can come from the worker."""
        return self._machine.ended is None and self._credit.left_bytes <= 0

    @property
    def buffered_bytes(self) -> int:
        """Of items that wait for the consumer, or for its sink to have room."""
        return self._credit.held_bytes

    # --- the reader's side: plain functions, no checkpoint ---

    def call(self) -> None:
        """The worker has opened the stream, which ends no wait of the consumer's."""
        self.is_called = True
        if self.on_call is not None:
            self.on_call()

    def open(self) -> None:
        """The prologue came: the answer begins."""
        self._opened = True
        self._consumer.wake()

    def extend(self, items: list[bytes]) -> bool:
        """Queue a batch of items, or push it; whether there was credit for it.

        Dropped once the stream has ended.
        """
        if self._machine.ended is not None:
            return True
        self.arrival_count += 1
        has_credit = self._credit.arrive(items)
        if self._sink is None:
            self._items.extend(items)
            self._consumer.wake()
        elif self._is_full:
            self._items.extend(items)
        else:
            self._push(self._sink, items)
        return has_credit

    def _push(self, sink: Sink[bytes], items: list[bytes]) -> None:
        try:
            if len(items) <= PUSHED_ITEMS_MAX:
                self._is_full = not sink.take(items)
            else:
                for end in range(PUSHED_ITEMS_MAX, len(items) + PUSHED_ITEMS_MAX, PUSHED_ITEMS_MAX):
                    self._is_full = not sink.take(items[end - PUSHED_ITEMS_MAX : end])
                    if self._is_full:
                        self._items.extend(items[end:])
                        break
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is this stream's alone
            self._items.clear()
            self._drop()
            self._machine.leave(error)
            self._consumer.wake()
            return
        if not self._is_full:
            self._taken(self._credit.held_bytes)

    def _room_again(self) -> None:
        """The sink has room: what it was given is off our hands, and what waits is its own."""
        sink = self._sink
        if sink is None or not self._is_full:
            return
        self._is_full = False
        waiting, self._items = list(self._items), deque()
        if waiting:
            self._taken(self._credit.held_bytes - sum(map(len, waiting)))
            self._push(sink, waiting)
        else:
            self._taken(self._credit.held_bytes)
        if self.is_ended and not self._items:
            self._consumer.wake()

    def _taken(self, count: int) -> None:
        given = self._credit.take(count)
        if given:
            self._give(given)

    def ended(self) -> None:
        """The stream has ended: after the queued items its consumer gets the terminal."""
        self._consumer.wake()

    def detach(self) -> None:
        """Whoever reads for it is done: nobody is given credit any more, and there is nothing to kill."""
        self._give = self._drop = _tell_nobody

    def fail(self, error: TrinamoError) -> None:
        """After the queued items raise `error`; does nothing if the stream has ended."""
        self._machine.give_up(error)
        self._consumer.wake()

    def abandon(self, error: TrinamoError) -> None:
        """Raise `error` to the consumer at once, and drop the items that wait for it.

        It replaces an end behind those items: without them the answer is not complete. An end that
        nothing waits in front of stays.
        """
        if not (self._told or (self.is_ended and not self._items)):
            self._machine.leave(error)
            self._items.clear()
            self._taken(self._credit.held_bytes)
        self._consumer.wake()

    # --- the consumer's side ---

    def _wait(self) -> Awaitable[None]:
        if self._consumer.is_asleep:
            raise trio.BusyResourceError("another task is consuming this stream")
        return self._consumer.sleep()

    async def wait_prologue(self) -> None:
        """Return once the answer begins; raise the terminal error if it never will."""
        while not self._opened and not self.is_ended:
            await self._wait()
        error = self._machine.error
        if not self._opened and error is not None:
            self._told = True
            raise error

    async def forward(self, sink: Sink[bytes]) -> None:
        """Hand every item to `sink` as it comes; return after Sentinel, else raise the terminal.

        What the sink raises kills the stream and comes out of here as it is. Cancelled, it leaves
        what comes from then on to be iterated.
        """
        if self._sink is not None or self._consumer.is_asleep:
            raise trio.BusyResourceError("another task is consuming this stream")
        self._sink = sink
        try:
            sink.on_room(self._room_again)
            if self._items:
                items, self._items = list(self._items), deque()
                self._push(sink, items)
            while not self.is_ended or self._items:
                await self._wait()
        finally:
            self._sink = None
            self._is_full = False
            self._taken(self._credit.held_bytes - sum(map(len, self._items)))
        told, self._told = self._told, True
        error = self._machine.error
        if error is not None and not told:
            raise error

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """The next item; `StopAsyncIteration` after Sentinel, else the terminal error, once."""
        items = self._items
        if items:
            self._since_checkpoint += 1
            if self._since_checkpoint >= _ITEMS_PER_CHECKPOINT:
                self._since_checkpoint = 0
                await trio.lowlevel.checkpoint()
        while not items:
            if self.is_ended:
                told, self._told = self._told, True
                error = self._machine.error
                if error is None or told:
                    raise StopAsyncIteration
                raise error
            self._since_checkpoint = 0
            await self._wait()
        item = items.popleft()
        given = self._credit.take(len(item))
        if given:
            self._give(given)
        return item
