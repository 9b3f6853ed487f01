"""Requests that wait until there is a place for them: bounded, and each for a bounded time.

A request waits while `requests_max` are in flight, or while every worker of its model is busy. Places
go in the order of arrival, but nobody waits for a model whose workers are busy behind whom he does not
need them. Who leaves the queue, whatever the reason, leaves nothing in it. Decided synchronously in
`settle`, awaited in `wait`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

import attrs
import trio

from ...context import Context
from ...errors import DeadlineError, OverloadedError
from ...metrics.metrics import DURATION_BUCKETS_S, Metrics
from ..exchanges import ClientGoneError, HttpExchange
from ..models.models import Engine

LOOK_INTERVAL_S: Final = 0.25
"""How often those who wait for busy workers look at what these report, and whether it is too old."""


class Bounds(Protocol):
    """What decides who gets a place."""

    @property
    def has_room(self) -> bool: ...

    def is_busy(self, engine: Engine) -> bool: ...

    def begin(self, request_id: str) -> Context: ...

    def leave(self, context: Context) -> None: ...


@attrs.define(eq=False)
class _Waiter:
    """One request; `ended` is set once it has a place, or an error in place of one."""

    request_id: str
    ended: trio.Event = attrs.Factory(trio.Event)
    context: Context | None = None
    error: Exception | None = None


@attrs.define(eq=False)
class _Line:
    """Those that wait for one engine, by the number that says who came first."""

    engine: Engine
    waiters: OrderedDict[int, _Waiter] = attrs.Factory(OrderedDict)

    @property
    def first(self) -> int:
        return next(iter(self.waiters))


class AdmissionQueue:
    """The requests of one service that wait for a place; with `length_max` 0 nobody does."""

    def __init__(self, bounds: Bounds, metrics: Metrics) -> None:
        self._bounds = bounds
        self._waits = metrics.histograms(
            "request_wait_seconds", "How long requests waited for a place", DURATION_BUCKETS_S
        ).tally()
        self.length_max = 0
        """So many may wait at once. Who waits already, stays when it is lowered."""
        self.timeout_s = 60.0
        """Each of them at most so long."""
        self.length = 0
        """How many wait now; zero at quiescence."""
        self._lines: dict[int, _Line] = {}
        """By the identity of the engine; none of them is empty."""
        self._number = 0
        self._joined = trio.Event()

    @property
    def is_full(self) -> bool:
        """Whether nobody more may wait."""
        return self.length >= self.length_max

    async def wait(
        self, request_id: str, engine: Engine, exchange: HttpExchange, deadline: float
    ) -> Context:
        """The context of a request in flight, for `Admission.leave`, once there is a place.

        Raises `OverloadedError` after `timeout_s`, `DeadlineError` at `deadline` (on trio's clock),
        `UnavailableError` when a drain begins, `ClientGoneError`. Cancelled, it holds no place.
        """
        number = self._number = self._number + 1
        waiter = self._join(number, request_id, engine)
        exchange.on_gone(lambda: self._end(number, engine, ClientGoneError()))
        began = trio.current_time()
        until = began + self.timeout_s
        try:
            with trio.move_on_at(min(until, deadline)):
                await waiter.ended.wait()
        except BaseException:
            if waiter.context is not None:
                self._bounds.leave(waiter.context)
            raise
        finally:
            self._remove(number, engine)
            self._waits.observe(trio.current_time() - began)
        if waiter.context is not None:
            return waiter.context
        if waiter.error is not None:
            raise waiter.error
        if deadline <= until:
            raise DeadlineError("the answer was not begun in the time that it had: it had to wait")
        raise OverloadedError(
            f"there was no place within {self.timeout_s:g} s, which is the limit",
            bound="queue_timeout",
            value=self.timeout_s,
        )

    def settle(self) -> None:
        """Let in whom there is a place for now, those that came first, first."""
        bounds = self._bounds
        lines = [line for line in self._lines.values() if not bounds.is_busy(line.engine)]
        while lines and bounds.has_room:
            line = min(lines, key=lambda line: line.first)
            waiter = line.waiters[line.first]
            self._remove(line.first, line.engine)
            if not line.waiters:
                lines.remove(line)
            waiter.context = bounds.begin(waiter.request_id)
            waiter.ended.set()

    def refuse_all(self, make_error: Callable[[], Exception]) -> None:
        """Answer everybody who waits with an error; nobody waits any more."""
        lines = list(self._lines.values())
        for line in lines:
            for number in list(line.waiters):
                self._end(number, line.engine, make_error())

    async def look(self) -> None:
        """Until cancelled: while somebody waits, see whether the workers are less busy."""
        while True:
            if not self.length:
                self._joined = trio.Event()
                await self._joined.wait()
            await trio.sleep(LOOK_INTERVAL_S)
            self.settle()

    def _join(self, number: int, request_id: str, engine: Engine) -> _Waiter:
        line = self._lines.setdefault(id(engine), _Line(engine))
        waiter = line.waiters[number] = _Waiter(request_id)
        self.length += 1
        self._joined.set()
        return waiter

    def _end(self, number: int, engine: Engine, error: Exception) -> None:
        waiter = self._remove(number, engine)
        if waiter is not None:
            waiter.error = error
            waiter.ended.set()

    def _remove(self, number: int, engine: Engine) -> _Waiter | None:
        line = self._lines.get(id(engine))
        waiter = None if line is None else line.waiters.pop(number, None)
        if line is not None and waiter is not None:
            self.length -= 1
            if not line.waiters:
                del self._lines[id(engine)]
        return waiter
