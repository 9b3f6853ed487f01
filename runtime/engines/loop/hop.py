"""Where a step runs: in a thread of its own, so that the event loop goes on meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from .step import Hop, StepItem


def thread_hop() -> Hop:
    """A hop into a worker thread, one step at a time.

    Never abandoned on cancellation: the thread writes KV blocks, and whoever got them next would
    read what it writes.
    """
    limiter = trio.CapacityLimiter(1)

    async def hop(
        step: Callable[[Sequence[StepItem]], list[int | None]], items: Sequence[StepItem]
    ) -> list[int | None]:
        return await trio.to_thread.run_sync(step, items, limiter=limiter)

    return hop
