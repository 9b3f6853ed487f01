"""When a stream whose worker has left discovery is given up: a rule on numbers, no clock of its own.

From its first item on a stream is not ended because discovery no longer names its worker: the
worker may have lost its lease and work on. But the connection alone is no proof of life either,
because the kernel of a stopped process keeps it open. So the two are taken together: *deleted from
discovery* and *silent for the whole grace*. `router.py` keeps one `Vigil` for every instance that
vanished while it had requests under way, and ends it when the instance is back. The table is drawn
in `docs/protocols/presence.md`.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping
from typing import Final, Generic, TypeVar

__all__ = ["LOOKS_PER_GRACE", "PRESENCE", "Presence", "Sign", "Vigil"]

LOOKS_PER_GRACE: Final = 4
"""How often a vigil looks: a silent stream ends between one grace and one and a quarter."""


class Presence(enum.Enum):
    """What the caller of a stream that has begun believes of its worker."""

    LISTED = "discovery names it, or cannot be asked; silence means nothing"
    VANISHED = "deleted from discovery; the grace runs"
    GIVEN_UP = "ended with DisconnectedError; Kill and FIN are sent to the worker"


class Sign(enum.Enum):
    """What the caller sees."""

    DELETED = "a delete, or a resync that does not name it"
    RETURNED = "a put under the same id"
    ITEM = "an item came, or reading waits for the consumer"
    SILENCE = "no item for the whole grace"


# fmt: off
PRESENCE: Final[Mapping[Presence, Mapping[Sign, Presence]]] = {
    Presence.LISTED:   {Sign.DELETED: Presence.VANISHED},
    Presence.VANISHED: {Sign.RETURNED: Presence.LISTED, Sign.ITEM: Presence.VANISHED,
                        Sign.SILENCE: Presence.GIVEN_UP},
    Presence.GIVEN_UP: {},
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
