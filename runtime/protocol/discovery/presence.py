"""Whether an instance is there, is asked, and which requests to it are given up: a table, and rules on numbers.

A connection is no proof of life: the kernel of a stopped process keeps it open. Nor does silence
prove death: a long prefill, a long queue and a slow tool are silent too. So two things must agree.
If discovery has deleted the instance: *deleted*, and *silent for a grace* since. If discovery names
it, or cannot be asked: *silent for a grace*, and for another that brings *no answer to any probe*.

One that is there may be faulty (`InstanceFault`): others are asked while they live. `Liveness.faulty_until` is the one
clock of it. A failed request is a fault that is waited out, for a time that doubles with every failure after
it. When that is over one request at a time, the trial, finds out; an answer takes back one failure.

`PRESENCE` is the program: `Liveness.step` goes by it. No clock and no I/O here: `caller/liveness.py`
looks, probes and acts. The table is drawn in `docs/protocols/presence.md`.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final

from ...errors import (
    ConnectError,
    DisconnectedError,
    RemoteProtocolError,
    TrinamoError,
    UpstreamError,
)

_BLAMED: Final = (ConnectError, DisconnectedError, RemoteProtocolError, UpstreamError)
"""Errors of a request that are its instance's fault."""
_FAILURES_MAX: Final = 5
_GROWS_TO_S: Final = 60.0
"""An instance is not passed over longer than this, or than `router.inhibit_s` if that is more."""
LOOKS_PER_GRACE: Final = 4
"""How often it is looked, and probed: what takes a grace by rule takes a quarter more at most."""
_ROUNDING_S: Final = 1e-6
"""Four quarters of a grace, added up, may be a little less than the grace."""


class Presence(enum.Enum):
    """What the callers of an instance believe of it."""

    LISTED = "discovery names it, or cannot be asked; each request was heard within the grace"
    SILENT = "as LISTED, but a request to it is silent: it is probed four times in a grace"
    UNRESPONSIVE = "as SILENT, and the last probe brought no answer: it is passed over"
    STALE = "deleted, but its connection stands: it is kept, and probed every second"
    LEFT = "chosen no more; what waited for a first item has ended, what has begun goes on"


class Sign(enum.Enum):
    """What is seen of an instance."""

    REGISTERED = "a put under its id that says something new"
    LAPSED = "deleted, though its connection stands and it has not said that it leaves"
    DELETED = "deleted otherwise; a resync that does not name it deletes it, too"
    SILENCE = "a request to it has brought nothing for the whole grace"
    HEARD = "no request to it is silent any more, or there is none"
    ACCEPTED = "it answers a probe, and would take a request"
    ANSWERED = "it answers a probe otherwise: it drains, is full, does not serve this"
    UNASKED = "no plane can carry a probe now, such as while NATS is away"
    UNANSWERED = "a probe was waited for, and brought no answer"
    REPLACED = "somebody else answers at its address"
    DISCONNECTED = "the connection to it broke"
    OUT_OF_GRACE = "not registered again within `router.stale_grace_s`"


# fmt: off
PRESENCE: Final[Mapping[Presence, Mapping[Sign, Presence]]] = {
    Presence.LISTED:       {Sign.SILENCE: Presence.SILENT,
                            Sign.LAPSED: Presence.STALE, Sign.DELETED: Presence.LEFT},
    Presence.SILENT:       {Sign.HEARD: Presence.LISTED, Sign.REGISTERED: Presence.LISTED,
                            Sign.UNANSWERED: Presence.UNRESPONSIVE,
                            Sign.LAPSED: Presence.STALE, Sign.DELETED: Presence.LEFT},
    Presence.UNRESPONSIVE: {Sign.ACCEPTED: Presence.SILENT, Sign.ANSWERED: Presence.SILENT,
                            Sign.UNASKED: Presence.SILENT, Sign.REGISTERED: Presence.LISTED,
                            Sign.LAPSED: Presence.STALE, Sign.DELETED: Presence.LEFT},
    Presence.STALE:        {Sign.REGISTERED: Presence.LISTED, Sign.ANSWERED: Presence.LEFT,
                            Sign.UNASKED: Presence.LEFT, Sign.UNANSWERED: Presence.LEFT,
                            Sign.REPLACED: Presence.LEFT, Sign.DISCONNECTED: Presence.LEFT,
                            Sign.OUT_OF_GRACE: Presence.LEFT},
    Presence.LEFT:         {Sign.REGISTERED: Presence.LISTED},
}
"""What is not listed changes nothing."""
# fmt: on


class InstanceFault(enum.Enum):
    """Why, and until when, an instance is passed over while another lives."""

    UNREACHED = "a connection to it broke, or cannot be made: until one is made"
    UNRESPONSIVE = "it is UNRESPONSIVE: until a probe is answered or cannot be sent, or REGISTERED"
    FAILED = """requests to it failed by a lost connection or nonsense, or `router.errors_max` in a row by
errors that it answered with: for `router.inhibit_s`, twice as long for each failure after that, a minute at
most; or until a request is answered, until REGISTERED, or, but after nonsense, until it is reached again"""
    TRIED = """it has failed, and one request, the trial, finds out whether it lives again: until that one ends,
or as FAILED"""


class InFlight(ABC):
    """One request under way to one instance, as `Liveness` looks at it while it waits."""

    __slots__ = ("count", "is_lost", "is_waiting", "payload_bytes", "sent_at", "since")

    def __init__(self, *, is_waiting: bool, payload_bytes: int = 0) -> None:
        self.payload_bytes = payload_bytes
        self.sent_at = 0.0
        """When it became one of its instance's."""
        self.is_waiting = is_waiting
        """For its first item: then it ends when its instance leaves."""
        self.is_lost = False
        """It was given up, and is about to end."""
        self.count: int | None = None
        """What `heard` said at the last look; -1 for None."""
        self.since = 0.0
        """The time of the first look that brought this count."""

    @property
    def has_items(self) -> bool:
        """Whether something of its answer has come: its prompt is computed then."""
        return False

    @abstractmethod
    def heard(self) -> int | None:
        """How often something has come of it; None while nothing can: its consumer does not read."""

    @abstractmethod
    def fail(self, error: DisconnectedError) -> None:
        """End it with `error`; synchronous, and called once at most."""


class Liveness:
    """One instance's presence and faults, and the requests under way to it.

    `errors_max` errors that it answers with, in a row, are a fault; whatever else it fails by is one at once.
    Bounded by those requests. Whoever was stopped itself for a while must not blame others for it:
    only probes that were waited for count, not the time that has passed.
    """

    def __init__(self, grace_s: float, stale_grace_s: float = 0.0, errors_max: int = 1) -> None:
        self.presence = Presence.LISTED
        self.faults: dict[InstanceFault, float] = {}
        """Each with its end, infinite where that is not a matter of time."""
        self.requests: dict[InFlight, None] = {}
        """The oldest first."""
        self.pause_s = grace_s / LOOKS_PER_GRACE
        """Between two looks; also how long the answer to a probe of a silent instance may take."""
        self._grace_s = grace_s
        self._stale_grace_s = stale_grace_s
        self._deleted_at = math.inf
        self._is_silent = False
        self._life_at: float | None = None
        """When it last gave a sign, by any request or by an answer."""
        self._unanswered_count = 0
        self._unanswered_since = 0.0
        self._errors_max = errors_max
        self._errors = self._failures = 0
        """In a row; and how often it failed after it had been waited for, fewer by one for each answer since."""
        self._trial: InFlight | None = None
        self._is_nonsensical = False

    @property
    def faulty_until(self) -> float:
        """Until when it is passed over, while another lives."""
        return max(self.faults.values(), default=-math.inf)

    @property
    def is_probed(self) -> bool:
        """Whether to ask it now; one that did not answer before it left is asked on."""
        if self.presence is Presence.LEFT:
            return self._is_silent and self._unanswered_count > 0
        return self.presence is not Presence.LISTED

    @property
    def stale_until(self) -> float:
        """When a stale instance has had its time; infinite for others."""
        is_stale = self.presence is Presence.STALE
        return self._deleted_at + self._stale_grace_s if is_stale else math.inf

    @property
    def is_quiet(self) -> bool:
        """Whether there is nothing to look at until a request begins or discovery says something."""
        return not self.requests and self.presence in (Presence.LISTED, Presence.LEFT)

    def step(self, sign: Sign, now: float) -> None:
        self.presence = PRESENCE[self.presence].get(sign, self.presence)
        if self.presence is Presence.UNRESPONSIVE:
            self.faults[InstanceFault.UNRESPONSIVE] = math.inf
        else:
            self.faults.pop(InstanceFault.UNRESPONSIVE, None)
        if sign is Sign.REGISTERED:
            self._deleted_at, self._life_at, self._unanswered_count = math.inf, None, 0
            self._forgive(failures=0)
        elif self.presence in (Presence.STALE, Presence.LEFT) and self._deleted_at == math.inf:
            self._deleted_at = now

    def look(self, now: float) -> list[InFlight]:
        """See who is silent; which requests end because their instance was deleted as well.

        The first look at a request begins its grace. None is ever named twice.
        """
        is_silent, speaks = False, self._life_at is None
        for request in self.requests:
            count = request.heard()
            if count is None:
                # The next look begins anew: -1 differs from every count.
                request.count, request.since = -1, now
            elif request.count != count:
                # Of one whose consumer has begun to read again it is not known when it spoke.
                speaks = speaks or (count > 0 if request.count is None else request.count >= 0)
                request.count, request.since = count, now
            elif not request.is_lost:
                is_silent = is_silent or self._lasts(request.since, now)
        if speaks:
            self._lives(now)
        elif not self.requests and self.presence is Presence.LISTED:
            self._life_at = None
        self._is_silent = is_silent
        self.step(Sign.SILENCE if is_silent else Sign.HEARD, now)
        return self._lose(now, waiting=False) if self._lasts(self._deleted_at, now) else []

    def take(self, reply: Sign, asked_at: float, now: float) -> list[InFlight]:
        """Note what a probe sent at `asked_at` has brought, after a look; which requests it ends.

        Those are the silent ones, once the instance has not answered for long enough, or at once if
        somebody else does.
        """
        if reply in (Sign.ACCEPTED, Sign.ANSWERED):
            self._lives(now)
        elif reply is Sign.UNASKED:
            self._unanswered_count = 0
        elif reply is Sign.UNANSWERED:
            if not self._unanswered_count:
                self._unanswered_since = asked_at
            self._unanswered_count += 1
        self.step(reply, now)
        return self._lose(now) if reply is Sign.REPLACED or self._is_dead(now) else []

    def _lose(self, now: float, *, waiting: bool = True) -> list[InFlight]:
        """The requests that are silent, those that wait for a first item only with `waiting`."""
        lost = [
            each
            for each in self.requests
            if each.count is not None
            and not each.is_lost
            and (waiting or not each.is_waiting)
            and self._lasts(each.since, now)
        ]
        for each in lost:
            each.is_lost = True
        return lost

    def _is_dead(self, now: float) -> bool:
        return (
            self._unanswered_count >= LOOKS_PER_GRACE
            and self._lasts(self._unanswered_since, now)
            and self._life_at is not None
            and self._lasts(self._life_at, now, graces=2)
        )

    def _lives(self, now: float) -> None:
        self._life_at, self._unanswered_count = now, 0

    def _lasts(self, since: float, now: float, *, graces: int = 1) -> bool:
        return now - since >= graces * self._grace_s - _ROUNDING_S

    # --- faults ---

    def begin(self, request: InFlight) -> bool:
        """`request` is sent to it; whether it is the trial, whose end others wait for."""
        self.requests[request] = None
        if not self._failures or self._trial is not None:
            return False
        self._trial, self.faults[InstanceFault.TRIED] = request, math.inf
        return True

    def end(self, request: InFlight) -> bool:
        """`request` is over, whatever became of it; whether it was the trial."""
        del self.requests[request]
        is_trial = self._trial is request
        if is_trial:
            self._end_trial()
        return is_trial

    def answer(self) -> None:
        self._errors = 0
        if self._failures:
            self._forgive(failures=self._failures - 1)

    def fail(self, error: TrinamoError, now: float, lasts_s: float) -> bool:
        """A request ended with `error`; whether it is passed over for that, for `lasts_s` or longer.

        An `UpstreamError` is an answer of one that lives: it counts with others in a row. Nonsense is
        not made good by a new connection. Errors that are no fault of the instance say nothing.
        """
        if not isinstance(error, _BLAMED):
            return False
        self._errors += 1
        is_answer = isinstance(error, UpstreamError)
        if is_answer and not self._failures and self._errors < self._errors_max:
            return False
        until = self.faults.get(InstanceFault.FAILED, -math.inf)
        if now >= until:
            # Not for every request that one failure took along.
            self._failures = min(self._failures + 1, _FAILURES_MAX)
        grown_s = min(lasts_s * 2 ** (self._failures - 1), max(_GROWS_TO_S, lasts_s))
        self.faults[InstanceFault.FAILED] = max(until, now + grown_s)
        self._end_trial()
        self._is_nonsensical |= isinstance(error, RemoteProtocolError)
        return True

    def connect(self) -> bool:
        """A connection to it is made; whether there was none: it is another process, or was out of reach."""
        if self.faults.pop(InstanceFault.UNREACHED, None) is None:
            return False
        if not self._is_nonsensical:
            self._forgive(failures=0)
        return True

    def disconnect(self) -> bool:
        """A connection to it broke, or cannot be made; whether that is news."""
        is_news = InstanceFault.UNREACHED not in self.faults
        self.faults[InstanceFault.UNREACHED] = math.inf
        return is_news

    def _forgive(self, *, failures: int) -> None:
        """It is asked as any other; of what it did, so many failures are remembered."""
        self._failures, self._is_nonsensical = failures, False
        if not failures:
            self._errors = 0
        self.faults.pop(InstanceFault.FAILED, None)
        self._end_trial()

    def _end_trial(self) -> None:
        self._trial = None
        self.faults.pop(InstanceFault.TRIED, None)
