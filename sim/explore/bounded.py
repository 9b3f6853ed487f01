"""Every run that departs from the dull one in at most so many decisions.

Runs are visited by their number of departures, so the first failure found has the fewest. A search
that was not stopped by `runs_max` is complete: no run of this scenario within the bound breaks a
rule, as far as it is made of recorded decisions. What is drawn from `Choices.stream` is fixed by the
seed; take a policy that records its picks (`choice`, `grouped`, `step`) to enumerate schedules too.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from ..choices import DeviationChoices
from .run import Play, Run, played

__all__ = ["Search", "explore_bounded"]

Deviations = tuple[tuple[int, int], ...]


@attrs.define
class Search:
    """What a bounded search found. `is_complete` says whether it saw every run within its bound."""

    max_deviations: int
    runs: int = 0
    failed_runs: int = 0
    is_complete: bool = False
    first: Run | None = None
    """The first failing run, which has the fewest departures."""
    first_after_runs: int = 0
    runs_by_deviations: list[int] = attrs.field(factory=list)
    keys: dict[str, int] = attrs.field(factory=dict)
    """How often each kind of failure was met, by `Finding.key`."""


def explore_bounded(
    play: Play,
    *,
    max_deviations: int,
    runs_max: int = 100_000,
    labels: tuple[str, ...] = (),
    seed: int = 0,
    stop_at_first: bool = False,
    on_progress: Callable[[Search], object] = lambda _search: None,
) -> Search:
    """Play the dull run, then all with one departure, and so on up to `max_deviations`.

    With `labels` only decisions of these names may depart. `on_progress` is called after each run.
    """
    search = Search(max_deviations)
    level: list[Deviations] = [()]
    for depth in range(max_deviations + 1):
        search.runs_by_deviations.append(0)
        following: list[Deviations] = []
        for deviations in level:
            if search.runs >= runs_max:
                return search
            result = played(play, DeviationChoices(deviations, seed))
            search.runs += 1
            search.runs_by_deviations[depth] += 1
            _count(search, result.run)
            on_progress(search)
            if search.first is not None and stop_at_first:
                return search
            if depth < max_deviations:
                start = deviations[-1][0] + 1 if deviations else 0
                for position in range(start, len(result.record)):
                    choice = result.record[position]
                    if not labels or choice.label in labels:
                        following += [
                            (*deviations, (position, value)) for value in range(1, choice.n)
                        ]
        level = following
    search.is_complete = True
    return search


def _count(search: Search, result: Run) -> None:
    if result.finding is None:
        return
    search.failed_runs += 1
    search.keys[result.finding.key] = search.keys.get(result.finding.key, 0) + 1
    if search.first is None:
        search.first, search.first_after_runs = result, search.runs
