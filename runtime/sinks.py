"""Push: where the items of one stream go as they come, in plain calls, without a task in between.

A source has items: an engine's step loop, or the reader of a connection. A sink takes them: it
encodes and appends to a connection's buffer, or writes to a client's socket. The task of the
request sleeps in `forward` from its first item to its end, its error or its cancellation: `Ending`.

Generators and iterators are the other way to say the same. `Iteration` is a sink that is iterated,
and `forward_items` hands what a generator yields to a sink.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, nullcontext
from typing import Final, Generic, Self, TypeVar

import trio

T = TypeVar("T")
_ITEMS_PER_CHECKPOINT: Final = 32
"""Whoever always finds an item, or room for one, still lets others run this often."""


class Sink(ABC, Generic[T]):
    """Takes the items of one stream. Used once, by one source at a time."""

    __slots__ = ("_room_listener",)
    keeps_all = False
    """Whether nobody has anything of what it took, so that it can `restart`."""

    def __init__(self) -> None:
        self._room_listener: Callable[[], None] | None = None

    def on_room(self, listener: Callable[[], None]) -> None:
        """The source is ready: call `listener` each time there is room again after a `take` that was False.

        `listener` never waits, may be called at any time, and does nothing if the source has not
        paused.
        """
        self._room_listener = listener

    @abstractmethod
    def take(self, items: list[T]) -> bool:
        """Take items, all of them; whether there is room for more.

        Never waits. After False the source makes no more until `room_again`, to be called after this
        has returned; what is on its way already still comes, bounded by the window of the stream.
        What this raises ends the stream, and comes out of `forward`.
        """

    def end(self) -> None:
        """No item follows, and all were taken: what may be said of that now need not wait.

        Only some sources say so; what counts is that `forward` returns.
        """

    def restart(self) -> None:
        """Forget all that was taken: another source begins anew. Only of one that `keeps_all`."""
        assert self.keeps_all, "somebody has had what this has taken"

    def room_again(self) -> None:
        """Tell the source that there is room again."""
        if self._room_listener is not None:
            self._room_listener()


class Sleeper:
    """One task that sleeps until it is woken. Waking nobody does nothing, and is not remembered.

    For one writer, reader or consumer; where several wait, `Changes` does.
    """

    __slots__ = ("_task",)

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None

    @property
    def is_asleep(self) -> bool:
        """Whether a task sleeps here."""
        return self._task is not None

    def wake(self) -> None:
        """Let the sleeping task go on; no checkpoint."""
        if self._task is not None:
            task, self._task = self._task, None
            trio.lowlevel.reschedule(task)

    def sleep(self) -> Awaitable[None]:
        """Sleep until `wake`, if it is awaited at once. Safe to cancel."""
        self._task = trio.lowlevel.current_task()
        # Not a coroutine itself: one layer less for every token that is waited for.
        return trio.lowlevel.wait_task_rescheduled(self._abort)  # noqa: ASYNC105 -- the caller awaits

    def _abort(self, _: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED


class Changes:
    """Any number of tasks that wait for the next change. One that nobody waits for is not remembered."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event: trio.Event | None = None

    def notify(self) -> None:
        """Something has changed: let all of them go on; no checkpoint."""
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self) -> None:
        """Sleep until `notify`. Safe to cancel."""
        if self._event is None:
            self._event = trio.Event()
        await self._event.wait()


class Ending:
    """The end of one stream, for the one task that sleeps until it is reached."""

    __slots__ = ("_error", "_is_reached", "_sleeper")

    def __init__(self) -> None:
        self._is_reached = False
        self._error: BaseException | None = None
        self._sleeper = Sleeper()

    def reach(self, error: BaseException | None = None) -> None:
        """The stream is complete, or has failed with `error`. The first call counts; no checkpoint."""
        if not self._is_reached:
            self._is_reached, self._error = True, error
            self._sleeper.wake()

    async def wait(self) -> None:
        """Return at the complete end, or raise the error. Safe to cancel."""
        if self._is_reached:
            await trio.lowlevel.checkpoint()
        else:
            await self._sleeper.sleep()
        if self._error is not None:
            raise self._error


class Iteration(Sink[T]):
    """A sink that one task iterates: the items, then the end or the error that `finish` was told.

    Full at `items_max`, it has room again once half of them are taken; going on at the first would
    flutter. A step of the iteration that is cancelled takes nothing.
    """

    __slots__ = ("_ending", "_is_full", "_items", "_items_max", "_since_checkpoint", "_sleeper")

    def __init__(self, items_max: int) -> None:
        super().__init__()
        self._items: deque[T] = deque()
        self._items_max = items_max
        self._is_full = False
        self._ending: tuple[BaseException | None] | None = None
        self._sleeper = Sleeper()
        self._since_checkpoint = 0

    def take(self, items: list[T]) -> bool:
        """Queue items for the consumer."""
        self._items += items
        self._is_full = len(self._items) >= self._items_max
        self._sleeper.wake()
        return not self._is_full

    def finish(self, error: BaseException | None = None) -> None:
        """After what is queued, end the iteration, or raise `error`. No checkpoint."""
        self._ending = (error,)
        self._sleeper.wake()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if not self._items and self._ending is None:
            self._since_checkpoint = 0
            await self._sleeper.sleep()
        elif self._since_checkpoint + 1 < _ITEMS_PER_CHECKPOINT:
            self._since_checkpoint += 1
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            self._since_checkpoint = 0
            await trio.lowlevel.checkpoint()
        if self._items:
            item = self._items.popleft()
            if self._is_full and len(self._items) * 2 <= self._items_max:
                self._is_full = False
                self.room_again()
            return item
        assert self._ending is not None, "woken without an item"
        (error,) = self._ending
        if error is not None:
            raise error
        raise StopAsyncIteration


async def forward_items(items: AsyncIterator[T], sink: Sink[T]) -> None:
    """Hand what an iterator yields to `sink`, waiting while that has no room; close a generator.

    For sources that have no `forward` of their own. A generator that never waits itself still lets
    others run.
    """
    room = Sleeper()
    sink.on_room(room.wake)
    take, since_checkpoint = sink.take, 0
    closing = aclosing(items) if isinstance(items, AsyncGenerator) else nullcontext()
    async with closing:
        async for item in items:
            if not take([item]):
                since_checkpoint = 0
                await room.sleep()
                continue
            since_checkpoint += 1
            if since_checkpoint >= _ITEMS_PER_CHECKPOINT:
                since_checkpoint = 0
                await trio.lowlevel.checkpoint()
