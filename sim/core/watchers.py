"""The rules that a run is held to while it goes on; `checkers/` has a base class, and some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from .host import current_label
from .trace import Row


class Watcher(Protocol):
    """A rule: hears of every note as it is made, and of the end of a run that did not fail."""

    def on(self, note: Row) -> None: ...
    def at_end(self) -> None: ...


Watching = TypeVar("Watching", bound=Watcher)


class Watchers:
    """All of one run; what they raise goes to `fail`, since whoever made the note might catch it.

    One that has something to `say` of its own adds rows to the trace by that.
    """

    def __init__(self, fail: Callable[[BaseException], None], add_row: Callable[..., None]) -> None:
        self.all: list[Watcher] = []
        self._fail, self._add_row = fail, add_row

    def add(self, watcher: Watcher) -> None:
        """One more."""
        if hasattr(watcher, "say"):
            vars(watcher)["say"] = self._add_row
        self.all.append(watcher)

    def tell(self, time_s: float, kind: str, fields: dict[str, Any]) -> None:
        """A note was made on the running task's host."""
        note = Row(time_s, current_label(), kind, tuple(fields.items()))
        for watcher in self.all:
            try:
                watcher.on(note)
            except Exception as error:  # noqa: BLE001 -- ends the run
                self._fail(error)
                return

    def end(self) -> None:
        """The run's main function has returned; raises what is wrong."""
        for watcher in self.all:
            watcher.at_end()
