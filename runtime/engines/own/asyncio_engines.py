"""Generators written for asyncio: each answer is a task of an asyncio loop inside trio.

The one place of the engines where asyncio runs. The loop is in the same thread as everything else,
so an item crosses by two plain calls: the asyncio task puts it into an `Iteration`, and that wakes
the trio task. Closing the trio side cancels the asyncio task, which then ends by itself; the loop
waits for it when it closes.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 -- engines written for it; this module is where it is allowed
import contextvars
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any, Final, TypeVar

import trio

from ...asyncio_loop import current_loop, open_loop
from ...errors import EngineError
from ...nurseries import open_nursery
from ...sinks import Iteration

_log = logging.getLogger("trinamo.engines")
T = TypeVar("T")
ITEMS_MAX: Final = 64
"""Of one answer between the two worlds; then its generator waits at its `yield`."""
LEAVE_S: Final = 30.0
"""How long an engine may take to close what it has loaded."""

Next = Callable[[AsyncGenerator[Any, None]], Awaitable[Any]]


class AsyncioLoop:
    """Runs the generators of one engine; made by `open_asyncio_loop`."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop

    def _start(
        self, run: Callable[[], Any], ended: Callable[[asyncio.Task[None]], None]
    ) -> asyncio.Task[None]:
        # The request's: what its log lines carry is there.
        context = contextvars.copy_context()
        context.run(current_loop.set, self._loop)
        task: asyncio.Task[None] = self._loop.create_task(run(), context=context)
        task.add_done_callback(ended)
        return task

    async def iterate(
        self, items: AsyncGenerator[Any, None], next_of: Next
    ) -> AsyncGenerator[Any, None]:
        """What an asyncio generator yields, in trio; `next_of` is asked for each item.

        Closing it cancels the generator's task, and has no checkpoint. Raises what the generator
        raises, and `EngineError` if it was cancelled by somebody else.
        """
        received: Iteration[Any] = Iteration(ITEMS_MAX)
        room = asyncio.Event()
        received.on_room(room.set)

        async def pump() -> None:
            async with aclosing(items):
                while True:
                    try:
                        item = await next_of(items)
                    except StopAsyncIteration:
                        return
                    room.clear()
                    if not received.take([item]):
                        await room.wait()

        task = self._start(pump, lambda task: received.finish(_error_of(task)))
        try:
            async for item in received:
                yield item
        finally:
            task.cancel()

    @asynccontextmanager
    async def within(self, manager: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
        """Inside an asyncio context manager, which one asyncio task enters and leaves."""
        received: Iteration[T] = Iteration(1)
        leaving, left = asyncio.Event(), trio.Event()

        async def hold() -> None:
            async with manager as value:
                received.take([value])
                await leaving.wait()

        def ended(task: asyncio.Task[None]) -> None:
            received.finish(_error_of(task))
            left.set()

        task = self._start(hold, ended)
        try:
            yield await anext(received)
        finally:
            leaving.set()
            with trio.CancelScope(shield=True, deadline=trio.current_time() + LEAVE_S):
                await left.wait()
            task.cancel()


def _error_of(task: asyncio.Task[None]) -> BaseException | None:
    if task.cancelled():
        return EngineError("the asyncio task of the answer was cancelled")
    error = task.exception()
    # asyncio's own ways to end a program would end this one.
    return error if error is None or isinstance(error, Exception) else EngineError(repr(error))


@asynccontextmanager
async def open_asyncio_loop() -> AsyncIterator[AsyncioLoop]:
    """A loop for the generators of an engine; leaving cancels what still runs, and waits for it.

    So an engine that swallows its cancellation keeps the process from ending in order.
    """
    async with open_nursery() as nursery:
        yield await nursery.start(_hold_loop)
        nursery.cancel_scope.cancel()


async def _hold_loop(*, task_status: trio.TaskStatus[AsyncioLoop]) -> None:
    """The loop's life, in a task of its own: nobody else finds it as the running one."""
    async with open_loop(_log_error) as (loop, _):
        task_status.started(AsyncioLoop(loop))
        await trio.sleep_forever()


def _log_error(failure: dict[str, Any]) -> None:
    """What nobody awaits has failed: logged, as asyncio does; trio-asyncio would end the process."""
    error = failure.get("exception")
    wants_traceback = _log.isEnabledFor(logging.DEBUG)
    _log.error(
        "the asyncio loop of an engine: %s%s",
        failure.get("message", "an error"),
        f" ({error!r})" if error is not None else "",
        exc_info=error if wants_traceback else None,
    )
