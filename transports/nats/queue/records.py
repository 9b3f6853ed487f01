"""What a work queue writes into JetStream, and how what is found there is judged. Sans-IO.

A queue is three streams. *jobs*: one message per job, work-queue retention, read through one pull
consumer whose `ack_wait` is the visibility timeout. *leases*: the last record of each job id, a
compare-and-set register. *dead*: the dead letters.

JetStream alone would let a late acknowledgement remove a job that another consumer works on: it
looks only at the message's sequence. So the record decides. Taking, extending and settling a job
are each a write that is accepted only on top of the record its writer knew; who is late finds
another record and is stale. The acknowledgement to the consumer comes after, and may be lost: the
job is delivered again, its record says that it is done, and it is dropped.

The record also counts the attempts, because the consumer's own count includes deliveries that
reached nobody, and it remembers a finished job for longer than the server does, which forgets ids
of removed messages when it restarts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal
from urllib.parse import quote, unquote

import attrs
import msgspec

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.protocol.queue.jobs import (
    EXPIRED,
    NO_ORIGIN,
    JobOrigin,
    QueueLimits,
)
from trinamo.runtime.protocol.undecodable import UNDECODABLE, decoded

from .api import Number

UNSEALED: Final = "no member put it so, or its security.secret_file is another"
REQUEUED_HEADER: Final = "Trinamo-Requeued"
_ATTEMPTS_HEADER: Final = "Trinamo-Attempts"
_REASON_HEADER: Final = "Trinamo-Reason"
_TRACEPARENT_HEADER: Final = "traceparent"
_REQUEST_ID_HEADER: Final = "X-Request-Id"
_NS: Final = 1_000_000_000
WAITING_PULLS_MAX: Final = 2048
_ACK_TOKENS: Final = 9
_DIGITS_MAX: Final = 19


RecordState = Literal["leased", "waiting", "done", "dead"]


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of one job id."""

    state: RecordState
    job: Number
    """Sequence of the job's message, so that another put of the same id is told apart."""
    attempt: Number
    token: str
    """The lease that wrote this."""
    put_ns: Number
    """When the job was put, by the server's clock; 0 if that is forgotten."""
    reason: str = ""
    delivered: Number = 0
    """By which delivery of the message it was taken; 0 of an older build, which does not say."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


def encode_record(record: Record) -> bytes:
    return _encoder.encode(record)


def decode_record(value: bytes) -> Record:
    """Raises `RemoteProtocolError` for what is no record."""
    return decoded(_decoder.decode, value, "not a record of a work queue")


# --- names and configurations -------------------------------------------------------------------


@attrs.frozen
class StreamNames:
    """The streams and subjects of one queue."""

    queue: str

    PREFIX: ClassVar[str] = "trinamo-queue-"
    SUFFIX: ClassVar[str] = "-jobs"
    CONSUMER: ClassVar[str] = "takers"

    @property
    def jobs(self) -> str:
        return f"{self.PREFIX}{self.queue}{self.SUFFIX}"

    @property
    def leases(self) -> str:
        return f"{self.PREFIX}{self.queue}-leases"

    @property
    def dead(self) -> str:
        return f"{self.PREFIX}{self.queue}-dead"

    def job_subject(self, job_id: str) -> str:
        return f"trinamo.queue.{self.queue}.job.{job_id}"

    def lease_subject(self, job_id: str) -> str:
        return f"trinamo.queue.{self.queue}.lease.{job_id}"

    def dead_subject(self, job_id: str) -> str:
        return f"trinamo.queue.{self.queue}.dead.{job_id}"

    @classmethod
    def queue_of(cls, stream: str) -> str | None:
        """The queue whose jobs `stream` holds, if it does."""
        if not (stream.startswith(cls.PREFIX) and stream.endswith(cls.SUFFIX)):
            return None
        return stream[len(cls.PREFIX) : -len(cls.SUFFIX)] or None


def stream_configs(
    names: StreamNames, limits: QueueLimits, *, replicas: int
) -> list[dict[str, Any]]:
    """The three streams as JetStream's API takes them; the first one's description has the limits.

    One message per id in *jobs*, so the server itself refuses an id that is in the queue.
    """
    shared = {
        "storage": "file",
        "num_replicas": replicas,
        "max_msgs_per_subject": 1,
        "max_consumers": -1,
        "max_bytes": -1,
    }
    record_age_s = max(
        limits.remembered_s, 2 * limits.duplicate_window_s, 2 * limits.visibility_timeout_s
    )
    return [
        shared
        | {
            "name": names.jobs,
            "description": json.dumps(attrs.asdict(limits)),
            "subjects": [names.job_subject("*")],
            "retention": "workqueue",
            "discard": "new",
            "discard_new_per_subject": True,
            "max_msgs": limits.depth_max,
            "max_age": 0,
            "duplicate_window": int(limits.duplicate_window_s * _NS),
        },
        shared
        | {
            "name": names.leases,
            "subjects": [names.lease_subject("*")],
            "retention": "limits",
            "discard": "old",
            "max_msgs": -1,
            "max_age": int(record_age_s * _NS),
        },
        shared
        | {
            "name": names.dead,
            "subjects": [names.dead_subject("*")],
            "retention": "limits",
            "discard": "old",
            "max_msgs": limits.dead_max,
            "max_age": 0,
        },
    ]


def consumer_config(limits: QueueLimits) -> dict[str, Any]:
    """The one consumer of *jobs*. It delivers for ever: how often is for the record to say."""
    return {
        "durable_name": StreamNames.CONSUMER,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": int(limits.visibility_timeout_s * _NS),
        "max_deliver": -1,
        "max_ack_pending": -1,
        "max_waiting": WAITING_PULLS_MAX,
        "replay_policy": "instant",
    }


def queue_limits(description: str) -> QueueLimits:
    """The limits a queue was made with; the defaults for what it does not say."""
    try:
        return msgspec.json.decode(description, type=QueueLimits)
    except (*UNDECODABLE, ValueError):
        return QueueLimits()


# --- deliveries ---------------------------------------------------------------------------------


@attrs.frozen
class JobDelivery:
    """A job's message as the consumer handed it out."""

    job_id: str
    payload: bytes = attrs.field(repr=False)
    ack_subject: str
    number: int
    """The message's sequence in *jobs*."""
    delivered: int
    """How often the consumer has handed it out; 1 for the first time."""
    put_ns: int
    is_requeued: bool
    origin: JobOrigin = NO_ORIGIN


def parse_delivery(
    subject: str, payload: bytes, reply: str, headers: Mapping[str, str]
) -> JobDelivery:
    """Read what the acknowledgement subject says; `RemoteProtocolError` if it is none."""
    tokens = reply.split(".")
    # Of newer servers a domain and an account come before the stream.
    fields = tokens[4:] if len(tokens) == _ACK_TOKENS else tokens[6:]
    try:
        delivered, number, _, put_ns = (_number(token) for token in fields[:4])
    except ValueError as error:
        raise RemoteProtocolError(f"not a delivery of JetStream: {reply!r}: {error}") from None
    if tokens[:2] != ["$JS", "ACK"]:
        raise RemoteProtocolError(f"not a delivery of JetStream: {reply!r}")
    job_id = subject.rpartition(".")[2]
    is_requeued = REQUEUED_HEADER in headers
    origin = read_origin(headers)
    return JobDelivery(job_id, payload, reply, number, delivered, put_ns, is_requeued, origin)


@attrs.frozen
class TakeJob:
    """Verdict: take it, for this attempt."""

    attempt: int


@attrs.frozen
class Bury:
    """Verdict: it has had its attempts; make it a dead letter."""

    attempts: int
    reason: str
    is_recorded: bool
    """Whether its record says so already, so that only the moving is left."""


@attrs.frozen
class Drop:
    """Verdict: it is done, or a second copy; acknowledge it and forget it."""


@attrs.frozen
class Leave:
    """Verdict: somebody was given it since, and has it or had it; say nothing, for it is known by its number alone."""


def judge(
    delivery: JobDelivery, record: Record | None, limits: QueueLimits, *, opens: bool = True
) -> TakeJob | Bury | Drop | Leave:
    """What to do with a delivery, given the last record of its id, and whether its payload opens.

    One that does not is kept for people: its secret may be one that this process does not know yet. One that
    comes late, to a process that was stopped meanwhile say, must not take the lease of who was given the job since.
    """
    if not opens:
        is_recorded = record is not None and record.state == "dead"
        return Bury(0, UNSEALED, is_recorded)
    if record is None:
        return TakeJob(1)
    if record.job != delivery.number:
        # Another put of the same id. The server refuses those unless it has forgotten the id.
        age_s = (delivery.put_ns - record.put_ns) / _NS
        is_copy = record.state in ("done", "dead") and age_s < limits.duplicate_window_s
        return Drop() if is_copy and not delivery.is_requeued else TakeJob(1)
    match record.state:
        case "done":
            return Drop()
        case "leased" | "waiting" if record.delivered > delivery.delivered:
            return Leave()
        case "dead":
            return Bury(record.attempt, record.reason, is_recorded=True)
        case "leased" | "waiting" if record.attempt >= limits.attempts_max:
            return Bury(record.attempt, record.reason or EXPIRED, is_recorded=False)
        case "leased" | "waiting":
            return TakeJob(record.attempt + 1)


# --- origins ------------------------------------------------------------------------------------


def origin_headers(origin: JobOrigin) -> dict[str, str]:
    """The headers of a job's message, or of its dead letter, that say for whom it was put."""
    headers = {_TRACEPARENT_HEADER: origin.traceparent, _REQUEST_ID_HEADER: origin.request_id}
    return {name: value for name, value in headers.items() if value}


def read_origin(headers: Mapping[str, str]) -> JobOrigin:
    """For whom a job was put, as far as its message says so."""
    return JobOrigin(
        traceparent=headers.get(_TRACEPARENT_HEADER, ""),
        request_id=headers.get(_REQUEST_ID_HEADER, ""),
    )


# --- dead letters -------------------------------------------------------------------------------


def dead_headers(attempts: int, reason: str) -> dict[str, str]:
    """The headers of a dead letter. The reason is a stranger's text, so it is quoted."""
    return {_ATTEMPTS_HEADER: str(attempts), _REASON_HEADER: quote(reason, safe=" ,;:()/'")}


def read_dead_headers(headers: Mapping[str, str]) -> tuple[int, str]:
    """Attempts and reason; 0 and empty where a header is missing or wrong."""
    reason = unquote(headers.get(_REASON_HEADER, ""))
    try:
        return _number(headers.get(_ATTEMPTS_HEADER, "")), reason
    except ValueError:
        return 0, reason


def _number(text: str) -> int:
    """As `Number`, in ASCII digits; `ValueError` for all else."""
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX):
        raise ValueError(f"{text[:_DIGITS_MAX]!r} is no number of JetStream")
    return int(text)
