"""Faults on single messages of a service: the same rules and verdicts as on the bus.

TCP neither drops nor reorders, but what runs over it does: a proxy repeats a call, a server dies
between doing and answering, a thread pool answers out of turn. So each message of a simulated
service passes an `Interceptor` at the service's end, where rules (`net/bus.py`: `nth`, or a function of
one's own) may drop, delay, duplicate, hold or reorder it. Channels are named
`<service>.request` and `<service>.reply`; the payload a rule sees is the decoded message.

What this module does not do: harm connections or hosts; that is the network's and the world's.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Container
from contextvars import Context, copy_context
from typing import Any

import attrs
import trio

from ..core.world import World
from ..net.bus import DROP, Message, Rule, Verdict, verdict_on

Deliver = Callable[[], None]


@attrs.frozen
class Done:
    """What a rule sees of the reply to a call: which call, and what is answered."""

    op: str
    reply: Any


class DelayLine:
    """One direction of one connection: what is delayed on it, in the order of arrival.

    Its waits are tasks of `nursery`, so they stop with the service's process.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._waiting: list[tuple[float, int, Deliver]] = []
        self._sequence = itertools.count()
        self._last_due_s = 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether anything is delayed."""
        return bool(self._waiting)

    def put(self, deliver: Deliver, verdict: Verdict) -> None:
        """Deliver now or later, once or more often, as the verdict says."""
        now_s = trio.current_time()
        due_s = now_s + verdict.delay_s
        if not verdict.may_be_overtaken:
            due_s = self._last_due_s = max(due_s, self._last_due_s)
        for copy in range(verdict.copies):
            copy_due_s = due_s + copy * verdict.gap_s
            if copy_due_s <= now_s and not self._has_due(now_s):
                deliver()
            else:
                heapq.heappush(self._waiting, (copy_due_s, next(self._sequence), deliver))
                self._nursery.start_soon(self._deliver_at, copy_due_s)

    def _has_due(self, now_s: float) -> bool:
        return bool(self._waiting) and self._waiting[0][0] <= now_s

    async def _deliver_at(self, due_s: float) -> None:
        await trio.sleep_until(due_s)
        # Whichever task wakes first delivers for all that are due, in order.
        while self._has_due(trio.current_time()):
            _, _, deliver = heapq.heappop(self._waiting)
            deliver()


class Interceptor:
    """Asks `rules` about every message of one service; the first verdict wins."""

    def __init__(self, world: World, service: str) -> None:
        self.rules: list[Rule] = []
        self._world = world
        self._service = service
        self._count = 0
        self._held: deque[tuple[Context, Deliver]] = deque()

    def admit(
        self, line: DelayLine, deliver: Deliver, *, channel: str, peer: str, payload: Any, size: int
    ) -> None:
        """Let a message pass, on `line`, as the rules say; `peer` is the client's host."""
        if not self.rules and not line.is_waiting:
            deliver()
            return
        self._count += 1
        is_request = channel.endswith(".request")
        message = Message(
            self._count,
            peer if is_request else self._service,
            self._service if is_request else peer,
            channel,
            payload,
            size,
            self._world.current_time(),
        )
        verdict = verdict_on(message, self.rules)
        if verdict.is_held:
            # In its own context, so that what it starts belongs to the service's process.
            self._held.append((copy_context(), deliver))
        if verdict != Verdict():
            self._world.add_row(
                "verdict",
                channel=channel,
                message=type(payload).__name__,
                source=message.source,
                target=message.destination,
                copies=verdict.copies,
                delay_s=verdict.delay_s,
                is_held=verdict.is_held,
            )
        if not verdict.is_held:
            line.put(deliver, verdict)

    def release(self) -> int:
        """Deliver what a rule held back, in order; how many. For a service that is up."""
        count = len(self._held)
        while self._held:
            context, deliver = self._held.popleft()
            context.run(deliver)
        return count

    def lose_replies(self, count: int, ops: Container[str], *, to: str = "") -> None:
        """The next `count` calls of these kinds, of the host `to` if given, take effect unanswered."""
        remaining = count

        def rule(message: Message) -> Verdict | None:
            nonlocal remaining
            done = message.payload
            is_meant = isinstance(done, Done) and done.op in ops and to in ("", message.destination)
            if remaining == 0 or not is_meant:
                return None
            remaining -= 1
            return DROP

        self.rules.append(rule)

    def forget(self) -> None:
        """The process died: what was held back is lost."""
        self._held.clear()
