"""A rule that a run must keep: told of every note as it is made, and asked once more in the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NoReturn

from ..errors import Violation
from .trace import Row


class Checker:
    """One rule, for one run; subclasses override `on`, or `at_end`, or both.

    What they raise ends the run as its failure; `violate` raises what names the rule.
    """

    rule = ""
    """What the rule is called; the class's name if empty. Runs that break one rule are one failure."""

    say: Callable[..., None] = staticmethod(lambda _kind, **_fields: None)
    """Adds a row to the trace of the run that it watches, for the page; nowhere before that."""

    def on(self, note: Row) -> None:
        """Called with each note as it is made, on whatever host; it must not wait."""

    def at_end(self) -> None:
        """Called when the run's main function has returned, its hosts still as they were then.

        Not called after a run that failed. Let main wait until nothing is on its way any more.
        """

    def hints(self) -> Iterable[str]:
        """Sentences about a run that held, and in which nothing that this rule is about succeeded."""
        return ()

    def violate(self, text: str) -> NoReturn:
        """Raise the `Violation` of this rule; `text` says what was seen."""
        raise Violation(self.rule or type(self).__name__, text)
