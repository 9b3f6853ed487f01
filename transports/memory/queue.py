"""Work queues in memory: the model of `runtime/protocol/queue/work_queue.py` on trio's clock.

`MemoryQueues` is the broker's part and outlives the planes that open a queue; `MemoryWorkQueue` is
one process's handle. Everything is decided synchronously by the model; what is awaited here is
only time, the broker's return, and a job to take.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import trio

from trinamo.runtime.errors import DeadlineError, RequestError, UnavailableError
from trinamo.runtime.protocol.queue.jobs import (
    NO_ORIGIN,
    DeadLetter,
    JobOrigin,
    LeasedJob,
    PutResult,
    QueueLimits,
    QueueStatistics,
    Settlement,
    check_delay,
    check_job_id,
    check_queue_name,
)
from trinamo.runtime.protocol.queue.work_queue import WorkQueueModel

ADMINISTRATION_TIMEOUT_S = 10.0
T = TypeVar("T")


class MemoryQueues:
    """The queues of one broker, and whoever waits for one of them to change."""

    def __init__(self) -> None:
        self.is_running = True
        self.changed = trio.Event()
        self._models: dict[str, WorkQueueModel] = {}
        self.tokens = itertools.count(1)

    @property
    def names(self) -> list[str]:
        """The queues that exist, sorted."""
        return sorted(self._models)

    def open(self, name: str, limits: QueueLimits | None) -> WorkQueueModel:
        """The queue called `name`; made if `limits` are given, which then are in force."""
        check_queue_name(name)
        model = self._models.get(name)
        if model is None:
            if limits is None:
                raise UnavailableError(f"there is no queue {name}")
            model = self._models[name] = WorkQueueModel(limits)
        elif limits is not None:
            model.limits = limits
        return model

    def set_running(self, is_running: bool) -> None:  # noqa: FBT001 -- a fact, not an option
        """The broker went away or came back."""
        self.is_running = is_running
        self.notify()

    def notify(self) -> None:
        """Something changed: wake everyone who waits."""
        self.changed.set()
        self.changed = trio.Event()


class MemoryWorkQueue:
    """One process's handle of a queue. Nothing to close: leases end by themselves."""

    def __init__(
        self, queues: MemoryQueues, name: str, model: WorkQueueModel, *, payload_bytes_max: int
    ) -> None:
        self._name, self._payload_bytes_max = name, payload_bytes_max
        self._queues = queues
        self._model = model

    @property
    def name(self) -> str:
        return self._name

    @property
    def limits(self) -> QueueLimits:
        return self._model.limits

    @property
    def model(self) -> WorkQueueModel:
        """The queue itself, for tests that count."""
        return self._model

    async def take(self, *, wait_s: float) -> LeasedJob | None:
        await trio.lowlevel.checkpoint()
        give_up_at = trio.current_time() + wait_s
        while True:
            if self._queues.is_running:
                job = self._model.take(f"{next(self._queues.tokens):x}", now=trio.current_time())
                if job is not None:
                    return job
                due = self._model.next_due()
            else:
                due = None
            if trio.current_time() >= give_up_at:
                return None
            # Read before waiting: a change sets this very event and puts a fresh one in its place.
            changed = self._queues.changed
            with trio.move_on_at(min(give_up_at, math.inf if due is None else due)):
                await changed.wait()

    async def put(
        self,
        job_id: str,
        payload: bytes,
        *,
        origin: JobOrigin = NO_ORIGIN,
        timeout_s: float = 10.0,
    ) -> PutResult:
        check_job_id(job_id)
        if len(payload) > self._payload_bytes_max:
            raise RequestError(
                f"a job of {len(payload)} bytes; {self._payload_bytes_max} fit", param="payload"
            )
        put = partial(self._model.put, job_id, bytes(payload), origin)
        return await self._ask(put, timeout_s=timeout_s)

    async def extend(self, job: LeasedJob, *, timeout_s: float = 10.0) -> Settlement:
        return await self._ask(partial(self._model.extend, job.token), timeout_s=timeout_s)

    async def ack(self, job: LeasedJob, *, timeout_s: float = 10.0) -> Settlement:
        return await self._ask(partial(self._model.ack, job.token), timeout_s=timeout_s)

    async def nak(
        self,
        job: LeasedJob,
        *,
        delay_s: float = 0.0,
        reason: str = "",
        timeout_s: float = 10.0,
    ) -> Settlement:
        check_delay(delay_s)
        nak = partial(self._model.nak, job.token, delay_s, reason)
        return await self._ask(nak, timeout_s=timeout_s)

    async def statistics(self) -> QueueStatistics:
        return await self._ask(self._model.statistics)

    async def dead_letters(self, *, count_max: int = 100) -> list[DeadLetter]:
        return await self._ask(partial(self._model.dead_letters, count_max))

    async def dead_letter(self, job_id: str) -> DeadLetter | None:
        return await self._ask(partial(self._model.dead_letter, job_id))

    async def requeue(self, job_id: str) -> bool:
        return await self._ask(partial(self._model.requeue, job_id))

    async def purge_dead(self, job_id: str | None = None) -> int:
        return await self._ask(partial(self._model.purge_dead, job_id))

    async def _ask(
        self, step: Callable[..., T], *, timeout_s: float = ADMINISTRATION_TIMEOUT_S
    ) -> T:
        """Take one step of the model, at a time `now`, as soon as the broker is there."""
        await trio.lowlevel.checkpoint()
        with trio.move_on_after(timeout_s):
            while not self._queues.is_running:
                await self._queues.changed.wait()
        if not self._queues.is_running:
            raise DeadlineError(
                f"the broker was away for {timeout_s:g} s, so queue {self._name} is unchanged",
                definite=True,
            )
        result = step(now=trio.current_time())
        self._queues.notify()
        return result
