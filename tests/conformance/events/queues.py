"""Taking and burying jobs, for tests of work queues."""

from __future__ import annotations

import itertools

from trinamo.runtime.planes import LeasedJob, QueueLimits, WorkQueue

LIMITS = QueueLimits(visibility_timeout_s=10, attempts_max=3)


_numbers = itertools.count()


async def taken(queue: WorkQueue) -> LeasedJob:
    job = await queue.take(wait_s=10)
    assert job is not None
    return job
