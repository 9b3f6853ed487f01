"""Where a step runs: in a thread of its own, so that the event loop goes on meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeVar

import outcome
import trio

from ...nurseries import open_nursery

T = TypeVar("T")
_Job = tuple[Callable[[], object], trio.lowlevel.Task]


class StepThread:
    """One thread for all that a model does, from its load to its last step; `run` is a `Hop`.

    Libraries that compute keep threads of their own for each that calls them, and spin or sleep by how many
    there are: with steps in whatever thread is free, OpenMP has more than cores, and a token of llama.cpp
    takes twice as long.
    """

    def __init__(self) -> None:
        self._jobs: Final = SimpleQueue[_Job | None]()
        self._token: Final = trio.lowlevel.current_trio_token()

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call it there, after what was asked before; waits for its end even if cancelled.

        A step writes KV blocks, and whoever got them next would read what it writes.
        """
        self._jobs.put((lambda: function(*arguments), trio.lowlevel.current_task()))
        result: T = await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
        return result

    def serve(self) -> None:
        """Run jobs until `close`; in the thread."""
        while (job := self._jobs.get()) is not None:
            function, task = job
            self._token.run_sync_soon(trio.lowlevel.reschedule, task, outcome.capture(function))

    def close(self) -> None:
        """End it after what was asked before."""
        self._jobs.put(None)


@asynccontextmanager
async def open_step_thread() -> AsyncIterator[StepThread]:
    """A thread that ends when the block is left, after the call that is running then."""
    thread = StepThread()
    async with open_nursery() as nursery:
        # Not one of those that calls share: it lasts.
        own = partial(trio.to_thread.run_sync, limiter=trio.CapacityLimiter(1))
        nursery.start_soon(own, thread.serve)
        try:
            yield thread
        finally:
            thread.close()
