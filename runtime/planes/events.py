"""The event plane: many small messages, at most once; request/reply; work queues.

What a job of a queue goes through is in `protocol/queue/work_queue.py`, the model that every implementation is
held to; the values that travel are in `jobs.py` beside it.

A *subject* is one or more `.`-separated tokens, none of them empty. A *pattern* may use `*` for
exactly one token and a final `>` for one or more. The rules are those of NATS, whose server answers
a malformed or oversize message by closing the connection, which would punish every other user of
it: so each message is checked here and its sender alone gets a `RequestError`. Every event plane
asks here, so that what works in memory works on a server.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol, Self, runtime_checkable

import attrs

from ..errors import RequestError
from ..protocol.queue.jobs import (
    NO_ORIGIN,
    DeadLetter,
    JobOrigin,
    LeasedJob,
    PutResult,
    QueueLimits,
    QueueStatistics,
    Settlement,
)

SUBJECT_CHARS_MAX: Final = 1024
"""Subject, reply and sizes must fit the server's control line of 4096 bytes."""

# Whitespace and control characters would end the subject early in the line protocol of NATS, and
# its clients refuse a wildcard inside a longer token.
_WORD = r"[^\s.*>\x00-\x1f\x7f]+"
_SUBJECT = re.compile(rf"{_WORD}(?:\.{_WORD})*")
_PATTERN = re.compile(rf"(?:(?:{_WORD}|\*)\.)*(?:{_WORD}|\*|>)")
_GROUP = re.compile(r"[^\s\x00-\x1f\x7f]*")
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
# "NATS/1.0", CR LF, and the empty line that ends the block.
_HEADER_BLOCK_BYTES: Final = 12
_HEADER_LINE_BYTES: Final = 4


def check_subject(subject: str, form: re.Pattern[str] = _SUBJECT) -> None:
    """Raise `RequestError` unless `subject` can be published to: no wildcard, no empty token."""
    if len(subject) > SUBJECT_CHARS_MAX:
        raise RequestError(
            f"subject of {len(subject)} characters; at most {SUBJECT_CHARS_MAX} allowed",
            param="subject",
        )
    if form.fullmatch(subject) is None:
        raise RequestError(f"not a subject that can be used here: {subject!r}", param="subject")


def check_pattern(pattern: str, group: str = "") -> None:
    """Raise `RequestError` unless `pattern` can be subscribed to by this queue group, if any."""
    check_subject(pattern, _PATTERN)
    if len(group) > SUBJECT_CHARS_MAX or _GROUP.fullmatch(group) is None:
        raise RequestError(f"not a group name: {group!r}", param="group")


def check_message(
    subject: str, payload: bytes, reply: str, headers: Mapping[str, str], *, bytes_max: int
) -> int:
    """What the server counts against `bytes_max`; raises `RequestError` for what it refuses."""
    check_subject(subject)
    if reply:
        check_subject(reply)
    size = len(payload) + (_HEADER_BLOCK_BYTES if headers else 0)
    for name, value in headers.items():
        if _HEADER_NAME.fullmatch(name) is None or "\r" in value or "\n" in value:
            raise RequestError(f"not a header: {name!r}: {value!r}", param="headers")
        size += len(name) + len(value.encode()) + _HEADER_LINE_BYTES
    if size > bytes_max:
        raise RequestError(
            f"message of {size} bytes; the server takes {bytes_max}", param="payload"
        )
    return size


class WorkQueue(Protocol):
    """A named queue on the event plane's broker, shared by all processes that open it.

    Jobs come out oldest first, about. A job is leased to one taker at a time; whoever lets the
    visibility timeout pass loses it to another, and is told so (`Settlement.STALE`) when it comes
    back. Make the effect of a job only after an `APPLIED` ack, or make it idempotent under the
    job's id, and it happens once.

    While the broker is away every method tries again for `timeout_s`, which bridges a change of
    leader (8 s), then raises `DeadlineError` if nothing happened and `UnknownOutcomeError` if it
    may have. All of them may be repeated: a put by its id, the others by their token. A cancelled
    call has an unknown outcome likewise.
    """

    @property
    def name(self) -> str:
        """What it was opened as."""
        ...

    @property
    def limits(self) -> QueueLimits:
        """The bounds in force."""
        ...

    async def put(
        self,
        job_id: str,
        payload: bytes,
        *,
        origin: JobOrigin = NO_ORIGIN,
        timeout_s: float = 10.0,
    ) -> PutResult:
        """Add a job under an id of 1 to 128 letters, digits, `_` and `-`.

        Whoever takes it is told its `origin`.
        Raises `OverloadedError` at `depth_max`, `RequestError` for a bad id or too large a payload.
        """
        ...

    async def take(self, *, wait_s: float) -> LeasedJob | None:
        """Lease the oldest ready job, waiting up to `wait_s` for one; None if there was none.

        Cancelled, it has taken nothing, or what it took is given back or expires. While the
        broker is away it just waits.
        """
        ...

    async def extend(self, job: LeasedJob, *, timeout_s: float = 10.0) -> Settlement:
        """Begin the visibility timeout anew; call it at a third of it while working."""
        ...

    async def ack(self, job: LeasedJob, *, timeout_s: float = 10.0) -> Settlement:
        """The job is done and leaves the queue."""
        ...

    async def nak(
        self,
        job: LeasedJob,
        *,
        delay_s: float = 0.0,
        reason: str = "",
        timeout_s: float = 10.0,
    ) -> Settlement:
        """The job failed: another attempt after `delay_s` (at most an hour), or `DEAD`.

        `reason` is what a dead letter says of its last attempt.
        """
        ...

    async def statistics(self) -> QueueStatistics:
        """Depth and age now; `UnavailableError` if the broker has no such queue any more."""
        ...

    async def dead_letters(self, *, count_max: int = 100) -> list[DeadLetter]:
        """Jobs whose attempts are used up, oldest first."""
        ...

    async def dead_letter(self, job_id: str) -> DeadLetter | None:
        """One dead letter, to inspect."""
        ...

    async def requeue(self, job_id: str) -> bool:
        """Make a dead letter a job again, with all its attempts; whether there was one."""
        ...

    async def purge_dead(self, job_id: str | None = None) -> int:
        """Forget one dead letter, or all; how many there were."""
        ...


@attrs.frozen
class Message:
    """One message as received. `reply` is the subject to answer on, or empty."""

    subject: str
    payload: bytes
    reply: str = ""
    headers: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def says_nobody(self) -> bool:
        """Whether it is the broker's reply to a request on a subject that nobody is subscribed to."""
        return self.headers.get("Status") == "503" and not self.payload


class Subscription(Protocol):
    """Messages of one subscription, in arrival order; bounded, oldest kept, newest dropped."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Message:
        """The next message. A receive that is cancelled loses none."""
        ...

    @property
    def dropped(self) -> int:
        """How many messages were dropped because `pending_max` were waiting."""
        ...


class EventPlane(Protocol):
    """Many small messages, at most once: KV events, load, status; and request/reply.

    Subjects are `.`-separated tokens; in subscriptions `*` stands for one token and a final `>`
    for one or more.
    """

    async def publish(
        self, subject: str, payload: bytes, *, reply: str = "", headers: Mapping[str, str] = {}
    ) -> None:
        """Send and forget. While the broker is away messages wait in a bounded buffer.

        Raises `OverloadedError` if that buffer is full: the message is dropped and counted.
        """
        ...

    def subscribe(
        self, subject: str, *, group: str = "", pending_max: int = 4096
    ) -> AbstractAsyncContextManager[Subscription]:
        """Receive what is published from now on; one member per message within a `group`."""
        ...

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float,
        accept: Callable[[Message], bool] | None = None,
    ) -> Message:
        """Publish and await one reply: the first, or the first that `accept` says yes to.

        Raises `UnavailableError` at once if nobody is subscribed, `DeadlineError` when the time
        is up (the request may have been received). That nobody is subscribed comes as a reply, too,
        of which `Message.says_nobody`; whoever does not accept it waits on.
        """
        ...

    def work_queue(
        self, name: str, *, limits: QueueLimits | None = None
    ) -> AbstractAsyncContextManager[WorkQueue]:
        """Open the queue called `name` (1 to 64 letters, digits, `_` and `-`).

        With `limits` it is made if it is not there, and they are in force from now on; without,
        it is opened as it is, and `UnavailableError` means that there is none. Leaving gives
        nothing back that was taken: settle it first, or its lease expires.
        """
        ...

    async def work_queue_names(self) -> list[str]:
        """The work queues there are, sorted."""
        ...

    async def check_health(self) -> str:
        """One line about the broker; raises `ConnectError` if it is not connected."""
        ...

    @property
    def message_bytes_max(self) -> int:
        """The largest payload the broker takes."""
        ...


@attrs.frozen
class EventStatistics:
    """What an event plane has met so far."""

    is_connected: bool
    connections: int
    """How many connections were made; one more than the number of reconnections."""
    waiting_messages: int
    """Messages that wait to be sent now."""
    dropped_outgoing: int
    """Messages that could not be sent because a bound was reached or the plane was closed."""
    dropped_incoming: int
    """Messages that found a subscription full, over all subscriptions there ever were."""
    refused_incoming: int = 0
    """Requests, answers, jobs and events that no member had sealed so, or that came again."""


@runtime_checkable
class CountsEvents(Protocol):
    """An event plane that counts."""

    def statistics(self) -> EventStatistics:
        """The counts as of now; synchronous, never fails."""
        ...
