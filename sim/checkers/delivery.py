"""What was sent arrives, by the end of the run, as often as it may."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from ..core.checker import Checker
from ..core.trace import Row

LISTED_MAX = 10


class Delivery(Checker):
    """Every note `sent` is followed by a note `delivered` with the same `field`.

    With `is_once` a second delivery is a violation; what was delivered and never sent always is.
    A sender that may give up notes `withdrawn`: what it speaks of may arrive, and need not.
    """

    rule = "delivery"

    def __init__(
        self,
        sent: str,
        delivered: str,
        *,
        field: str = "id",
        is_once: bool = False,
        withdrawn: str = "",
    ) -> None:
        self._sent, self._delivered, self._withdrawn = sent, delivered, withdrawn
        self._field, self._is_once = field, is_once
        self._due: dict[Any, float] = {}
        self._known: set[Any] = set()
        self._arrived: set[Any] = set()

    @override
    def on(self, note: Row) -> None:
        if note.kind not in (self._sent, self._delivered, self._withdrawn):
            return
        name = note.field(self._field)
        if note.kind == self._sent:
            if name not in self._known:
                self._due[name] = note.time_s
            self._known.add(name)
        elif note.kind == self._withdrawn:
            self._due.pop(name, None)
        else:
            self._take(name, note)

    def _take(self, name: Any, note: Row) -> None:
        if name not in self._known:
            self.violate(f"{name!r} was delivered on {note.host} and never sent")
        if self._is_once and name in self._arrived:
            self.violate(f"{name!r} was delivered a second time, on {note.host}")
        if self._is_once:
            self._arrived.add(name)
        self._due.pop(name, None)

    @override
    def at_end(self) -> None:
        missing = [f"{name!r} of {at_s:.3f} s" for name, at_s in self._due.items()]
        if missing:
            more = f" and {len(missing) - LISTED_MAX} more" if len(missing) > LISTED_MAX else ""
            self.violate(f"never delivered: {', '.join(missing[:LISTED_MAX])}{more}")
