"""Who gets in: requests in flight, their bound, who waits for a place, and the drain.

Every inference request is a child context of one root, so that a shutdown reaches all of them.
Decided synchronously; the service (`service.py`) owns the deadlines, and `queue.py` those who wait.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import trio

from ...context import Context, Reason
from ...env import Clock
from ...errors import ModelNotFoundError, OverloadedError, TrinamoError, UnavailableError
from ...events.load import BusyLimits
from ...metrics.metrics import Metrics
from ..bodies import Bodies
from ..models.models import Engine, ModelAwayError, RemoteEngine
from ..status import RateLimitExceededError
from .cors import Cors
from .keys import ApiKeys
from .queue import AdmissionQueue, Ticket, Wanted

PARTIES_MAX: Final = 4096
"""So many are remembered."""


class RateLimit:
    """A token bucket for each party: `burst` requests at once, and `rate_per_s` of them in the long run, of each party.

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
                retry_after_s=math.ceil((1 - left) / self._rate_per_s),
            )


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
        self._reading = self._number = 0
        self._root = Context("http")
        self._idle: trio.Event | None = None
        self.is_leaving = False
        """Whether balancers should ask another frontend; this one still answers until it drains."""
        self.is_draining = False

    @property
    def in_flight(self) -> int:
        """How many requests are admitted and not over; zero at quiescence."""
        return self._root.child_count

    @contextmanager
    def arriving(self, request_id: str, party: str) -> Iterator[Ticket]:
        """A request of `party`, from before its body is read to the end of its answer.

        Raises `UnavailableError` while draining, `OverloadedError` where not even to wait is room,
        but for a party that has less than its share, or if what it asks comes too often. It takes
        no room before it `arrived`: half a body keeps nobody out. A drain does not wait for one
        that arrives: it is in flight once it is admitted.
        """
        if self.is_draining:
            raise _draining()
        self._check_room(party)
        if self.rate is not None:
            self.rate.take(party)
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

        Which of them a request is for, its body says; where it is all the same, nobody need read it.
        """
        if self.busy is None or self.queue.has_room(party):
            return
        asked = list(engines)
        if asked and all(map(self.is_busy, asked)):
            raise _all_busy()

    def enter(self, ticket: Ticket, wanted: Wanted) -> Context | None:
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

    def why_closed(self, wanted: Wanted) -> TrinamoError | None:
        """Why nobody is let in who wants that; None: because of `requests_max`, if at all."""
        try:
            engine = wanted.find()
        except ModelAwayError as away:
            return away
        except ModelNotFoundError:
            return None
        if isinstance(engine, RemoteEngine) and not engine.is_there:
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

    @property
    def has_room(self) -> bool:
        """Whether one more is within `requests_max`."""
        return self.in_flight < self.requests_max

    def is_busy(self, engine: Engine) -> bool:
        """Whether every worker of `engine` has said that it is busy.

        Nobody is busy of whom no report has come lately, and no engine that is in this process.
        """
        limits = self.busy
        return limits is not None and isinstance(engine, RemoteEngine) and engine.is_busy(limits)

    def _over(self) -> OverloadedError:
        waiting = f" and {self.queue.length_max} may wait" if self.queue.length_max else ""
        return OverloadedError(
            f"{self.requests_max} requests are under way{waiting}, which is the limit",
            bound="requests_max",
            value=self.requests_max,
        )

    def refused(self, error: OverloadedError) -> None:
        """Count a request that was refused at a bound, whoever found it reached."""
        self._refused.tally(error.bound).value += 1

    def drain(self) -> None:
        """Admit nothing from now on, and nobody who waits."""
        self.is_leaving = self.is_draining = True
        self.queue.refuse_all(_draining)

    def stop(self, reason: Reason) -> None:
        """Ask every request in flight to finish early."""
        self._root.stop(reason)

    def kill(self, reason: Reason) -> None:
        """End every request in flight now."""
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
    return OverloadedError("every worker that could answer is busy", bound="busy")
