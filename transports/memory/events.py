"""The event plane in memory: a broker, and the planes of the processes connected to it.

Several `MemoryEventPlane`s on one `MemoryBroker` act as several processes. It keeps the promises
of a NATS server, at most once and in order per publisher, without its sockets, so it also runs
under a virtual clock. The broker's fault hooks (`stop`, `start`, `drop_next`, `delay_s`) do on
purpose what a network does by chance. Nothing outlives the process. The broker's work queues are the
model of `runtime/protocol/queue/work_queue.py` on trio's clock: what is awaited is only time, the broker's return, and a
job to take. The
real thing is `transports/nats`.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Self, TypeVar

import attrs
import trio

from trinamo.runtime.errors import (
    ConnectError,
    DeadlineError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from trinamo.runtime.planes import Message
from trinamo.runtime.planes.events import check_message, check_pattern
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


class MemoryWorkQueue:
    """One process's handle of a queue. Nothing to close: leases end by themselves."""

    def __init__(self, broker: MemoryBroker, name: str, model: WorkQueueModel) -> None:
        self.name, self._broker = name, broker
        self.model = model
        """The queue itself, for tests that count."""

    @property
    def limits(self) -> QueueLimits:
        return self.model.limits

    async def take(self, *, wait_s: float) -> LeasedJob | None:
        await trio.lowlevel.checkpoint()
        give_up_at = trio.current_time() + wait_s
        while True:
            if self._broker.is_running:
                job = self.model.take(f"{next(self._broker.tokens):x}", now=trio.current_time())
                if job is not None:
                    return job
                due = self.model.next_due()
            else:
                due = None
            if trio.current_time() >= give_up_at:
                return None
            # Read before waiting: a change sets this very event and puts a fresh one in its place.
            changed = self._broker.changed
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
        bytes_max = self._broker.message_bytes_max
        if len(payload) > bytes_max:
            raise RequestError(f"a job of {len(payload)} bytes; {bytes_max} fit", param="payload")
        put = partial(self.model.put, job_id, bytes(payload), origin)
        return await self._ask(put, timeout_s=timeout_s)

    async def extend(self, job: LeasedJob, *, timeout_s: float = 10.0) -> Settlement:
        return await self._ask(partial(self.model.extend, job.token), timeout_s=timeout_s)

    async def ack(self, job: LeasedJob, *, timeout_s: float = 10.0) -> Settlement:
        return await self._ask(partial(self.model.ack, job.token), timeout_s=timeout_s)

    async def nak(
        self,
        job: LeasedJob,
        *,
        delay_s: float = 0.0,
        reason: str = "",
        timeout_s: float = 10.0,
    ) -> Settlement:
        check_delay(delay_s)
        nak = partial(self.model.nak, job.token, delay_s, reason)
        return await self._ask(nak, timeout_s=timeout_s)

    async def statistics(self) -> QueueStatistics:
        return await self._ask(self.model.statistics)

    async def dead_letters(self, *, count_max: int = 100) -> list[DeadLetter]:
        return await self._ask(partial(self.model.dead_letters, count_max))

    async def dead_letter(self, job_id: str) -> DeadLetter | None:
        return await self._ask(partial(self.model.dead_letter, job_id))

    async def requeue(self, job_id: str) -> bool:
        return await self._ask(partial(self.model.requeue, job_id))

    async def purge_dead(self, job_id: str | None = None) -> int:
        return await self._ask(partial(self.model.purge_dead, job_id))

    async def _ask(
        self, step: Callable[..., T], *, timeout_s: float = ADMINISTRATION_TIMEOUT_S
    ) -> T:
        """Take one step of the model, at a time `now`, as soon as the broker is there."""
        await trio.lowlevel.checkpoint()
        with trio.move_on_after(timeout_s):
            while not self._broker.is_running:
                await self._broker.changed.wait()
        if not self._broker.is_running:
            raise DeadlineError(
                f"the broker was away for {timeout_s:g} s, so queue {self.name} is unchanged",
                definite=True,
            )
        result = step(now=trio.current_time())
        self._broker.notify()
        return result


_NO_RESPONDERS = {"Status": "503"}
_REPLIES_MAX = 64
"""Of one request that wait to be looked at."""


def matches(pattern: str, subject: str) -> bool:
    """Whether a message on `subject` reaches a subscription on `pattern`; both checked before."""
    wanted = pattern.split(".")
    tokens = subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(tokens) <= len(wanted):
            return False
    elif len(wanted) != len(tokens):
        return False
    return all(want in {"*", token} for want, token in zip(wanted, tokens, strict=False))


@attrs.frozen(eq=False)
class _Sent:
    """A message a plane has sent while the broker was away."""

    message: Message
    sender: MemoryEventPlane


class MemorySubscription:
    """The receiving end of one subscription. Iteration ends once it is left and empty."""

    def __init__(self, pattern: str, group: str, pending_max: int) -> None:
        self.pattern = pattern
        self.group = group
        self._pending_max = pending_max
        self._pending: deque[tuple[float, Message]] = deque()
        self._arrived = trio.lowlevel.ParkingLot()
        self._is_closed = False
        self.dropped = 0
        """How many messages found `pending_max` others waiting and were dropped."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        """The next message. Nothing is awaited after it left the queue, so a cancel loses none."""
        await trio.lowlevel.checkpoint()
        while True:
            if not self._pending:
                if self._is_closed:
                    raise StopAsyncIteration
                await self._arrived.park()
                continue
            due, message = self._pending[0]
            if due > trio.current_time():
                await trio.sleep_until(due)
                continue
            self._pending.popleft()
            return message

    def deliver(self, due: float, message: Message) -> None:
        """Queue a message that may be read at `due` seconds on trio's clock; synchronous."""
        if len(self._pending) >= self._pending_max:
            self.dropped += 1
            return
        if self._pending:
            # A shorter delay set meanwhile must not let this message overtake.
            due = max(due, self._pending[-1][0])
        self._pending.append((due, message))
        # Every reader, not one: the one woken may be cancelled before it takes the message.
        self._arrived.unpark_all()

    def close(self) -> None:
        """No more messages: readers get what is pending, then the end."""
        self._is_closed = True
        self._arrived.unpark_all()


class MemoryBroker:
    """The server's part: who is subscribed to what, its work queues, and the faults to inject.

    `delay_s` is how long every message travels. `message_bytes_max` bounds one payload with its
    headers.
    """

    def __init__(self, *, message_bytes_max: int = 1_048_576) -> None:
        self.message_bytes_max = message_bytes_max
        self.delay_s = 0.0
        self.is_running = True
        self.changed = trio.Event()
        """Set, and replaced by a new one, when a queue has changed, or the broker went away or came back."""
        self.tokens = itertools.count(1)
        """Of leases."""
        self.models: dict[str, WorkQueueModel] = {}
        """The queues, by name."""
        self._exact: dict[str, list[MemorySubscription]] = {}
        self._patterns: list[MemorySubscription] = []
        self._waiting: deque[_Sent] = deque()
        self._turns: dict[str, int] = {}
        self._drop_count = 0
        self._plane_count = 0

    @property
    def subscription_count(self) -> int:
        """How many subscriptions are open; zero at quiescence."""
        return sum(1 for _ in self._open())

    def stop(self) -> None:
        """Go away: publishes wait in the senders' buffers, subscriptions are remembered."""
        self.is_running = False
        self.notify()

    def start(self) -> None:
        """Come back and deliver what the senders buffered, in the order it was published."""
        self.is_running = True
        self.notify()
        while self._waiting:
            sent = self._waiting.popleft()
            sent.sender.buffered -= 1
            self.route(sent.message)

    def notify(self) -> None:
        """Wake everyone who waits for a change."""
        self.changed.set()
        self.changed = trio.Event()

    def open_queue(self, name: str, limits: QueueLimits | None) -> WorkQueueModel:
        """The queue called `name`; made if `limits` are given, which then are in force."""
        check_queue_name(name)
        model = self.models.get(name)
        if model is None:
            if limits is None:
                raise UnavailableError(f"there is no queue {name}")
            model = self.models[name] = WorkQueueModel(limits)
        elif limits is not None:
            model.limits = limits
        return model

    def drop_next(self, count: int) -> None:
        """Lose the next `count` messages on their way; neither side is told."""
        self._drop_count = count

    def register(self) -> int:
        """A number for one more connected plane."""
        self._plane_count += 1
        return self._plane_count

    def send(self, message: Message, sender: MemoryEventPlane) -> None:
        """Route a message now, or buffer it while the broker is away."""
        if self.is_running:
            self.route(message)
        else:
            sender.buffered += 1
            self._waiting.append(_Sent(message, sender))

    def recall(self, message: Message) -> bool:
        """Take back a message that still waits for the broker; whether it did."""
        for sent in self._waiting:
            if sent.message is message:
                self._waiting.remove(sent)
                sent.sender.buffered -= 1
                return True
        return False

    @contextmanager
    def attach(self, pattern: str, *, group: str, pending_max: int) -> Iterator[MemorySubscription]:
        subscription = MemorySubscription(pattern, group, pending_max)
        home = self._patterns if {"*", ">"} & set(pattern) else self._exact.setdefault(pattern, [])
        home.append(subscription)
        try:
            yield subscription
        finally:
            home.remove(subscription)
            if not home and home is not self._patterns:
                del self._exact[pattern]
            if not any(group == other.group for other in self._open()):
                self._turns.pop(group, None)
            subscription.close()

    def route(self, message: Message) -> None:
        """Deliver to every matching subscription, and to one member of each matching group."""
        if self._drop_count > 0:
            self._drop_count -= 1
            return
        due = trio.current_time() + self.delay_s
        found = self._matching(message.subject)
        groups: dict[str, list[MemorySubscription]] = {}
        for subscription in found:
            if subscription.group:
                # A group is its name: its members may have subscribed to different patterns.
                groups.setdefault(subscription.group, []).append(subscription)
            else:
                subscription.deliver(due, message)
        for group, members in groups.items():
            turn = self._turns.get(group, 0)
            self._turns[group] = turn + 1
            members[turn % len(members)].deliver(due, message)
        if not found and message.reply and self._matching(message.reply):
            self.route(Message(message.reply, b"", headers=_NO_RESPONDERS))

    def _open(self) -> Iterator[MemorySubscription]:
        return itertools.chain(*self._exact.values(), self._patterns)

    def _matching(self, subject: str) -> list[MemorySubscription]:
        found = list(self._exact.get(subject, ()))
        found += [each for each in self._patterns if matches(each.pattern, subject)]
        return found


class MemoryEventPlane:
    """One process's connection to a `MemoryBroker`. Nothing to close: it owns no task.

    `buffered_max` bounds how many of its messages wait while the broker is away.
    """

    def __init__(self, broker: MemoryBroker, *, buffered_max: int = 4096) -> None:
        self.buffered = 0
        self._broker = broker
        self._buffered_max = buffered_max
        self.dropped = 0
        """How many messages were refused because the buffer was full."""
        self._number = broker.register()
        self._request_count = 0

    @property
    def message_bytes_max(self) -> int:
        """The largest payload, with its headers, that the broker takes."""
        return self._broker.message_bytes_max

    async def publish(
        self, subject: str, payload: bytes, *, reply: str = "", headers: Mapping[str, str] = {}
    ) -> None:
        """Send and forget. Cancelled, it has sent nothing.

        Raises `RequestError` for a bad subject, header or size, `OverloadedError` when the buffer
        for a broker that is away is full.
        """
        await trio.lowlevel.checkpoint()
        self._publish(subject, payload, reply, headers)

    @asynccontextmanager
    async def subscribe(
        self, subject: str, *, group: str = "", pending_max: int = 4096
    ) -> AsyncIterator[MemorySubscription]:
        check_pattern(subject, group)
        await trio.lowlevel.checkpoint()
        with self._broker.attach(subject, group=group, pending_max=pending_max) as subscription:
            yield subscription

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float,
        accept: Callable[[Message], bool] | None = None,
    ) -> Message:
        """See `EventPlane.request`; a `DeadlineError` is definite if the broker was always away."""
        await trio.lowlevel.checkpoint()
        self._request_count += 1
        inbox = f"_INBOX.{self._number}.{self._request_count}"
        with self._broker.attach(inbox, group="", pending_max=_REPLIES_MAX) as replies:
            sent = self._publish(subject, payload, inbox, {})
            was_recalled = False
            try:
                with trio.move_on_after(timeout_s):
                    reply = await anext(replies)
                    while accept is not None and not accept(reply):
                        reply = await anext(replies)
                    if reply.says_nobody:
                        raise UnavailableError(f"nobody is subscribed to {subject}")
                    return reply
            finally:
                # Nobody waits for the answer of a request that has not left yet.
                was_recalled = self._broker.recall(sent)
        raise DeadlineError(f"no reply on {subject} within {timeout_s:g} s", definite=was_recalled)

    @asynccontextmanager
    async def work_queue(
        self, name: str, *, limits: QueueLimits | None = None
    ) -> AsyncIterator[MemoryWorkQueue]:
        """Open a queue; with `limits` it is made if need be, and they are in force from now on."""
        await trio.lowlevel.checkpoint()
        yield MemoryWorkQueue(self._broker, name, self._broker.open_queue(name, limits))

    async def work_queue_names(self) -> list[str]:
        await trio.lowlevel.checkpoint()
        return sorted(self._broker.models)

    async def check_health(self) -> str:
        """One line about the broker; raises `ConnectError` while it is away."""
        await trio.lowlevel.checkpoint()
        if not self._broker.is_running:
            raise ConnectError("the memory broker is stopped")
        return f"memory broker, {self._broker.subscription_count} subscriptions"

    def _publish(
        self, subject: str, payload: bytes, reply: str, headers: Mapping[str, str]
    ) -> Message:
        check_message(subject, payload, reply, headers, bytes_max=self.message_bytes_max)
        if not self._broker.is_running and self.buffered >= self._buffered_max:
            self.dropped += 1
            raise OverloadedError(
                f"the broker is away and {self.buffered} messages wait for it",
                bound="buffered_max",
                value=self._buffered_max,
            )
        message = Message(subject, bytes(payload), reply, dict(headers))
        self._broker.send(message, self)
        return message
