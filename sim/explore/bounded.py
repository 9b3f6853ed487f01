"""Every run that deviates from the default run in at most so many decisions.

Runs are visited by their number of deviations, so the first failure found has the fewest. A search
that was not stopped by `runs_max` is complete: no run of this scenario within the bound breaks a
rule, as far as it is made of recorded decisions. What is drawn from `Choices.stream` is fixed by the
seed; take a policy that records its picks (`choice`, `grouped`, `step`) to enumerate schedules too.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterator

import attrs

from ..core.choices import Choice, DeviationChoices
from .run import Play, Run, played

Deviations = tuple[tuple[int, int], ...]


@attrs.define
class Search:
    """What a bounded search found. `is_complete` says whether it saw every run within its bound."""

    max_deviations: int
    runs: int = 0
    failed_runs: int = 0
    is_complete: bool = False
    first: Run | None = None
    """The first failing run, which has the fewest deviations."""
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
    on_progress: Callable[[Search], object] = lambda _search: None,
) -> Search:
    """Play the default run, then all with one deviation, and so on up to `max_deviations`.

    With `labels` only decisions of these names may depart. `on_progress` is called after each run.
    """
    search = Search(max_deviations)
    level = [_Parent((), 0, None)]
    for depth in range(max_deviations + 1):
        search.runs_by_deviations.append(0)
        following: list[_Parent] = []
        for deviations in (each for parent in level for each in parent.children()):
            if search.runs >= runs_max:
                return search
            result = played(play, DeviationChoices(deviations, seed))
            search.runs += 1
            search.runs_by_deviations[depth] += 1
            _count(search, result.run)
            on_progress(search)
            if depth < max_deviations:
                following.append(_Parent.of(deviations, result.record, labels))
        level = following
    search.is_complete = True
    return search


@attrs.frozen
class _Parent:
    """A run whose deviations are to be played: where, and how many answers there are.

    Kept packed: a run has ten thousands of decisions, and a search thousands of runs.
    """

    deviations: Deviations
    start: int
    answers: bytes | None
    """Of each decision from `start` on, packed; None stands for the default run itself."""

    @classmethod
    def of(cls, deviations: Deviations, record: list[Choice], labels: tuple[str, ...]) -> _Parent:
        start = deviations[-1][0] + 1 if deviations else 0
        counts = (
            choice.n if not labels or choice.label in labels else 1 for choice in record[start:]
        )
        return cls(deviations, start, zlib.compress(array("Q", counts).tobytes(), 1))

    def children(self) -> Iterator[Deviations]:
        if self.answers is None:
            yield self.deviations
            return
        counts = array("Q")
        counts.frombytes(zlib.decompress(self.answers))
        for position, n in enumerate(counts, self.start):
            for value in range(1, n):
                yield (*self.deviations, (position, value))


def _count(search: Search, result: Run) -> None:
    if result.finding is None:
        return
    search.failed_runs += 1
    search.keys[result.finding.key] = search.keys.get(result.finding.key, 0) + 1
    if search.first is None:
        search.first, search.first_after_runs = result, search.runs
