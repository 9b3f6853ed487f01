"""Who gets in: requests in flight, their bounds, who waits for a place, and the drain.

Every inference request is a child context of one root, so that a shutdown reaches all of them.

A request waits while `requests_max` are in flight, while nobody who serves its model is there, and
while every worker of it is busy or has refused one more. Places go round the parties (`shares.py`),
and to the requests of one party for one model in the order of arrival: each model has a line of its
own. Behind a refusal one request of the line is let in, and each that a worker takes lets two more
follow, until a worker refuses one, which then stands first again. Behind it one more is tried now
and then, for the first may be refused wherever there is room.

Who leaves the queue, whatever the reason, leaves nothing in it. All is decided synchronously, in
`Admission.arriving`, `arrived` and `enter`, and in `AdmissionQueue.settle`, and awaited in `AdmissionQueue.wait`; the service
(`service.py`) owns the deadlines.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import attrs
import trio

from ...context import Context, Reason
from ...env import Clock
from ...errors import (
    DeadlineError,
    OverloadedError,
    RequestError,
    TrinamoError,
    UnavailableError,
)
from ...events.load import BusyLimits
from ...metrics.metrics import DURATION_BUCKETS_S, Metrics
from ..bodies import Bodies
from ..exchanges import ClientGoneError, Headers, HttpExchange
from ..models.models import Engine, ModelAwayError, RoutedEngine
from ..status import RateLimitExceededError
from .cors import Cors
from .keys import ApiKeys

PARTIES_MAX: Final = 4096
"""So many are remembered."""
LOOK_INTERVAL_S: Final = 0.25
"""How often those who wait look at what workers report, and a line that was refused is tried again."""


@attrs.frozen
class WaitingRequest:
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

    wanted: WaitingRequest
    length: int = 0
    is_refused: bool = False
    """A worker has refused one of them: until a place is free, or might be."""
    window: int = 1
    """So many may be let in of whom no worker has said that it takes them."""
    unsure: int = 0
    """So many are."""


class AdmissionQueue:
    """The requests of one service that wait for a place; with `length_max` 0 nobody does."""

    def __init__(self, admission: Admission, metrics: Metrics) -> None:
        self._admission = admission
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
        self, ticket: Ticket, wanted: WaitingRequest, exchange: HttpExchange, deadline: float
    ) -> Context:
        """The context of a request in flight, for `Admission.leave`, once there is a place.

        Raises `OverloadedError` after `timeout_s`, or `UnavailableError` if nobody was there for
        it, `DeadlineError` at `deadline` (on trio's clock), `UnavailableError` when a drain begins,
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
                self._admission.leave(waiter.context, ticket)
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
        why = ticket.refusal or self._admission.why_closed(wanted)
        if isinstance(why, UnavailableError):
            raise type(why)(f"{why.message}, and nobody came within {self.timeout_s:g} s")
        said = "" if why is None else f": {why.message}"
        raise OverloadedError(
            f"there was no place within http.queue_timeout_s {self.timeout_s:g}{said}",
            bound="queue_timeout",
            value=self.timeout_s,
        )

    def settle(self) -> None:
        """Let in whom there is a place for now: one of each party in turn."""
        admission = self._admission
        lines = {
            model: line
            for model, line in self._lines.items()
            if line.length and not line.is_refused and line.unsure < line.window
            if admission.why_closed(line.wanted) is None
        }
        while lines and admission.has_room:
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
            waiter.context = admission.begin(ticket.request_id)
            waiter.ended.set()

    def took(self, ticket: Ticket) -> None:
        """A worker takes it, or it is over: it was right to let it in, and two may follow."""
        line, ticket.line = ticket.line, None
        if line is not None:
            line.unsure -= 1
            line.window += 1
            self._forget_if_over(line)
            self.settle()

    def refused(self, ticket: Ticket, wanted: WaitingRequest, error: OverloadedError) -> None:
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
            for model, line in list(self._lines.items()):
                if line.is_refused:
                    # The first may be refused for what it asks: then it must not keep out the next.
                    line.window = 2
                self.freed(model)

    def _greediest(self, party: str) -> str | None:
        """Who has so much more of the queue than `party` that one of it should go to that one."""
        most = max(self._parties, key=self._count, default=party)
        return most if self._count(most) > self._count(party) + 1 else None

    def _count(self, party: str) -> int:
        return sum(map(len, self._parties.get(party, {}).values()))

    def _join(self, ticket: Ticket, wanted: WaitingRequest) -> _Waiter:
        greediest = self._greediest(ticket.party)
        if self.length >= self.length_max and ticket.refusal is None and greediest is not None:
            newest = max(
                (line[-1] for line in self._parties[greediest].values()),
                key=lambda each: each.ticket.number,
            )
            text = f"http.queue_max {self.length_max} requests wait, fewer of each other party"
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
    heads = (waiters[0] for model, waiters in own.items() if model in lines)
    return min(heads, key=lambda each: each.ticket.number, default=None)


class RateLimit:
    """A token bucket for each party: `burst` requests at once, `rate_per_s` in the long run.

    A party that comes for the first time, or after `PARTIES_MAX` others, has its whole burst.
    """

    def __init__(self, clock: Clock, rate_per_s: float, burst: int | None) -> None:
        self._clock, self._rate_per_s = clock, rate_per_s
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """What each had left, and when; who came last is last."""
        self.tune(rate_per_s, burst)

    def tune(self, rate_per_s: float, burst: int | None) -> None:
        """Other bounds from now on; `burst` None: what comes in a second, and one at least."""
        now = self._clock.now()
        for party in self._buckets:
            self._buckets[party] = self._left(party, now), now
        self._rate_per_s = rate_per_s
        self._burst = max(1, math.ceil(rate_per_s)) if burst is None else burst

    def _left(self, party: str, now: float) -> float:
        left, at = self._buckets.get(party, (self._burst, now))
        return min(self._burst, left + (now - at) * self._rate_per_s)

    def take(self, party: str) -> None:
        """One more request of `party` comes; raises `RateLimitExceededError` if it is one too many."""
        now = self._clock.now()
        left = self._left(party, now)
        self._buckets[party] = (left - 1 if left >= 1 else left, now)
        self._buckets.move_to_end(party)
        if len(self._buckets) > PARTIES_MAX:
            self._buckets.popitem(last=False)
        if left < 1:
            raise RateLimitExceededError(
                f"more than {self._rate_per_s:g} of your requests a second come here, and"
                f" {self._burst:g} at once; ask later",
                bound="rate_per_s",
                value=self._rate_per_s,
                retry_after_s=(1 - left) / self._rate_per_s,
            )

    def headers(self, party: str) -> Headers:
        """What an answer to `party` says of what it may still ask, in OpenAI's words."""
        left = self._left(party, self._clock.now())
        full_ms = math.ceil((self._burst - left) / self._rate_per_s * 1000)
        return [
            (b"x-ratelimit-limit-requests", b"%d" % self._burst),
            (b"x-ratelimit-remaining-requests", b"%d" % int(left)),
            (b"x-ratelimit-reset-requests", b"%dms" % full_ms),
        ]


class Admission:
    """The requests of one service: those that arrive, those that wait and those in flight."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        requests_max: int = 4096,
        bodies: Bodies | None = None,
        answers_bytes_max: int = 256 << 20,
    ) -> None:
        self.bodies = bodies or Bodies(256 << 20)
        self.answers = Bodies(answers_bytes_max, are_answers=True)
        """What is kept of answers until they are whole."""
        self.requests_max = requests_max
        """So many are in flight at once."""
        self.busy: BusyLimits | None = None
        """From which load on workers are given no new requests; None: from none."""
        self.cors: Cors | None = None
        """Whose pages may ask; None: nobody's, and nothing is said of it."""
        self.keys: ApiKeys | None = None
        """One of which each request needs; None: it needs none."""
        self.rate: RateLimit | None = None
        """How often requests may arrive; None: as often as they like."""
        self.queue = AdmissionQueue(self, metrics)
        """Whoever is to wait where the bounds let nobody in."""
        metrics.readings(
            "requests_",
            (),
            lambda shown: [((), {"waiting": shown["queue"].length})],
            gauges={"waiting": "Requests that wait for a place"},
        ).shown["queue"] = self.queue
        self._refused = metrics.counts(
            "requests_refused", "Requests that the frontend itself refused, by the bound", "bound"
        )
        self._here: dict[str, int] = {}
        """How many requests of each party have arrived and are not over; none is zero."""
        self._reading = self._number = self._more = 0
        self._root = Context("http")
        self._idle: trio.Event | None = None
        self.is_leaving = False
        """Whether balancers should ask another frontend; this one still answers until it drains."""
        self.is_draining = False
        self._waits_until = -math.inf
        """When those who wait for somebody to come give up; infinity while somebody is there."""

    def status(self, *, has_instance: bool) -> str:
        """What a frontend says of itself, `has_instance` being whether a worker of a model is live.

        `draining`; `ready`; `waiting` from when it is first asked for after the last worker went,
        for as long as a request that came then would wait for another; then, and as long as none
        was ever there, `unavailable`.
        """
        if self.is_leaving:
            return "draining"
        if has_instance:
            self._waits_until = math.inf
            return "ready"
        now = trio.current_time()
        if self._waits_until == math.inf:
            self._waits_until = now + (self.queue.timeout_s if self.queue.length_max else 0)
        return "waiting" if now < self._waits_until else "unavailable"

    @property
    def in_flight(self) -> int:
        """How many requests are admitted and not over, those for further choices of one included."""
        return self._root.child_count + self._more

    @contextmanager
    def arriving(
        self, request_id: str, party: str, headers: Headers | None = None
    ) -> Iterator[Ticket]:
        """A request of `party`, from before its body is read to the end of its answer.

        Raises `UnavailableError` while draining, `OverloadedError` where not even to wait is room,
        but for a party that has less than its share, or if what it asks comes too often. It takes
        no room before it `arrived`: half a body keeps nobody out. A drain does not wait for one
        that arrives: it is in flight once it is admitted. Where its rate is bounded, `headers`, of
        its answer, tell it.
        """
        if self.is_draining:
            raise _draining()
        self._check_room(party)
        if self.rate is not None:
            try:
                self.rate.take(party)
            finally:
                if headers is not None:
                    headers += self.rate.headers(party)
        self._number += 1
        ticket = Ticket(request_id, party, self._number)
        try:
            yield ticket
        finally:
            if ticket.has_arrived:
                self._reading -= ticket.is_read_in
                self._here[party] -= 1
                if not self._here[party]:
                    del self._here[party]

    def arrived(self, ticket: Ticket) -> None:
        """Its body is whole. Raises `OverloadedError` as `arriving` does."""
        self._check_room(ticket.party)
        ticket.has_arrived = ticket.is_read_in = True
        self._reading += 1
        self._here[ticket.party] = self._here.get(ticket.party, 0) + 1

    def _check_room(self, party: str) -> None:
        here, places = self._here, self.requests_max + self.queue.length_max
        if self._reading + self.in_flight + self.queue.length < places:
            return
        if here.get(party, 0) >= places // (len(here) + (party not in here)):
            raise self._over()

    def check_load(self, engines: Iterable[Engine], party: str) -> None:
        """Raise `OverloadedError` if all of `engines` are busy, and `party` may not wait for them.

        Which of them a request is for, its body says; where it is all the same, nobody need read
        it.
        """
        if self.busy is None or self.queue.has_room(party):
            return
        asked = list(engines)
        if asked and all(map(self.is_busy, asked)):
            raise _all_busy()

    def enter(self, ticket: Ticket, wanted: WaitingRequest) -> Context | None:
        """One more in flight, for `leave`; None: there is no place now, and it may wait for one.

        Raises `UnavailableError` while draining, and if it may not wait, why it would have to.
        """
        if self.is_draining:
            raise _draining()
        ticket.model = wanted.model
        self._reading -= ticket.is_read_in
        ticket.is_read_in = False
        queue = self.queue
        if queue.length:
            # Whoever came before it, and needs wait no longer, has the place.
            queue.settle()
        closed = self.why_closed(wanted)
        if closed is None and self.has_room and not queue.holds_up(wanted.model):
            return self.begin(ticket.request_id)
        if ticket.refusal is not None or queue.has_room(ticket.party):
            return None
        raise closed or (_all_busy() if self.has_room else self._over())

    def why_closed(self, wanted: WaitingRequest) -> TrinamoError | None:
        """Why nobody is let in who wants that; None: because of `requests_max`, if at all."""
        try:
            engine = wanted.find()
        except ModelAwayError as away:
            return away
        except RequestError:
            return None
        if isinstance(engine, RoutedEngine) and not engine.is_there:
            return ModelAwayError(f"nobody who serves '{wanted.model[:80]}' can be reached")
        return _all_busy() if self.is_busy(engine) else None

    def begin(self, request_id: str) -> Context:
        """One more in flight, whatever the bounds say."""
        return Context(request_id, parent=self._root)

    def leave(self, context: Context, ticket: Ticket) -> None:
        """One less in flight: who waits for its place gets it."""
        context.close()
        self.queue.took(ticket)
        if ticket.refusal is None:
            self.queue.freed(ticket.model)
        elif self.queue.length:
            self.queue.settle()
        if self._idle is not None and not self.in_flight:
            self._idle.set()

    def take_place(self) -> bool:
        """Whether a request that is in flight has one more place, for `give_place`.

        Not while anybody waits for one.
        """
        if self.is_draining or self.queue.length or not self.has_room:
            return False
        self._more += 1
        return True

    def give_place(self) -> None:
        """Give back what `take_place` took: who waits for it gets it."""
        self._more -= 1
        if self.queue.length:
            self.queue.settle()

    @property
    def has_room(self) -> bool:
        return self.in_flight < self.requests_max

    def is_busy(self, engine: Engine) -> bool:
        """Whether every worker of `engine` has said that it is busy.

        Nobody is busy of whom no report has come lately, and no engine that is in this process.
        """
        limits = self.busy
        return limits is not None and isinstance(engine, RoutedEngine) and engine.is_busy(limits)

    def _over(self) -> OverloadedError:
        wait_max = self.queue.length_max
        waiting = f" and http.queue_max {wait_max} wait" if wait_max else ""
        return OverloadedError(
            f"http.requests_max {self.requests_max} requests are under way{waiting}",
            bound="requests_max",
            value=self.requests_max,
        )

    def refused(self, error: OverloadedError) -> None:
        """Count a request that was refused at a bound, whoever found it reached."""
        self._refused.tally(error.bound).value += 1

    def drain(self) -> None:
        self.is_leaving = self.is_draining = True
        self.queue.refuse_all(_draining)

    def stop(self, reason: Reason) -> None:
        self._root.stop(reason)

    def kill(self, reason: Reason) -> None:
        self._root.kill(reason)

    async def wait_idle(self) -> None:
        """Return once nothing is in flight. For one waiter at a time."""
        if not self.in_flight:
            return
        self._idle = trio.Event()
        await self._idle.wait()


def _draining() -> UnavailableError:
    return UnavailableError("the server is shutting down; ask another one")


def _all_busy() -> OverloadedError:
    text = "every worker is over http.busy_blocks or http.busy_waiting_tokens"
    return OverloadedError(text, bound="busy")
