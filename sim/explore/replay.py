"""Plays a failure file again, and says where the run departs if it does."""

from __future__ import annotations

import attrs

from .failure import Failure, versions
from .run import Play, Played


@attrs.frozen
class Replay:
    """What came of a replay.

    `difference` names the first row that is not the recorded one, and the versions that are not
    those it was recorded with; empty if the replay is exact.
    """

    played: Played
    difference: str
    version_changes: list[str]

    @property
    def is_exact(self) -> bool:
        """Whether every row was as recorded."""
        return not self.difference


def replay(failure: Failure, scenario: Play | None = None) -> Replay:
    """Play the recorded run, in `scenario` if the named one is not to be imported.

    A run that departs goes on to its end all the same: the recorded decisions go on answering, dull
    past their end, or the seed does. Whether that still counts is for the caller to say.
    """
    again = failure.play(scenario)
    now = versions()
    changes = [
        f"{name} {failure.versions[name]} when recorded, {version} now"
        for name, version in now.items()
        if failure.versions.get(name) != version
    ]
    difference = failure.difference(again.trace)
    if difference and changes:
        difference = f"{difference}\n({'; '.join(changes)})"
    return Replay(again, difference, changes)
