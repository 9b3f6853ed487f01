"""Deliveries of a pull consumer to the tasks that wait for one.

A pull asks the server for one message and expires there after two seconds at most: one that was
in flight when the server restarted is lost, and whoever waits for it asks again. Deliveries carry
no sign of the pull they answer, and any waiting task will do, so the first gets it. One that finds
nobody waiting is given back at once.

Nor do they say when they were handed out, and the lease counts from there: this process may have been stopped
since, or the connection. So a mark goes out before a pull, to the subject that deliveries come by: what comes behind it
was handed out after it was sent.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections import deque
from collections.abc import Callable, Iterator
from math import inf
from typing import Final

import attrs
import trio

from trinamo.runtime.errors import OverloadedError, RemoteProtocolError
from trinamo.runtime.planes import Message

from .api import QueuePlane
from .records import JobDelivery, StreamNames, parse_delivery

logger = logging.getLogger("trinamo.nats")

PULL_S: Final = 2.0
_PULLS_PER_LEASE: Final = 4
_MARKS_PER_LEASE: Final = 8
"""At least: one has come back since less than half a lease, unless this process or its connection stood still."""
_MARK: Final = "mark"
_MARKS_MAX: Final = 16
"""Under way: those that the broker lost stay."""
GRACE_S: Final = 0.5
"""How long after its end at the server a pull is waited for."""
AWAY_POLL_S: Final = 0.1
PENDING_MAX: Final = 4096
_NS: Final = 1_000_000_000


@attrs.define(eq=False)
class _Waiter:
    """One task that waits for a delivery, and the pull it has under way."""

    wake: trio.Event = attrs.field(factory=trio.Event)
    delivery: JobDelivery | None = None
    since: float = -inf
    """The delivery was handed out no sooner, on trio's clock."""
    pull: str = ""
    is_refused: bool = False


@attrs.define(eq=False)
class Fetcher:
    """Fetches for any number of tasks; `run` is its life."""

    _plane: QueuePlane
    _names: StreamNames
    _inbox: str
    _give_back: Callable[[JobDelivery, float], None]
    _lease_s: Callable[[], float]
    _numbers: Iterator[int] = attrs.field(factory=itertools.count, init=False)
    _waiters: deque[_Waiter] = attrs.field(factory=deque, init=False)
    _by_pull: dict[str, _Waiter] = attrs.field(factory=dict, init=False)
    _marks: dict[bytes, float] = attrs.field(factory=dict, init=False)
    """Those that are under way, and when they were sent."""
    _marked_at: float = attrs.field(default=-inf, init=False)
    _since: float = attrs.field(default=-inf, init=False)
    """When the last one that came back was sent."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with self._plane.subscribe(f"{self._inbox}.*", pending_max=PENDING_MAX) as messages:
            task_status.started()
            async for message in messages:
                self._on_message(message)

    async def fetch(self, *, give_up_at: float) -> tuple[JobDelivery, float] | None:
        """The next delivery, and since when its lease may be running; None if there was none by `give_up_at` on trio's clock.

        Asks the server at least once. Cancelled, it gives back what it was just given.
        """
        waiter = _Waiter()
        self._waiters.append(waiter)
        try:
            is_first = True
            while waiter.delivery is None:
                left_s = give_up_at - trio.current_time()
                if left_s <= 0 and not is_first:
                    return None
                is_first = False
                waiter.wake, waiter.is_refused = trio.Event(), False
                patience_s = await self._pull(waiter, left_s)
                # Cut off at the moment the task gives up, unless this is its only question.
                with trio.move_on_after(patience_s if left_s <= 0 else min(patience_s, left_s)):
                    await waiter.wake.wait()
                if waiter.is_refused:
                    await trio.sleep(AWAY_POLL_S)
            return waiter.delivery, waiter.since
        except trio.Cancelled:
            if waiter.delivery is not None:
                self._hand_on(waiter.delivery, waiter.since)
            raise
        finally:
            self._by_pull.pop(waiter.pull, None)
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    async def _pull(self, waiter: _Waiter, left_s: float) -> float:
        """Ask for one message; how long to wait for it."""
        self._by_pull.pop(waiter.pull, None)
        if not self._plane.is_connected:
            return AWAY_POLL_S
        waiter.pull = f"{self._inbox}.{next(self._numbers):x}"
        self._by_pull[waiter.pull] = waiter
        pull_s = min(PULL_S, self._lease_s() / _PULLS_PER_LEASE)
        if left_s <= 0:
            query: dict[str, object] = {"batch": 1, "no_wait": True}
        else:
            query = {"batch": 1, "expires": int(min(left_s, pull_s) * _NS)}
        try:
            await self._mark()
            subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._names.jobs}.{self._names.CONSUMER}"
            await self._plane.publish(subject, json.dumps(query).encode(), reply=waiter.pull)
        except OverloadedError:
            return AWAY_POLL_S
        return (pull_s if left_s > 0 else 0.0) + GRACE_S

    async def _mark(self) -> None:
        """Send one, unless one has been sent just now; sooner where none came back: a connection may have been lost with it."""
        now, mark_s = trio.current_time(), self._lease_s() / _MARKS_PER_LEASE
        is_lost = now - self._since >= 2 * mark_s
        if now - self._marked_at < (mark_s / 8 if is_lost else mark_s):
            return
        while len(self._marks) >= _MARKS_MAX:
            del self._marks[next(iter(self._marks))]
        self._marked_at, mark = now, b"%x" % next(self._numbers)
        self._marks[mark] = now
        await self._plane.publish(f"{self._inbox}.{_MARK}", mark)

    def _on_message(self, message: Message) -> None:
        if message.subject == f"{self._inbox}.{_MARK}":
            self._since = max(self._since, self._marks.pop(message.payload, -inf))
            return
        waiter = self._by_pull.pop(message.subject, None)
        if waiter is not None:
            # Its pull has ended without a message: ask again. Unless it was neither empty nor late,
            # but the stream has no leader or too many pulls: then not at once.
            waiter.is_refused = message.headers.get("Status") not in ("404", "408")
            waiter.wake.set()
            return
        try:
            delivery = parse_delivery(
                message.subject, message.payload, message.reply, message.headers
            )
        except RemoteProtocolError as error:
            if "Status" not in message.headers:
                logger.warning("a message that is no delivery was dropped: %s", error)
            return
        self._hand_on(delivery, self._since)

    def _hand_on(self, delivery: JobDelivery, since: float) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if waiter.delivery is None:
                waiter.delivery, waiter.since = delivery, since
                waiter.wake.set()
                return
        self._give_back(delivery, since)
