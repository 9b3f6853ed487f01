"""The work queue on JetStream. `records.py` says how it is kept, and why so.

`open_work_queue` makes the streams and yields a `NatsWorkQueue`. Its methods run in trio and ask
JetStream by requests over the event plane (`api.py`); deliveries come by `fetching.py`,
leases and dead letters are in `streams.py`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final

import attrs
import msgspec
import trio

from trinamo.runtime.env import Env
from trinamo.runtime.errors import (
    DeadlineError,
    OverloadedError,
    RemoteProtocolError,
    RequestError,
    TrinamoError,
    UnknownOutcomeError,
)
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.protocol.queue.jobs import (
    NO_ORIGIN,
    REASON_CHARS_MAX,
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
from trinamo.transports.security.sealing import Sealer

from .api import JetStream, JetStreamError, JetStreamReply, QueuePlane, StoredMessage
from .fetching import Fetcher
from .records import (
    REQUEUED_HEADER,
    Bury,
    Drop,
    JobDelivery,
    Leave,
    Record,
    RecordState,
    StreamNames,
    TakeJob,
    judge,
    origin_headers,
    read_origin,
)
from .streams import (
    DeadLetters,
    HeldJob,
    Leases,
    SealedJobs,
    administration,
    existing_limits,
    make_streams,
    read_statistics,
)

logger = logging.getLogger("trinamo.nats")

CONFIRM_TIMEOUT_S: Final = 1.0
HEADER_BYTES_MAX: Final = 4096
"""Room a job's payload must leave for the headers of a dead letter."""
CLAIM_TRIES_MAX: Final = 8
_TOLD_CHARS_MAX: Final = 3072
"""Of a reason as it is kept, sealed or not."""
_STORE_FAILED: Final = 10077
_ACK: Final = b"+ACK"
_NAK: Final = b"-NAK"
_IN_PROGRESS: Final = b"+WPI"
_NS: Final = 1_000_000_000
_LOST: Final = (DeadlineError, UnknownOutcomeError, RemoteProtocolError)


@asynccontextmanager
async def open_work_queue(
    plane: QueuePlane,
    name: str,
    *,
    limits: QueueLimits | None,
    replicas: int,
    inbox: str,
    env: Env,
    sealer: Sealer,
) -> AsyncIterator[NatsWorkQueue]:
    """Open the queue called `name`; `inbox` is a subject of its own for this handle."""
    check_queue_name(name)
    stream = JetStream(plane, env.rng)
    names = StreamNames(name)
    if limits is None:
        limits = await existing_limits(stream, names, deadline=administration())
    else:
        await make_streams(stream, names, limits, replicas)
    jobs = SealedJobs(sealer, name)
    queue = NatsWorkQueue(plane, stream, names, limits, jobs, inbox, env.clock.wall)
    async with open_nursery() as nursery:
        await nursery.start(queue.run)
        try:
            yield queue
        finally:
            nursery.cancel_scope.cancel()


@attrs.define(eq=False)
class NatsWorkQueue:
    """One process's handle of a queue; made by `NatsEventPlane.work_queue`."""

    _plane: QueuePlane
    _stream: JetStream
    _names: StreamNames
    limits: QueueLimits
    """Those in force when it was opened, or when a job last came that had been taken before."""
    _jobs: SealedJobs
    _inbox: str
    _wall: Callable[[], float]
    """Seconds since the epoch, compared with the server's time stamps."""
    _leases: Leases = attrs.field(init=False)
    _dead: DeadLetters = attrs.field(init=False)
    _fetcher: Fetcher = attrs.field(init=False)
    _held: dict[str, HeldJob] = attrs.field(factory=dict, init=False)
    _taken_back: dict[str, trio.Event] = attrs.field(factory=dict, init=False)
    """By job, set once its record no longer names a lease of which no taker was told."""
    _tokens: Iterator[int] = attrs.field(factory=itertools.count, init=False)
    _nursery: trio.Nursery | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._leases = Leases(self._stream, self._names, self._jobs)
        self._dead = DeadLetters(self._stream, self._names, self._jobs, self._wall)
        self._fetcher = Fetcher(
            self._plane, self._names, self._inbox, self._give_back, self._lease_s
        )

    def _lease_s(self) -> float:
        """Of a job that is taken now: others may change the limits."""
        return self.limits.visibility_timeout_s

    @property
    def name(self) -> str:
        return self._names.queue

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            async with open_nursery() as self._nursery:
                await self._nursery.start(self._fetcher.run)
                task_status.started()
        finally:
            # Who is cancelled in mid-take may come later: his delivery expires, and comes again.
            self._nursery = None

    # --- jobs in ---

    async def put(
        self,
        job_id: str,
        payload: bytes,
        *,
        origin: JobOrigin = NO_ORIGIN,
        timeout_s: float = 10.0,
    ) -> PutResult:
        check_job_id(job_id)
        room = self._plane.message_bytes_max - HEADER_BYTES_MAX - self._jobs.added_bytes
        if len(payload) > room:
            raise RequestError(f"a job of {len(payload)} bytes; {room} fit", param="payload")
        deadline = trio.current_time() + timeout_s
        try:
            stored, is_repeated = await self._stream.store(
                self._names.job_subject(job_id),
                self._jobs.seal(job_id, payload, origin),
                {"Nats-Msg-Id": job_id} | origin_headers(origin),
                deadline=deadline,
            )
        except JetStreamError as error:
            return self._refused(error)
        # A copy of our own earlier try, whose answer was lost, is no duplicate.
        if stored.duplicate and not is_repeated:
            return PutResult.DUPLICATE
        return PutResult.ADDED

    def _refused(self, error: JetStreamError) -> PutResult:
        if error.error_code == _STORE_FAILED and "per subject" in error.message:
            return PutResult.DUPLICATE if error.definite else PutResult.ADDED
        if error.error_code == _STORE_FAILED and "maximum" in error.message:
            raise OverloadedError(
                f"{self.limits.depth_max} jobs are in queue {self.name}",
                bound="depth_max",
                value=self.limits.depth_max,
                definite=error.definite,
            ) from error
        raise error

    # --- jobs out ---

    async def take(self, *, wait_s: float) -> LeasedJob | None:
        give_up_at = trio.current_time() + wait_s
        now = trio.current_time()
        self._held = {token: held for token, held in self._held.items() if held.until > now}
        while True:
            fetched = await self._fetcher.fetch(give_up_at=give_up_at)
            if fetched is None:
                return None
            delivery, since = fetched
            if (taken_back := self._taken_back.get(delivery.job_id)) is not None:
                # Read before, the record would count that lease as an attempt, perhaps as the last one.
                await taken_back.wait()
            if not self._is_in_time(since):
                text = "queue %s: a delivery of job %s is too old to be taken, and will come again"
                logger.warning(text, self.name, delivery.job_id)
                continue
            try:
                job = await self._claim(delivery, since)
            except _LOST as error:
                # It expires and is delivered again, to whoever asks then.
                logger.warning("queue %s: a delivery was lost: %s", self.name, error)
                if trio.current_time() >= give_up_at:
                    return None
                continue
            if job is not None:
                return job

    def _is_in_time(self, since: float) -> bool:
        """Whether the lease of a delivery handed out at `since` lasts long enough to be taken and extended.

        One that was not is said nothing about: the job is delivered again, or has been.
        """
        return trio.current_time() - since < self.limits.visibility_timeout_s / 2

    async def _claim(self, delivery: JobDelivery, since: float) -> LeasedJob | None:
        """Make a delivery a lease; None if it turned out to be none, and was dealt with."""
        until = since + self.limits.visibility_timeout_s
        record: Record | None = None
        revision = 0
        payload: bytes | None = None
        write = partial(self._leases.write, delivery.job_id, deadline=until)
        with suppress(RemoteProtocolError):
            payload = self._jobs.open(delivery.job_id, delivery.payload, delivery.origin)
        # A first delivery has no record, almost always: the write finds out if it does.
        must_read = delivery.delivered > 1
        for _ in range(CLAIM_TRIES_MAX):
            if must_read:
                record, revision = await self._leases.read(delivery.job_id, deadline=until)
                # Another process may have named others: by old ones a job would die, or be dropped as a copy.
                self.limits = await existing_limits(self._stream, self._names, deadline=until)
            must_read = True
            match judge(delivery, record, self.limits, opens=payload is not None):
                case Leave():
                    return None
                case Drop():
                    await self._confirm(delivery, _ACK, until)
                    return None
                case Bury(attempts, reason, is_recorded):
                    dead = self._record(delivery, record, "dead", attempts, reason)
                    if is_recorded or await write(dead, revision):
                        words = self._jobs.open_reason(delivery.job_id, dead.reason)
                        text = "queue %s: job %s is a dead letter after %d attempts: %s"
                        logger.error(text, self.name, delivery.job_id, attempts, words)
                        await self._dead_letter(delivery, dead, until)
                        return None
                case TakeJob(attempt):
                    leased = self._record(delivery, record, "leased", attempt)
                    try:
                        written = await write(leased, revision)
                    except (trio.Cancelled, *_LOST):
                        self._give_back(delivery, since, leased, revision)
                        raise
                    if written and payload is not None and trio.current_time() < until:
                        expired_at = trio.current_time() + self.limits.visibility_timeout_s
                        self._held[leased.token] = HeldJob(delivery, leased, written, expired_at)
                        queued_s = max(0.0, self._wall() - delivery.put_ns / _NS)
                        about = (attempt, leased.token, queued_s, delivery.origin)
                        return LeasedJob(delivery.job_id, payload, *about)
        return None  # Others are at it: it is theirs, or is delivered again.

    def _record(
        self,
        delivery: JobDelivery,
        known: Record | None,
        state: RecordState,
        attempt: int,
        reason: str = "",
    ) -> Record:
        # Queued again it is still the put of then, of which the server knows when it was.
        put_ns = (known.put_ns if known else 0) if delivery.is_requeued else delivery.put_ns
        return Record(
            state=state,
            job=delivery.number,
            attempt=attempt,
            token=f"{self._inbox.rpartition('.')[2]}.{next(self._tokens):x}",
            put_ns=put_ns,
            reason=reason[:_TOLD_CHARS_MAX],
            delivered=delivery.delivered,
        )

    async def _dead_letter(self, delivery: JobDelivery, dead: Record, deadline: float) -> None:
        """Move a job, whose record says that it is dead, to the dead letters."""
        await self._dead.add(delivery, dead.attempt, dead.reason, deadline=deadline)
        await self._confirm(delivery, _ACK, deadline)

    # --- settling ---

    async def extend(self, job: LeasedJob, *, timeout_s: float = 10.0) -> Settlement:
        now = trio.current_time()
        held = await self._settle(job, "leased", now + timeout_s)
        if held is None:
            return Settlement.STALE
        held.until = now + self.limits.visibility_timeout_s
        await self._confirm(held.delivery, _IN_PROGRESS, now + timeout_s)
        return Settlement.APPLIED

    async def ack(self, job: LeasedJob, *, timeout_s: float = 10.0) -> Settlement:
        deadline = trio.current_time() + timeout_s
        held = await self._settle(job, "done", deadline)
        if held is None:
            return Settlement.STALE
        await self._confirm(held.delivery, _ACK, deadline)
        self._held.pop(job.token, None)
        return Settlement.APPLIED

    async def nak(
        self,
        job: LeasedJob,
        *,
        delay_s: float = 0.0,
        reason: str = "",
        timeout_s: float = 10.0,
    ) -> Settlement:
        check_delay(delay_s)
        deadline = trio.current_time() + timeout_s
        is_last = job.attempt >= self.limits.attempts_max
        held = await self._settle(
            job, "dead" if is_last else "waiting", deadline, reason=reason or "refused"
        )
        if held is None:
            return Settlement.STALE
        if is_last:
            await self._dead_letter(held.delivery, held.record, deadline)
        elif trio.current_time() < held.until:
            # Later it is delivered anyway, and this would take it from whom: JetStream looks at its number alone.
            word = _NAK + (b' {"delay": %d}' % int(delay_s * _NS) if delay_s else b"")
            await self._confirm(held.delivery, word, deadline)
        self._held.pop(job.token, None)
        return Settlement.DEAD if is_last else Settlement.APPLIED

    async def _settle(
        self, job: LeasedJob, state: RecordState, deadline: float, *, reason: str = ""
    ) -> HeldJob | None:
        """Write what became of a lease; None if it is not ours, or no more.

        It stays in `_held` until the caller has done what follows from it, so that a settlement
        that failed or was cancelled on the way may be repeated, with the same answer.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        held = self._held.get(job.token)
        if held is None or not held.may_become(state):
            self._held.pop(job.token, None)
            await trio.lowlevel.cancel_shielded_checkpoint()
            return None
        told = self._jobs.seal_reason(job.id, reason[:REASON_CHARS_MAX])
        record = msgspec.structs.replace(held.record, state=state, reason=told)
        revision = await self._leases.write(job.id, record, held.revision, deadline=deadline)
        if revision is None:
            self._held.pop(job.token, None)
            return None
        held.record, held.revision = record, revision
        return held

    async def _confirm(self, delivery: JobDelivery, word: bytes, deadline: float) -> None:
        """Tell the consumer what the record says already; if that fails, the record will do."""
        by = min(deadline, trio.current_time() + CONFIRM_TIMEOUT_S)
        try:
            await self._stream.ask(delivery.ack_subject, word, JetStreamReply, deadline=by)
        except (JetStreamError, *_LOST) as error:
            logger.warning("queue %s: %s not confirmed: %s", self.name, word.decode(), error)

    def _give_back(
        self, delivery: JobDelivery, since: float, leased: Record | None = None, revision: int = 0
    ) -> None:
        """A delivery that nobody wants any more, or of which nobody knows whether `leased` was written on top of `revision`.

        It costs no attempt, as no taker has seen it.
        """
        if self._nursery is None:
            return
        over = trio.Event()
        if leased is not None:
            self._taken_back[delivery.job_id] = over
        self._nursery.start_soon(self._take_back, over, delivery, since, leased, revision)

    async def _take_back(
        self,
        over: trio.Event,
        delivery: JobDelivery,
        since: float,
        leased: Record | None,
        revision: int,
    ) -> None:
        try:
            for timeout_s in (CONFIRM_TIMEOUT_S, self.limits.visibility_timeout_s):
                # At first shielded, for whoever is cancelled mostly leaves the queue, too.
                with (
                    trio.CancelScope(shield=timeout_s == CONFIRM_TIMEOUT_S),
                    suppress(TrinamoError),
                ):
                    if leased is not None:
                        unused = msgspec.structs.replace(
                            leased, state="waiting", attempt=leased.attempt - 1
                        )
                        by = trio.current_time() + timeout_s
                        await self._leases.write(delivery.job_id, unused, revision, deadline=by)
                    # Later it may be somebody else's, and this would take it from him.
                    if self._is_in_time(since):
                        await self._plane.publish(delivery.ack_subject, _NAK)
                    return
            logger.warning("queue %s: a delivery expires unused", self.name)
        finally:
            over.set()
            if self._taken_back.get(delivery.job_id) is over:
                del self._taken_back[delivery.job_id]

    # --- looking after it ---

    async def statistics(self) -> QueueStatistics:
        return await read_statistics(self._stream, self._names, self._wall)

    async def dead_letters(self, *, count_max: int = 100) -> list[DeadLetter]:
        return await self._dead.list(count_max)

    async def dead_letter(self, job_id: str) -> DeadLetter | None:
        check_job_id(job_id)
        found = await self._dead.find(job_id)
        return None if found is None else self._dead.letter(found)

    async def requeue(self, job_id: str) -> bool:
        check_job_id(job_id)
        deadline = administration()
        letter = await self._dead.find(job_id)
        if letter is None:
            return False
        if not await self._put_back(job_id, letter, deadline):
            # The id is in the queue. It may be the job that died, not acknowledged yet. Of one that was put since the
            # record knows nothing or says something else, and that job stands for both.
            record, _ = await self._leases.read(job_id, deadline=deadline)
            if record and record.state == "dead" and letter.stored_s >= record.put_ns / _NS:
                await self._stream.remove(self._names.jobs, record.job, deadline=deadline)
                await self._put_back(job_id, letter, deadline)
        # Interrupted before this it is in both places; doing it again mends that.
        await self._stream.remove(self._names.dead, letter.sequence, deadline=deadline)
        return True

    async def _put_back(self, job_id: str, letter: StoredMessage, deadline: float) -> bool:
        """Store a dead letter among the jobs, too; False if its id is in the queue."""
        # An id of its own, because the job's is still remembered as put.
        headers = {"Nats-Msg-Id": f"{job_id}.requeued.{letter.sequence}", REQUEUED_HEADER: "1"}
        origin = origin_headers(read_origin(letter.headers))
        subject = self._names.job_subject(job_id)
        try:
            await self._stream.store(subject, letter.payload, headers | origin, deadline=deadline)
        except JetStreamError as error:
            self._refused(error)
            return False
        return True

    async def purge_dead(self, job_id: str | None = None) -> int:
        if job_id is not None:
            check_job_id(job_id)
        return await self._dead.purge(job_id)
