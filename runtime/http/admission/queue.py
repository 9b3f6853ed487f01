"""Requests that wait until there is a place for them: bounded, and each for a bounded time.

A request waits while `requests_max` are in flight, while nobody who serves its model is there, and
while every worker of it is busy or has refused one more. Places go round the parties (`shares.py`),
and to the requests of one party for one model in the order of arrival; nobody waits behind somebody
whose model lets nobody in. A line is not let in at once: one goes first, and each that a worker takes
lets two more follow, until a worker refuses one, which then stands first again.

Who leaves the queue, whatever the reason, leaves nothing in it. Decided synchronously in `settle`,
awaited in `wait`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from typing import Final, Protocol

import attrs
import trio

from ...context import Context
from ...errors import DeadlineError, OverloadedError, TrinamoError, UnavailableError
from ...metrics.metrics import DURATION_BUCKETS_S, Metrics
from ..exchanges import ClientGoneError, HttpExchange
from ..models.models import Engine

LOOK_INTERVAL_S: Final = 0.25
"""How often those who wait look at what workers report, and a line that was refused is tried again."""


@attrs.frozen
class Wanted:
    """What a request waits for."""

    model: str
    """Its own name, or what the client calls it; empty for whichever is the default."""
    find: Callable[[], Engine]
    """Raises `ModelAwayError` while nobody serves it."""


@attrs.define(eq=False)
class Ticket:
    """One request, from its arrival to its end; in flight it may be sent back to the queue."""

    request_id: str
    party: str
    """Whose it is: see `shares.py`."""
    number: int = 0
    """Which one it was of those that came."""
    has_arrived: bool = False
    """Its body is whole: it counts."""
    is_read_in: bool = False
    """And was not understood yet."""
    sees_workers: bool = True
    """Whether its client is told who answers: a tenant is not, for others are there, too."""
    model: str = ""
    until: float = 0.0
    """How long it may wait, since it had to; 0 if it never had."""
    refusal: OverloadedError | None = None
    """Why it was sent back, while it waits again."""
    line: _Line | None = None
    """Where it was let in, until a worker takes it."""


class Bounds(Protocol):
    """What decides who gets a place."""

    @property
    def has_room(self) -> bool: ...

    def why_closed(self, wanted: Wanted) -> TrinamoError | None: ...

    def begin(self, request_id: str) -> Context: ...

    def leave(self, context: Context, ticket: Ticket) -> None: ...


@attrs.define(eq=False)
class _Waiter:
    """One request; `ended` is set once it has a place, or an error in place of one."""

    ticket: Ticket
    ended: trio.Event = attrs.Factory(trio.Event)
    context: Context | None = None
    error: Exception | None = None


@attrs.define(eq=False)
class _Line:
    """Those that wait for one model, whoever they are."""

    wanted: Wanted
    length: int = 0
    is_refused: bool = False
    """A worker has refused one of them: until a place is free, or might be."""
    window: int = 1
    """So many may be let in of whom no worker has said that it takes them."""
    unsure: int = 0
    """So many are."""


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
        self._lines: dict[str, _Line] = {}
        """By model."""
        self._parties: OrderedDict[str, dict[str, list[_Waiter]]] = OrderedDict()
        """By party, whose turn is next first, and by model. Nothing in it is empty."""
        self._joined = trio.Event()

    def has_room(self, party: str) -> bool:
        """Whether one more of `party` may wait: somebody who has more there may have to give way."""
        return self.length < self.length_max or self._greediest(party) is not None

    def holds_up(self, model: str) -> bool:
        """Whether a request for `model` has to wait behind others for it, or until these are taken."""
        return model in self._lines

    async def wait(
        self, ticket: Ticket, wanted: Wanted, exchange: HttpExchange, deadline: float
    ) -> Context:
        """The context of a request in flight, for `Admission.leave`, once there is a place.

        Raises `OverloadedError` after `timeout_s`, or `UnavailableError` if nobody was there for it,
        `DeadlineError` at `deadline` (on trio's clock), `UnavailableError` when a drain begins,
        `ClientGoneError`. Cancelled, it holds no place. Who was sent back stands first again, and
        its time runs on.
        """
        began = trio.current_time()
        ticket.until = ticket.until or began + self.timeout_s
        waiter = self._join(ticket, wanted)
        exchange.on_gone(lambda: self._end(waiter, ClientGoneError()))
        try:
            with trio.move_on_at(min(ticket.until, deadline)):
                await waiter.ended.wait()
        except BaseException:
            if waiter.context is not None:
                self._bounds.leave(waiter.context, ticket)
            raise
        finally:
            self._remove(waiter)
            self._waits.observe(trio.current_time() - began)
        if waiter.context is not None:
            return waiter.context
        if waiter.error is not None:
            raise waiter.error
        if deadline <= ticket.until:
            raise DeadlineError("the answer was not begun in the time that it had: it had to wait")
        raise self._late(ticket, wanted)

    def _late(self, ticket: Ticket, wanted: Wanted) -> TrinamoError:
        why = ticket.refusal or self._bounds.why_closed(wanted)
        if isinstance(why, UnavailableError):
            return type(why)(f"{why.message}, and nobody came within {self.timeout_s:g} s")
        said = "" if why is None else f": {why.message}"
        return OverloadedError(
            f"there was no place within {self.timeout_s:g} s, which is the limit{said}",
            bound="queue_timeout",
            value=self.timeout_s,
        )

    def settle(self) -> None:
        """Let in whom there is a place for now: one of each party in turn."""
        bounds = self._bounds
        lines = {model: line for model, line in self._lines.items() if self._is_open(line)}
        while lines and bounds.has_room:
            waiter = next(filter(None, (_first(own, lines) for own in self._parties.values())))
            ticket = waiter.ticket
            line = ticket.line = lines[ticket.model]
            line.unsure += 1
            self._remove(waiter)
            if ticket.party in self._parties:
                self._parties.move_to_end(ticket.party)
            if not line.length or line.unsure >= line.window:
                del lines[ticket.model]
            ticket.refusal = None
            waiter.context = bounds.begin(ticket.request_id)
            waiter.ended.set()

    def took(self, ticket: Ticket) -> None:
        """A worker takes it, or it is over: it was right to let it in, and two may follow."""
        line, ticket.line = ticket.line, None
        if line is not None:
            line.unsure -= 1
            line.window += 1
            self._forget_if_over(line)
            self.settle()

    def refused(self, ticket: Ticket, wanted: Wanted, error: OverloadedError) -> None:
        """A worker refuses it: it is to `wait` again, as the first, and the others behind it."""
        ticket.refusal = error
        line = self._lines.setdefault(ticket.model, _Line(wanted))
        if ticket.line is not None:
            ticket.line.unsure -= 1
            ticket.line = None
        line.is_refused, line.window = True, 1

    def freed(self, model: str) -> None:
        """A request for `model` is over: its workers may take another one."""
        line = self._lines.get(model)
        if line is not None:
            line.is_refused = False
            self._forget_if_over(line)
        if self.length:
            self.settle()

    def refuse_all(self, make_error: Callable[[], Exception]) -> None:
        """Answer everybody who waits with an error; nobody waits any more."""
        for waiter in [w for own in self._parties.values() for line in own.values() for w in line]:
            self._end(waiter, make_error())

    async def look(self) -> None:
        """Until cancelled: while somebody waits, see whether the workers are less busy."""
        while True:
            if not self.length:
                self._joined = trio.Event()
                await self._joined.wait()
            await trio.sleep(LOOK_INTERVAL_S)
            for model in list(self._lines):
                self.freed(model)

    def _is_open(self, line: _Line) -> bool:
        is_tried = line.length and not line.is_refused and line.unsure < line.window
        return bool(is_tried) and self._bounds.why_closed(line.wanted) is None

    def _greediest(self, party: str) -> str | None:
        """Who has so much more of the queue than `party` that one of it should go to that one."""
        most = max(self._parties, key=self._count, default=party)
        return most if self._count(most) > self._count(party) + 1 else None

    def _count(self, party: str) -> int:
        return sum(map(len, self._parties.get(party, {}).values()))

    def _join(self, ticket: Ticket, wanted: Wanted) -> _Waiter:
        greediest = self._greediest(ticket.party)
        if self.length >= self.length_max and ticket.refusal is None and greediest is not None:
            newest = max(
                (line[-1] for line in self._parties[greediest].values()),
                key=lambda each: each.ticket.number,
            )
            text = f"{self.length_max} may wait, and of those of others fewer do"
            self._end(newest, OverloadedError(text, bound="queue_share", value=self.length_max))
        self._lines.setdefault(ticket.model, _Line(wanted)).length += 1
        waiter = _Waiter(ticket)
        own = self._parties.setdefault(ticket.party, {})
        line = own.setdefault(ticket.model, [])
        line.append(waiter)
        if ticket.refusal is not None:
            line.sort(key=lambda each: each.ticket.number)
            self._parties.move_to_end(ticket.party, last=False)
        self.length += 1
        self._joined.set()
        return waiter

    def _end(self, waiter: _Waiter, error: Exception) -> None:
        if self._remove(waiter):
            waiter.error = error
            waiter.ended.set()

    def _remove(self, waiter: _Waiter) -> bool:
        """Whether it was there: it is no more, and leaves nothing."""
        ticket = waiter.ticket
        own = self._parties.get(ticket.party, {})
        waiters = own.get(ticket.model, [])
        if waiter not in waiters:
            return False
        waiters.remove(waiter)
        if not waiters:
            del own[ticket.model]
        if not own:
            del self._parties[ticket.party]
        line = self._lines[ticket.model]
        line.length -= 1
        self.length -= 1
        self._forget_if_over(line)
        return True

    def _forget_if_over(self, line: _Line) -> None:
        if not (line.length or line.unsure or line.is_refused):
            self._lines.pop(line.wanted.model, None)


def _first(own: Mapping[str, list[_Waiter]], lines: Container[str]) -> _Waiter | None:
    """The one of a party's waiters in `lines` that came first."""
    heads = (waiters[0] for model, waiters in own.items() if model in lines)
    return min(heads, key=lambda each: each.ticket.number, default=None)
