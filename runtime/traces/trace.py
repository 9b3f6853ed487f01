"""One request in one process: its legs, each from a start to an end, with what is known of it.

Whoever works for a request finds its trace at its context (`Context.trace`). A leg is written when
it begins, and again when it ends: nothing is done for a token. Facts are numbers and names of our
own; no text of a client's or of a model's gets in here. Which traces are kept, `ring.py` decides.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

import trio

from ..errors import TrinamoError

LEGS_MAX: Final = 64
"""Of one trace: a request that is tried more often than that tells no more by it."""

Fact = str | int | float
GOOD_OUTCOMES: Final = ("success", "adopted")
"""Of a leg that ended as it should."""


class Leg:
    """One part of a request's way. Times are seconds of the process's own clock (`Clock.now`)."""

    __slots__ = ("_now", "end", "facts", "marks", "name", "start", "traceparent")

    def __init__(
        self, now: Callable[[], float], name: str, start: float, facts: dict[str, Fact]
    ) -> None:
        self._now = now
        self.name = name
        self.start = start
        self.end: float | None = None
        """None while it is under way."""
        self.marks: list[tuple[str, float]] = []
        """What was reached on the way, and when."""
        self.facts = facts
        self.traceparent = ""
        """What travels to another process that works for this leg; empty where nobody traces."""

    def mark(self, name: str, at: float | None = None) -> None:
        """`name` is reached: now, or when the caller has looked at the clock anyway."""
        self.marks.append((name, self._now() if at is None else at))

    def tell(self, **facts: Fact) -> None:
        self.facts |= facts

    def finish(self, outcome: str = "success", **facts: Fact) -> None:
        """It is over, with the code of an error or of another outcome; the first word counts."""
        if self.end is None:
            self.end = self._now()
            facts["outcome"] = outcome
            self.facts |= facts

    def leave(self, error: BaseException | None) -> None:
        if error is None:
            self.finish()
        elif isinstance(error, trio.Cancelled):
            self.finish("cancelled")
        else:
            self.finish(error.code if isinstance(error, TrinamoError) else TrinamoError.code)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave(exc)


class RequestTrace:
    """The legs of one request in this process, in the order in which they began."""

    __slots__ = ("_now", "legs", "legs_left_out", "request_id", "traceparent")

    def __init__(self, now: Callable[[], float], request_id: str, traceparent: str = "") -> None:
        self._now = now
        self.request_id = request_id
        self.traceparent = traceparent
        """W3C trace context of the request here: its caller's, where we do not trace (`spans.py`)."""
        self.legs: list[Leg] = []
        self.legs_left_out = 0

    @property
    def is_exported(self) -> bool:
        """Whether its legs go to a collector, for which more of them is told."""
        return False

    @property
    def is_good(self) -> bool:
        """Whether it is over, and ended as it should: the first leg is that of the whole."""
        return bool(self.legs) and self.legs[0].facts.get("outcome") in GOOD_OUTCOMES

    def begin(self, name: str, at: float | None = None, **facts: Fact) -> Leg:
        """A leg begins, now or at `at`; over the bound it is counted and not kept."""
        leg = Leg(self._now, name, self._now() if at is None else at, facts)
        self._keep(leg)
        return leg

    def precede(self, name: str, lasted_s: float, **facts: Fact) -> None:
        """Write what the request has been through until now, for `lasted_s`, on its way here.

        Only once the first leg has begun, beside which it then stands.
        """
        leg = self.begin(name, self._now() - lasted_s, **facts)
        leg.finish()

    def _keep(self, leg: Leg) -> None:
        if len(self.legs) < LEGS_MAX:
            self.legs.append(leg)
        else:
            self.legs_left_out += 1


class _NoLeg(Leg):
    __slots__ = ()

    def __init__(self) -> None:
        self.marks, self.facts, self.traceparent = [], {}, ""

    def mark(self, name: str, at: float | None = None) -> None:
        pass

    def tell(self, **facts: Fact) -> None:
        pass

    def finish(self, outcome: str = "success", **facts: Fact) -> None:
        pass


class _NoTrace(RequestTrace):
    __slots__ = ("_leg",)

    def __init__(self) -> None:
        self.traceparent = self.request_id = ""
        self.legs, self.legs_left_out = [], 0
        self._leg = _NoLeg()

    def begin(self, name: str, at: float | None = None, **facts: Fact) -> Leg:  # noqa: ARG002
        return self._leg

    def precede(self, name: str, lasted_s: float, **facts: Fact) -> None:
        pass


NO_TRACE: Final[RequestTrace] = _NoTrace()
"""The trace of a request that nobody will ask for: whatever is written in it is dropped."""
