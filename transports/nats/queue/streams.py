"""The streams behind work queues: found, made, changed, counted; the register of leases, and the dead letters."""

from __future__ import annotations

import logging
import random
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from typing import Final

import attrs
import trio

from trinamo.runtime.errors import EventPlaneError, RemoteProtocolError, UnavailableError
from trinamo.runtime.protocol.queue.jobs import (
    DeadLetter,
    JobOrigin,
    QueueLimits,
    QueueStatistics,
)
from trinamo.transports.security.sealing import SEALED_BYTES, Sealer

from .api import (
    WRONG_LAST_SEQUENCE,
    ConsumerInfo,
    JetStream,
    JetStreamError,
    JetStreamReply,
    Purged,
    QueuePlane,
    R,
    StoredMessage,
    StreamInfo,
    StreamPage,
)
from .records import (
    JobDelivery,
    Record,
    RecordState,
    StreamNames,
    consumer_config,
    dead_headers,
    decode_record,
    encode_record,
    origin_headers,
    queue_limits,
    read_dead_headers,
    read_origin,
    stream_configs,
)

logger = logging.getLogger("trinamo.nats")

ADMINISTRATION_TIMEOUT_S: Final = 10.0
PROBE: Final = "trinamo-doctor"
"""A stream that is there while somebody tries whether streams take messages."""
PROBE_SUBJECT: Final = "trinamo.doctor"
_PROBE_TIMEOUT_S: Final = 4.0
_NAME_IN_USE: Final = 10058
_REASON_BYTES_MAX: Final = 1024
"""Three times that, as a header quotes what is not ASCII, leaves room for the other headers of a dead letter."""
_SEALED: Final = "sealed "
"""Begins a reason that is sealed."""


def administration() -> float:
    """Until when something is tried that no caller names a time for, on trio's clock."""
    return trio.current_time() + ADMINISTRATION_TIMEOUT_S


async def list_work_queues(plane: QueuePlane, *, rng: random.Random) -> list[str]:
    """The names of all queues on the server, sorted."""
    stream = JetStream(plane, rng)
    deadline = administration()
    found: list[str] = []
    offset = 0
    while True:
        answer = await stream.call(
            "STREAM.NAMES", {"offset": offset}, StreamPage, deadline=deadline
        )
        page = answer.streams or ()
        found += [queue for each in page if (queue := StreamNames.queue_of(each)) is not None]
        offset += len(page)
        if not page or offset >= answer.total:
            return sorted(found)


async def try_write(plane: QueuePlane, replicas: int, *, rng: random.Random) -> None:
    """Make a stream like those of queues, store a message in it, and delete it, within 4 s.

    Raises what a put would: `JetStreamError` or `DeadlineError` says that nothing was stored,
    `UnknownOutcomeError` that nobody said so. The stream stays if it fails, or is cancelled, and is there once.
    """
    stream = JetStream(plane, rng)
    deadline = trio.current_time() + _PROBE_TIMEOUT_S
    config = {"name": PROBE, "subjects": [PROBE_SUBJECT], "num_replicas": replicas, "max_msgs": 1}
    body = {**config, "storage": "file"}
    await stream.call(f"STREAM.CREATE.{PROBE}", body, JetStreamReply, deadline=deadline)
    await stream.store(PROBE_SUBJECT, b"written by `trinamo doctor`", {}, deadline=deadline)
    await stream.find(f"STREAM.DELETE.{PROBE}", {}, JetStreamReply, deadline=deadline)


async def existing_limits(stream: JetStream, names: StreamNames, *, deadline: float) -> QueueLimits:
    jobs = await _info(stream, names, f"STREAM.INFO.{names.jobs}", StreamInfo, deadline)
    return queue_limits(jobs.config.description)


async def _info(
    stream: JetStream, names: StreamNames, what: str, kind: type[R], deadline: float
) -> R:
    answer = await stream.find(what, {}, kind, deadline=deadline)
    if answer is None:
        raise UnavailableError(f"there is no queue {names.queue}")
    return answer


async def make_streams(
    stream: JetStream, names: StreamNames, limits: QueueLimits, replicas: int
) -> None:
    deadline = administration()
    for config in stream_configs(names, limits, replicas=replicas):
        try:
            await stream.call(
                f"STREAM.CREATE.{config['name']}", config, JetStreamReply, deadline=deadline
            )
        except JetStreamError as error:
            if error.error_code != _NAME_IN_USE:
                raise
            await stream.call(
                f"STREAM.UPDATE.{config['name']}", config, JetStreamReply, deadline=deadline
            )
    await stream.call(
        f"CONSUMER.DURABLE.CREATE.{names.jobs}.{names.CONSUMER}",
        {"stream_name": names.jobs, "config": consumer_config(limits)},
        JetStreamReply,
        deadline=deadline,
    )


async def read_statistics(
    stream: JetStream, names: StreamNames, wall: Callable[[], float]
) -> QueueStatistics:
    """Depth and age, asked of the streams' leaders; `wall` is the time since the epoch in s.

    Raises `UnavailableError` if a stream of the queue is not there, such as on a server that lost
    its disk.
    """
    deadline, takers = administration(), f"CONSUMER.INFO.{names.jobs}.{names.CONSUMER}"
    jobs = await _info(stream, names, f"STREAM.INFO.{names.jobs}", StreamInfo, deadline)
    consumer = await _info(stream, names, takers, ConsumerInfo, deadline)
    dead = await _info(stream, names, f"STREAM.INFO.{names.dead}", StreamInfo, deadline)
    depth, age_s = jobs.state.messages, jobs.age_s(wall())
    return QueueStatistics(depth, min(depth, consumer.num_ack_pending), dead.state.messages, age_s)


TRIES_MAX: Final = 8
_EXPECT: Final = "Nats-Expected-Last-Subject-Sequence"


@attrs.define(eq=False)
class HeldJob:
    delivery: JobDelivery
    record: Record
    revision: int
    until: float
    """When it has expired for certain, on trio's clock."""

    def may_become(self, state: RecordState) -> bool:
        if self.record.state != "leased":
            return self.record.state == state  # Settled so already, but not to the end.
        return trio.current_time() < self.until


@attrs.frozen
class SealedJobs:
    """What one queue's streams hold as the broker has it: payloads, for one id and for whom it was put, and records."""

    _sealer: Sealer
    _queue: str

    @property
    def added_bytes(self) -> int:
        """By so much a payload is longer there."""
        return SEALED_BYTES if self._sealer.seals else 0

    def seal(self, job_id: str, payload: bytes, origin: JobOrigin) -> bytes:
        return self._sealer.seal(payload, self._about("job", job_id, origin))

    def open(self, job_id: str, sealed: bytes, origin: JobOrigin) -> bytes:
        """Raises `RemoteProtocolError`, and counts, for what no member has put so."""
        return self._sealer.open(sealed, self._about("job", job_id, origin))

    def seal_record(self, job_id: str, record: bytes) -> bytes:
        return self._sealer.seal(record, self._about("record", job_id))

    def open_record(self, job_id: str, sealed: bytes) -> bytes:
        """Raises `RemoteProtocolError`, and counts, for what no member has written of this job."""
        return self._sealer.open(sealed, self._about("record", job_id))

    def seal_reason(self, job_id: str, reason: str) -> str:
        """The words in which a handler failed, which may repeat the payload, as text for a header; their beginning."""
        # No encoder takes a lone surrogate, and a payload of JSON may hold one.
        words = reason.encode(errors="replace")[:_REASON_BYTES_MAX]
        if not (reason and self._sealer.seals):
            return words.decode(errors="ignore")
        sealed = self._sealer.seal(words, self._about("reason", job_id))
        return _SEALED + urlsafe_b64encode(sealed).decode()

    def open_reason(self, job_id: str, text: str) -> str:
        """As they were sealed; what was not, such as that a lease expired, as it is."""
        if not (text.startswith(_SEALED) and self._sealer.seals):
            return text
        try:
            sealed = urlsafe_b64decode(text.removeprefix(_SEALED))
            return self._sealer.open(sealed, self._about("reason", job_id)).decode(errors="ignore")
        except (RemoteProtocolError, ValueError):
            return text

    def _about(self, what: str, job_id: str, origin: JobOrigin | None = None) -> bytes:
        whose = attrs.astuple(origin) if origin else ()
        return " ".join((what, self._queue, job_id, *whose)).encode()


@attrs.frozen
class Leases:
    """Compare-and-set over a stream: a record's revision is the sequence of its message.

    In a cluster with a secret one that no member wrote is as none: the token of the broker can lose records.
    """

    _stream: JetStream
    _names: StreamNames
    _jobs: SealedJobs

    async def read(self, job_id: str, *, deadline: float) -> tuple[Record | None, int]:
        """The last record of `job_id` and its revision; None and 0 if there is none.

        Asked of the stream's leader, so it is the last one.
        """
        query = {"last_by_subj": self._names.lease_subject(job_id)}
        found = await self._stream.message(self._names.leases, query, deadline=deadline)
        if found is None:
            return None, 0
        try:
            record = self._jobs.open_record(job_id, found.payload)
        except RemoteProtocolError as error:
            where = (self._names.queue, job_id)
            logger.warning("queue %s: the record of job %s is refused: %s", *where, error)
            return None, found.sequence
        return decode_record(record), found.sequence

    async def write(
        self, job_id: str, record: Record, revision: int, *, deadline: float
    ) -> int | None:
        """Put `record` on top of `revision`; its own revision, or None if another was there.

        A write whose answer was lost is found by its token and state when it is tried again, and
        so is an extension of the same lease by another task, on top of which it goes then.
        """
        for _ in range(TRIES_MAX):
            try:
                stored, _ = await self._stream.store(
                    self._names.lease_subject(job_id),
                    self._jobs.seal_record(job_id, encode_record(record)),
                    {_EXPECT: str(revision)},
                    deadline=deadline,
                )
                return stored.seq
            except JetStreamError as error:
                if error.error_code != WRONG_LAST_SEQUENCE:
                    raise
            found, revision = await self.read(job_id, deadline=deadline)
            if found is None or found.token != record.token:
                return None
            if found.state == record.state:
                return revision
            if found.state != "leased":
                return None
        raise EventPlaneError(f"the record of job {job_id} keeps changing", definite=True)


@attrs.frozen
class DeadLetters:
    """Adds, lists, finds and forgets them. `wall` is the time in seconds since the epoch.

    One that does not open is shown as it is: its reason says why it died.
    """

    _stream: JetStream
    _names: StreamNames
    _jobs: SealedJobs
    _wall: Callable[[], float]

    async def add(
        self, delivery: JobDelivery, attempts: int, reason: str, *, deadline: float
    ) -> None:
        """Keep a job; doing so twice keeps it once, because there is one message per id."""
        await self._stream.store(
            self._names.dead_subject(delivery.job_id),
            delivery.payload,
            dead_headers(attempts, reason) | origin_headers(delivery.origin),
            deadline=deadline,
        )

    async def list(self, count_max: int) -> list[DeadLetter]:
        """The oldest first."""
        found: list[DeadLetter] = []
        number = 1
        while len(found) < count_max:
            query = {"seq": number, "next_by_subj": self._names.dead_subject("*")}
            # Each has its time: many large ones come over a slow link, too.
            message = await self._stream.message(self._names.dead, query, deadline=administration())
            if message is None:
                break
            found.append(self.letter(message))
            number = message.sequence + 1
        return found

    async def purge(self, job_id: str | None) -> int:
        """Forget one, or all; how many there were."""
        query = {} if job_id is None else {"filter": self._names.dead_subject(job_id)}
        answer = await self._stream.call(
            f"STREAM.PURGE.{self._names.dead}", query, Purged, deadline=administration()
        )
        return answer.purged

    async def find(self, job_id: str) -> StoredMessage | None:
        query = {"last_by_subj": self._names.dead_subject(job_id)}
        return await self._stream.message(self._names.dead, query, deadline=administration())

    def letter(self, message: StoredMessage) -> DeadLetter:
        attempts, reason = read_dead_headers(message.headers)
        job_id = message.subject.rpartition(".")[2]
        dead_s = max(0.0, self._wall() - message.stored_s)
        try:
            payload = self._jobs.open(job_id, message.payload, read_origin(message.headers))
        except RemoteProtocolError:
            payload = message.payload
        reason = self._jobs.open_reason(job_id, reason)
        return DeadLetter(job_id, payload, attempts, reason, dead_s)
