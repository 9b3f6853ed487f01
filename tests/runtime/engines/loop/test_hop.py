"""The thread of a model: one for all its calls, and nobody is given up in it."""

from __future__ import annotations

import threading

import pytest
import trio

from trinamo.runtime.engines.loop.host import open_step_thread


async def test_all_calls_are_in_one_thread_whatever_threads_others_use() -> None:
    async with open_step_thread() as thread:
        found = {await thread.run(threading.get_ident)}
        for _ in range(3):
            await trio.to_thread.run_sync(threading.get_ident)
            found.add(await thread.run(threading.get_ident))
    assert len(found) == 1
    assert threading.get_ident() not in found


async def test_what_a_call_raises_is_raised_and_the_next_one_runs() -> None:
    async with open_step_thread() as thread:
        with pytest.raises(ZeroDivisionError):
            await thread.run(divmod, 1, 0)
        assert await thread.run(divmod, 7, 2) == (3, 1)


async def test_a_call_that_is_cancelled_is_waited_for() -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def step() -> None:
        begun.set()
        may_end.wait()
        ended.set()

    async def release() -> None:
        await trio.to_thread.run_sync(begun.wait)
        scope.cancel()
        may_end.set()

    async with trio.open_nursery() as nursery, open_step_thread() as thread:
        with trio.CancelScope() as scope:
            nursery.start_soon(release)
            await thread.run(step)
            assert ended.is_set()
            await trio.lowlevel.checkpoint()
        assert scope.cancelled_caught
