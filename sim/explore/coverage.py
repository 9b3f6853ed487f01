"""What none of many runs has shown of what their scenario is about.

A run says what it did not show (`World.untested`): a fault whose note never came, an expected note that is
missing. Chance may keep that from one run; if it is so in all, the scenario tests less than it says.
"""

from __future__ import annotations

from collections.abc import Iterable

from .run import shape_of


class Coverage:
    """What all runs lack that were added."""

    def __init__(self) -> None:
        self._lacking: dict[str, str] | None = None

    def add(self, untested: Iterable[str]) -> None:
        """One more run, and what it did not show."""
        lacking = {shape_of(text): text for text in untested}
        before = lacking if self._lacking is None else self._lacking
        self._lacking = {shape: text for shape, text in before.items() if shape in lacking}

    @property
    def untested(self) -> list[str]:
        """What no run has shown, in sentences; nothing as long as there was none."""
        return list((self._lacking or {}).values())
