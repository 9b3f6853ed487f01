"""A client's handle of a work queue on a simulated broker: `WorkQueue`.

Every call may be repeated, a put by its id and the rest by their token, so what is lost on the way
costs time only. A taker asks for a while at a time and asks again; one that goes away says so, and
a job that was already on its way to it comes back when its lease expires.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final

import trio

from trinamo.runtime.errors import (
    ConnectError,
    DeadlineError,
    OverloadedError,
    RequestError,
)
from trinamo.runtime.planes import (
    NO_ORIGIN,
    DeadLetter,
    JobOrigin,
    LeasedJob,
    PutResult,
    QueueLimits,
    QueueStatistics,
    Settlement,
)
from trinamo.runtime.protocol.queue.jobs import check_delay, check_job_id, check_queue_name

from ..wire import Forget, encode
from .calls import Caller

ADMINISTRATION_TIMEOUT_S: Final = 10.0
POLL_S: Final = 2.0
"""How long the broker lets a taker wait before it answers that there is nothing."""
POLL_ANSWER_S: Final = 1.0
PAUSE_S: Final = 0.1


class SimulatedWorkQueue:
    """One process's handle of a queue. Nothing to close: leases end by themselves."""

    def __init__(
        self,
        caller: Caller,
        name: str,
        limits: QueueLimits,
        *,
        payload_bytes_max: int,
        call_ids: Iterator[str],
    ) -> None:
        self._caller = caller
        self._call_ids = call_ids
        self._name, self._limits = name, limits
        self._payload_bytes_max = payload_bytes_max

    @property
    def name(self) -> str:
        """See `WorkQueue.name`."""
        return self._name

    @property
    def limits(self) -> QueueLimits:
        """See `WorkQueue.limits`."""
        return self._limits

    async def put(
        self,
        job_id: str,
        payload: bytes,
        *,
        origin: JobOrigin = NO_ORIGIN,
        timeout_s: float = 10.0,
    ) -> PutResult:
        """See `WorkQueue.put`."""
        check_job_id(job_id)
        if len(payload) > self._payload_bytes_max:
            raise RequestError(
                f"a job of {len(payload)} bytes; {self._payload_bytes_max} fit", param="payload"
            )
        try:
            result, is_doubtful = await self._call(
                "put", (job_id, bytes(payload), origin), PutResult, timeout_s
            )
        except OverloadedError as error:
            raise OverloadedError(
                error.message, bound="depth_max", value=self._limits.depth_max
            ) from error
        # A copy of our own earlier try, whose answer was lost, is no duplicate.
        return PutResult.ADDED if is_doubtful else result

    async def take(self, *, wait_s: float) -> LeasedJob | None:
        """See `WorkQueue.take`."""
        give_up_at = trio.current_time() + wait_s
        while True:
            left_s = max(0.0, give_up_at - trio.current_time())
            poll_s = min(left_s, POLL_S)
            has_answer, job = await self._caller.ask_once(
                "take",
                (self._name, poll_s),
                LeasedJob | None,
                timeout_s=poll_s + POLL_ANSWER_S,
                forget=lambda call_id: encode(Forget(call_id)),
            )
            if job is not None or trio.current_time() >= give_up_at:
                return job if isinstance(job, LeasedJob) else None
            if not has_answer:
                await trio.sleep(min(PAUSE_S, max(0.0, give_up_at - trio.current_time())))

    async def extend(self, job: LeasedJob, *, timeout_s: float = 10.0) -> Settlement:
        """See `WorkQueue.extend`."""
        result: Settlement = (await self._call("extend", (job.token,), Settlement, timeout_s))[0]
        return result

    async def ack(self, job: LeasedJob, *, timeout_s: float = 10.0) -> Settlement:
        """See `WorkQueue.ack`."""
        arguments = (job.token, next(self._call_ids))
        result: Settlement = (await self._call("ack", arguments, Settlement, timeout_s))[0]
        return result

    async def nak(
        self,
        job: LeasedJob,
        *,
        delay_s: float = 0.0,
        reason: str = "",
        timeout_s: float = 10.0,
    ) -> Settlement:
        """See `WorkQueue.nak`."""
        check_delay(delay_s)
        arguments = (job.token, next(self._call_ids), delay_s, reason)
        result: Settlement = (await self._call("nak", arguments, Settlement, timeout_s))[0]
        return result

    async def statistics(self) -> QueueStatistics:
        """See `WorkQueue.statistics`."""
        result: QueueStatistics = (await self._call("statistics", (), QueueStatistics))[0]
        return result

    async def dead_letters(self, *, count_max: int = 100) -> list[DeadLetter]:
        """See `WorkQueue.dead_letters`."""
        result: list[DeadLetter] = (
            await self._call("dead_letters", (count_max,), list[DeadLetter])
        )[0]
        return result

    async def dead_letter(self, job_id: str) -> DeadLetter | None:
        """See `WorkQueue.dead_letter`."""
        result: DeadLetter | None = (await self._call("dead_letter", (job_id,), DeadLetter | None))[
            0
        ]
        return result

    async def requeue(self, job_id: str) -> bool:
        """See `WorkQueue.requeue`."""
        done, is_doubtful = await self._call("requeue", (job_id,), bool)
        return done or is_doubtful

    async def purge_dead(self, job_id: str | None = None) -> int:
        """See `WorkQueue.purge_dead`. What a try without an answer purged is not counted."""
        result: int = (await self._call("purge_dead", (job_id,), int))[0]
        return result

    async def _call(
        self,
        op: str,
        arguments: tuple[Any, ...],
        kind: Any,
        timeout_s: float = ADMINISTRATION_TIMEOUT_S,
    ) -> tuple[Any, bool]:
        return await _ask(self._caller, op, (self._name, *arguments), kind, timeout_s)


async def _ask(
    caller: Caller, op: str, arguments: tuple[Any, ...], kind: Any, timeout_s: float
) -> tuple[Any, bool]:
    try:
        result = await caller.call(
            op, arguments, kind, is_repeatable=True, writes=True, timeout_s=timeout_s
        )
    except ConnectError as error:
        raise DeadlineError(error.message, definite=True) from error
    return result.value, result.is_doubtful


@asynccontextmanager
async def open_queue(
    caller: Caller,
    name: str,
    limits: QueueLimits | None,
    *,
    payload_bytes_max: int,
    call_ids: Iterator[str],
) -> AsyncIterator[SimulatedWorkQueue]:
    """Open the queue called `name`; see `EventPlane.work_queue`.

    `call_ids` tells the calls of all processes apart, so that the broker knows a repetition.
    """
    check_queue_name(name)
    in_force, _ = await _ask(caller, "open", (name, limits), QueueLimits, ADMINISTRATION_TIMEOUT_S)
    yield SimulatedWorkQueue(
        caller, name, in_force, payload_bytes_max=payload_bytes_max, call_ids=call_ids
    )
