"""The values of a work queue: its bounds, jobs as they are put and taken, and what became of them.

What a job goes through, `work_queue.py` says.
"""

from __future__ import annotations

import enum
import re
from typing import Final

import attrs

from ...errors import RequestError
from ..traceparent import decode_traceparent

DELAY_S_MAX: Final = 3600.0
"""The longest delay of a `nak`."""
REASON_CHARS_MAX: Final = 512
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_JOB_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_REQUEST_ID: Final = re.compile(r"[!-~]{1,256}")
EXPIRED: Final = "its last lease expired"


def check_queue_name(name: str) -> None:
    """Raise `RequestError` unless `name` is 1 to 64 letters, digits, `_` and `-`."""
    if not _NAME.fullmatch(name):
        raise RequestError(f"{name[:80]!r} is not the name of a queue", param="name")


def check_job_id(job_id: str) -> None:
    """Raise `RequestError` unless `job_id` is 1 to 128 letters, digits, `_` and `-`."""
    if not _JOB_ID.fullmatch(job_id):
        raise RequestError(f"{job_id[:160]!r} is not the id of a job", param="job_id")


def check_delay(delay_s: float) -> None:
    """Raise `RequestError` unless `delay_s` is between 0 and an hour."""
    if not 0 <= delay_s <= DELAY_S_MAX:
        raise RequestError(f"a delay of {delay_s:g} s; 0 to {DELAY_S_MAX:g} fit", param="delay_s")


@attrs.frozen(kw_only=True)
class QueueLimits:
    """The bounds of one queue. All processes that open it should name the same ones."""

    visibility_timeout_s: float = attrs.field(
        default=30.0, validator=[attrs.validators.gt(0), attrs.validators.le(DELAY_S_MAX)]
    )
    """How long a job is invisible after it was taken or extended."""
    attempts_max: int = attrs.field(
        default=5, validator=[attrs.validators.ge(1), attrs.validators.le(1000)]
    )
    """How often a job may be taken before it is a dead letter."""
    duplicate_window_s: float = attrs.field(
        default=120.0, validator=[attrs.validators.gt(0), attrs.validators.le(86_400)]
    )
    """How long after its put an id is remembered, also if the job is finished."""
    remembered_s: float = attrs.field(
        default=2.0 * DELAY_S_MAX, validator=[attrs.validators.gt(0), attrs.validators.le(86_400)]
    )
    """How long after its last change a job's record is kept: its attempts, and that it is done.

    Longer than the longest `delay_s` of a nak, or the attempts before it are not counted.
    """
    depth_max: int = attrs.field(default=100_000, validator=attrs.validators.ge(1))
    """How many jobs may be ready and leased together; more are refused."""
    dead_max: int = attrs.field(default=10_000, validator=attrs.validators.ge(1))
    """How many dead letters are kept; the oldest are forgotten."""


class PutResult(enum.StrEnum):
    """What became of a put. Neither is an error: the job is in the queue, or has been."""

    ADDED = "added"
    DUPLICATE = "duplicate"
    """The id is in the queue, or was put less than `duplicate_window_s` ago. Nothing changed."""


class Settlement(enum.StrEnum):
    """What became of an `ack`, `nak` or `extend`."""

    APPLIED = "applied"
    DEAD = "dead"
    """A nak that used up the last attempt: the job is a dead letter now."""
    STALE = "stale"
    """The lease had expired or was settled already: nothing changed, and the effect of the work
    must not be made (it is, or will be, somebody else's)."""


def _known_traceparent(text: str) -> str:
    return text if decode_traceparent(text) is not None else ""


def _known_request_id(text: str) -> str:
    return text if _REQUEST_ID.fullmatch(text) else ""


@attrs.frozen(kw_only=True)
class JobOrigin:
    """For whom a job was put. Whatever is malformed counts as absent, so that no job fails by it."""

    traceparent: str = attrs.field(default="", converter=_known_traceparent)
    """W3C trace context of the put; empty where nobody traces."""
    request_id: str = attrs.field(default="", converter=_known_request_id)
    """Of the request that put it, 1 to 256 visible characters; empty for none."""


NO_ORIGIN: Final = JobOrigin()


@attrs.frozen
class LeasedJob:
    """A job as handed to one taker."""

    id: str
    payload: bytes = attrs.field(repr=False)
    attempt: int
    """1 for the first time; at most `attempts_max`."""
    token: str
    """Names this lease, and no other lease of any job."""
    queued_s: float = 0.0
    """How long ago it was put."""
    origin: JobOrigin = NO_ORIGIN
    """As the put said; a dead letter that is queued again keeps it."""


@attrs.frozen
class DeadLetter:
    """A job whose attempts are used up."""

    id: str
    payload: bytes = attrs.field(repr=False)
    attempts: int
    reason: str
    """The last nak's words, or that the lease expired."""
    dead_s: float
    """How long ago it died."""


@attrs.frozen
class QueueStatistics:
    """A queue at one moment."""

    depth: int
    """Jobs neither acked nor dead."""
    leased: int
    """Those of them that are taken. A broker may also count those that await another attempt."""
    dead: int
    """Dead letters kept."""
    oldest_age_s: float
    """How long ago the oldest job of `depth` was put; 0 if there is none."""

    @property
    def ready(self) -> int:
        """Jobs that nobody has taken."""
        return self.depth - self.leased
