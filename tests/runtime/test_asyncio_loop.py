"""asyncio's loop inside trio, and tasks that nobody holds."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

from trinamo.runtime.asyncio_loop import current_loop, open_loop


async def test_a_task_that_everybody_forgets_is_held_until_it_ends() -> None:
    """The collector would end it wherever it comes by, also where trio does not survive that."""
    forgotten: list[weakref.ref[asyncio.Task[Any]]] = []

    async def wait_for_ever() -> None:
        await asyncio.Future()

    async def begin() -> None:
        forgotten.append(weakref.ref(asyncio.get_running_loop().create_task(wait_for_ever())))
        await asyncio.sleep(0)

    failures: list[dict[str, Any]] = []
    async with open_loop(failures.append) as (loop, tasks):
        assert current_loop.get() is loop
        await loop.run_aio_coroutine(begin())
        gc.collect()
        (task,) = tasks
        assert forgotten[0]() is task
        task.cancel()
        del task
    gc.collect()
    assert (forgotten[0](), failures) == (None, [])
