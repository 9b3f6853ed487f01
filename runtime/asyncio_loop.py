"""asyncio's loop inside trio, for a library and for engines that are written for it."""

from __future__ import annotations

import asyncio  # noqa: TID251 -- what is written for it runs here
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

with warnings.catch_warnings():
    # On Python 3.12 and 3.13 trio-asyncio subclasses asyncio's deprecated child watchers when it is
    # imported. Nothing here starts a subprocess through asyncio.
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*ChildWatcher.*")
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*child.watcher.*")
    import trio_asyncio

current_loop = trio_asyncio.current_loop
"""Which one a task of asyncio's finds as the running one."""

Tasks: TypeAlias = dict[asyncio.Task[Any], None]
"""Those that have not ended, in the order of their beginning."""


@asynccontextmanager
async def open_loop(
    on_failure: Callable[[dict[str, Any]], None],
) -> AsyncIterator[tuple[Any, Tasks]]:
    """A loop, and its tasks, each of which is held until it has ended, whoever forgets it.

    What nobody holds the garbage collector ends, wherever it comes by. The task then asks the loop for a
    turn, and between two of trio's steps that breaks the loop's queue, and trio with it: one forgotten
    task would end the process. `on_failure` hears of what nobody awaits; trio-asyncio would end the
    process for that, too. Leaving cancels what still runs, and waits for it.
    """
    tasks: Tasks = {}

    def start(
        loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **more: Any
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, **more)
        tasks[task] = None
        task.add_done_callback(tasks.pop)
        return task

    async with trio_asyncio.open_loop() as opened:
        loop: Any = opened
        loop.set_exception_handler(lambda _, failure: on_failure(failure))
        loop.set_task_factory(start)
        yield loop, tasks
