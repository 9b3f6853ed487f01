"""Every run that deviates from the default run in at most so many decisions.

Runs are visited by their number of deviations, so the first failure found has the fewest. A search
that was not stopped by `runs_max` is complete: no run of this scenario within the bound breaks a
rule, as far as it is made of recorded decisions. What is drawn from `Choices.stream` is fixed by the
seed; take a policy that records its picks (`choice`, `grouped`, `step`) to enumerate schedules too.
`Search.fixed` names what was not varied. Of a delay only none and all of the jitter is tried: what
lies between changes times, and rarely an order.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase

import attrs

from ..core.choices import Choice, DeviationChoices
from ..core.world import World
from .run import Play, Run, played

Deviations = tuple[tuple[int, int], ...]
JITTER = "jitter"
UNRECORDED = {"batch": "the order of steps", "pct": "which task goes first"}
"""What a policy draws without recording it, in words."""


@attrs.define
class Search:
    """What a bounded search found. `is_complete` says whether it saw every run within its bound."""

    max_deviations: int
    runs: int = 0
    failed_runs: int = 0
    is_complete: bool = False
    expected_runs: int = 0
    """How many runs there are within the bound, if every run decides what the default run does."""
    fixed: set[str] = attrs.field(factory=set)
    """What was not varied: labels that were left out, and what the policy does not record."""
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
    without: tuple[str, ...] = (),
    seed: int = 0,
    on_progress: Callable[[Search], object] = lambda _search: None,
) -> Search:
    """Play the default run, then all with one deviation, and so on up to `max_deviations`.

    With `labels` only decisions of these names may depart, and those of `without` may not; they may be
    patterns (`cut *`). `on_progress` is called after each run; after the first one the search knows
    how many there will be (`expected_runs`).
    """
    search = Search(max_deviations)

    def is_open(label: str) -> bool:
        is_named = not labels or any(fnmatchcase(label, each) for each in labels)
        return is_named and not any(fnmatchcase(label, each) for each in without)

    level = [_Parent((), 0, None)]
    for depth in range(max_deviations + 1):
        search.runs_by_deviations.append(0)
        following: list[_Parent] = []
        for deviations in (each for parent in level for each in parent.children()):
            if search.runs >= runs_max:
                return search
            choices = DeviationChoices(deviations, seed)
            result = played(play, choices)
            search.runs += 1
            search.runs_by_deviations[depth] += 1
            if (finding := result.run.finding) is not None:
                search.failed_runs += 1
                search.keys[finding.key] = search.keys.get(finding.key, 0) + 1
                if search.first is None:
                    search.first, search.first_after_runs = result.run, search.runs
            search.fixed.update(_fixed(choices, is_open))
            if not search.expected_runs:
                search.expected_runs = _estimate(result.record, is_open, max_deviations)
            on_progress(search)
            if depth < max_deviations:
                following.append(_Parent.of(deviations, result.record, is_open))
        level = following
    search.is_complete = True
    return search


def _others(choice: Choice) -> range:
    """The answers that a decision may have in place of the default."""
    return range(choice.n - 1 if choice.label.startswith(JITTER) else 1, choice.n)


def _fixed(choices: DeviationChoices, is_open: Callable[[str], bool]) -> set[str]:
    fixed = {each.label for each in choices.record if not is_open(each.label)}
    fixed |= {
        f"{each.label} between none and all"
        for each in choices.record
        if len(_others(each)) < each.n - 1 and is_open(each.label)
    }
    unrecorded = UNRECORDED.get(choices.world.policy) if isinstance(choices.world, World) else None
    return fixed | ({unrecorded} if unrecorded else set())


def _estimate(record: list[Choice], is_open: Callable[[str], bool], depth: int) -> int:
    """How many ways there are to choose at most `depth` decisions and another answer for each."""
    ways = [1] + [0] * depth
    for choice in record:
        if is_open(choice.label):
            for taken in range(depth, 0, -1):
                ways[taken] += ways[taken - 1] * len(_others(choice))
    return sum(ways)


@attrs.frozen
class _Parent:
    """A run whose deviations are to be played: where, and how many answers there are.

    Kept packed: a run has ten thousands of decisions, and a search thousands of runs.
    """

    deviations: Deviations
    start: int
    answers: bytes | None
    """Of each decision from `start` on, packed: the first other answer, and where they end.

    None stands for the default run itself.
    """

    @classmethod
    def of(
        cls, deviations: Deviations, record: list[Choice], is_open: Callable[[str], bool]
    ) -> _Parent:
        start = deviations[-1][0] + 1 if deviations else 0
        spans = array("Q")
        for choice in record[start:]:
            spans.extend((_others(choice).start, choice.n if is_open(choice.label) else 0))
        return cls(deviations, start, zlib.compress(spans.tobytes(), 1))

    def children(self) -> Iterator[Deviations]:
        if self.answers is None:
            yield self.deviations
            return
        spans = array("Q")
        spans.frombytes(zlib.decompress(self.answers))
        for position, (first, n) in enumerate(
            zip(spans[::2], spans[1::2], strict=True), self.start
        ):
            for value in range(first, n):
                yield (*self.deviations, (position, value))
