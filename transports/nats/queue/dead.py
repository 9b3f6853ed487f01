"""The dead letters of a work queue: a stream with one message per job id."""

from __future__ import annotations

from collections.abc import Callable

from trinamo.runtime.protocol.queue.jobs import DeadLetter

from .api import JetStream, Purged, Reply, StoredMessage
from .records import (
    REQUEUED_HEADER,
    Delivery,
    StreamNames,
    dead_headers,
    origin_headers,
    read_dead_headers,
    read_origin,
)


class DeadLetters:
    """Adds, lists, gives back and forgets them. `wall` is the time in seconds since the epoch."""

    def __init__(self, stream: JetStream, names: StreamNames, wall: Callable[[], float]) -> None:
        self._stream = stream
        self._names = names
        self._wall = wall

    async def add(self, delivery: Delivery, attempts: int, reason: str, *, deadline: float) -> None:
        """Keep a job; doing so twice keeps it once, because there is one message per id."""
        await self._stream.store(
            self._names.dead_subject(delivery.job_id),
            delivery.payload,
            dead_headers(attempts, reason) | origin_headers(delivery.origin),
            deadline=deadline,
        )

    async def list(self, count_max: int, *, deadline: float) -> list[DeadLetter]:
        """The oldest first."""
        found: list[DeadLetter] = []
        number = 1
        while len(found) < count_max:
            query = {"seq": number, "next_by_subj": self._names.dead_subject("*")}
            message = await self._stream.message(self._names.dead, query, deadline=deadline)
            if message is None:
                break
            found.append(self._letter(message))
            number = message.sequence + 1
        return found

    async def get(self, job_id: str, *, deadline: float) -> DeadLetter | None:
        """One of them."""
        message = await self._find(job_id, deadline)
        return None if message is None else self._letter(message)

    async def requeue(self, job_id: str, *, deadline: float) -> bool:
        """Put a dead letter back among the jobs; whether there was one.

        Raises `JetStreamError` if it is refused, also because the id is in the queue again.
        Interrupted in between it may be in both places; doing it again mends that.
        """
        message = await self._find(job_id, deadline)
        if message is None:
            return False
        # An id of its own, because the job's is still remembered as put.
        headers = {"Nats-Msg-Id": f"{job_id}.requeued.{message.sequence}", REQUEUED_HEADER: "1"}
        await self._stream.store(
            self._names.job_subject(job_id),
            message.payload,
            headers | origin_headers(read_origin(message.headers)),
            deadline=deadline,
        )
        await self.remove(message.sequence, deadline=deadline)
        return True

    async def remove(self, sequence: int, *, deadline: float) -> None:
        """Forget one message; none is no error."""
        await self._stream.find(
            f"STREAM.MSG.DELETE.{self._names.dead}",
            {"seq": sequence, "no_erase": True},
            Reply,
            deadline=deadline,
        )

    async def purge(self, job_id: str | None, *, deadline: float) -> int:
        """Forget one, or all; how many there were."""
        query = {} if job_id is None else {"filter": self._names.dead_subject(job_id)}
        answer = await self._stream.call(
            f"STREAM.PURGE.{self._names.dead}", query, Purged, deadline=deadline
        )
        return answer.purged

    async def _find(self, job_id: str, deadline: float) -> StoredMessage | None:
        query = {"last_by_subj": self._names.dead_subject(job_id)}
        return await self._stream.message(self._names.dead, query, deadline=deadline)

    def _letter(self, message: StoredMessage) -> DeadLetter:
        attempts, reason = read_dead_headers(message.headers)
        job_id = message.subject.rpartition(".")[2]
        dead_s = max(0.0, self._wall() - message.stored_s)
        return DeadLetter(job_id, message.payload, attempts, reason, dead_s)
