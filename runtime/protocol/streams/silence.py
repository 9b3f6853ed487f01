"""When a silent stream is given up: rules on numbers, no clock of their own.

A connection is no proof of life: the kernel of a stopped process keeps it open. Nor does silence
prove death: a long prefill, a long queue and a slow tool are silent too. So a second witness is
heard. If discovery has deleted the worker, that is it: *deleted* and *silent for the whole grace*
(`Vigil`). If discovery names it, or cannot be asked, the worker itself is asked: *silent for the
whole grace*, and for another that brings *no answer to any probe* (`Inquiry`).
`runtime/caller/liveness.py` asks and acts. The table is drawn in `docs/protocols/presence.md`.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping
from typing import Final, Generic, TypeVar

__all__ = ["LOOKS_PER_GRACE", "PRESENCE", "Inquiry", "Presence", "Reply", "Sign", "Vigil"]

LOOKS_PER_GRACE: Final = 4
"""How often it is looked, and asked: what takes a grace by rule takes a quarter more at most."""
_ROUNDING_S: Final = 1e-6
"""Four quarters of a grace, added up, may be a little less than the grace."""


class Presence(enum.Enum):
    """What the caller of a stream believes of its worker."""

    LISTED = "discovery names it, or cannot be asked; it was heard within the grace"
    QUESTIONED = (
        "listed, but silent: it is asked four times in a grace, for as long as it is silent"
    )
    VANISHED = "deleted from discovery; the grace runs; who was asked before is asked on"
    GIVEN_UP = "ended with DisconnectedError; Kill and FIN are sent to the worker"


class Sign(enum.Enum):
    """What the caller sees."""

    DELETED = "a delete, or a resync that does not name it"
    RETURNED = "a put under the same id"
    ITEM = "an item came, or reading waits for the consumer"
    SILENCE = "no item for the whole grace"
    ANSWERED = "it answers a probe, whatever it says, or an item came on another stream of it"
    UNASKED = "no plane can carry a probe now, such as while NATS is away: nothing is judged"
    UNANSWERED = "no sign of life for two graces, and no answer to any probe all through the second"
    REPLACED = "somebody else answers at its address"


# fmt: off
PRESENCE: Final[Mapping[Presence, Mapping[Sign, Presence]]] = {
    Presence.LISTED:     {Sign.DELETED: Presence.VANISHED, Sign.SILENCE: Presence.QUESTIONED},
    Presence.QUESTIONED: {Sign.DELETED: Presence.VANISHED, Sign.ITEM: Presence.LISTED,
                          Sign.ANSWERED: Presence.QUESTIONED, Sign.UNASKED: Presence.QUESTIONED,
                          Sign.UNANSWERED: Presence.GIVEN_UP, Sign.REPLACED: Presence.GIVEN_UP},
    Presence.VANISHED:   {Sign.RETURNED: Presence.LISTED, Sign.ITEM: Presence.VANISHED,
                          Sign.SILENCE: Presence.GIVEN_UP, Sign.UNANSWERED: Presence.GIVEN_UP,
                          Sign.REPLACED: Presence.GIVEN_UP},
    Presence.GIVEN_UP:   {},
}
# fmt: on

T = TypeVar("T", bound=Hashable)


class Vigil(Generic[T]):
    """The requests of one vanished instance, and since when each has been silent.

    Bounded by the requests under way: a request that is not shown to `look` again is forgotten.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._known: dict[T, tuple[int, float]] = {}

    @property
    def wait_s(self) -> float:
        """How long to wait between two looks."""
        return self._grace_s / LOOKS_PER_GRACE

    def look(self, heard: Mapping[T, int | None], now: float) -> list[T]:
        """Which requests have been silent for the whole grace; none of them is named twice.

        `heard` says of each request how often something has come so far, None while nothing can
        come because its consumer does not read. The first look at a request starts its grace.
        """
        silent: list[T] = []
        known: dict[T, tuple[int, float]] = {}
        for request, count in heard.items():
            before = self._known.get(request)
            if count is None:
                # The next look begins anew: -1 differs from every count.
                known[request] = (-1, now)
            elif before is None or before[0] != count:
                known[request] = (count, now)
            else:
                known[request] = before
                if now - before[1] >= self._grace_s:
                    silent.append(request)
        for request in silent:
            # Whoever gives it up forgets it too; until then its grace begins anew.
            known[request] = (known[request][0], now)
        self._known = known
        return silent


class Reply(enum.Enum):
    """What one probe has brought, by the time the next is due."""

    ANSWERED = "an answer of the instance that was meant"
    NOTHING = "no answer, or no connection to ask over"
    UNASKED = "no plane could carry the probe"
    REPLACED = "an answer of somebody else"


class Inquiry(Generic[T]):
    """The requests of one instance, which of them are silent, and what asking it has brought.

    Bounded as a `Vigil` is. Whoever was stopped itself for a while must not blame others for it:
    only probes that were waited for count, not the time that has passed.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._known: dict[T, tuple[int, float]] = {}
        self._life_at: float | None = None
        """When the instance last gave a sign, by any request or by an answer."""
        self._unanswered_count = 0
        self._unanswered_since = 0.0

    @property
    def wait_s(self) -> float:
        """How long to wait between two looks, and for the answer to a probe."""
        return self._grace_s / LOOKS_PER_GRACE

    @property
    def is_unanswered(self) -> bool:
        """Whether the last probe has brought no answer."""
        return self._unanswered_count > 0

    def look(self, heard: Mapping[T, int | None], now: float) -> bool:
        """Whether a request has been silent for the whole grace, so that its instance is asked.

        `heard` is as for `Vigil.look`.
        """
        known: dict[T, tuple[int, float]] = {}
        is_silent, speaks = False, self._life_at is None
        for request, count in heard.items():
            before = self._known.get(request)
            if count is None:
                known[request] = (-1, now)
            elif before is not None and before[0] == count:
                known[request] = before
                is_silent = is_silent or self._lasts(before[1], now)
            else:
                known[request] = (count, now)
                # Of one whose consumer has begun to read again it is not known when it spoke.
                speaks = speaks or (count > 0 if before is None else before[0] >= 0)
        self._known = known
        if speaks:
            self._lives(now)
        return is_silent

    def take(self, reply: Reply, asked_at: float, now: float) -> list[T]:
        """Note what a probe sent at `asked_at` has brought; which requests are to be given up.

        Those are the silent ones, once the instance has not answered for long enough, or at once if
        somebody else does. None of them is named twice.
        """
        match reply:
            case Reply.ANSWERED:
                self._lives(now)
            case Reply.UNASKED:
                self._unanswered_count = 0
            case Reply.NOTHING:
                if not self._unanswered_count:
                    self._unanswered_since = asked_at
                self._unanswered_count += 1
            case Reply.REPLACED:
                pass
        if reply is not Reply.REPLACED and not self._is_lost(now):
            return []
        silent = [each for each, (_, since) in self._known.items() if self._lasts(since, now)]
        for request in silent:
            self._known[request] = (self._known[request][0], now)
        return silent

    def _is_lost(self, now: float) -> bool:
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
