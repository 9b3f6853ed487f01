"""Whom a request may be sent to, and which of them gets it; no list is made for a request.

Candidates are numbers, in the order in which they joined. Each stands somewhere (`Standing`), and a
`Group` has those that stand at least so well, in ascending order: who has the n-th turn, and who
has the least load, is found by bisection. Sans-IO; `caller/choices.py` says who stands where.
"""

from __future__ import annotations

import enum
import random
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final


class Standing(enum.IntEnum):
    """How gladly a candidate is chosen; who drains or speaks nothing that is spoken here is none."""

    OUT = 0
    """It is out of reach, or answers nothing."""
    FAULTY = 1
    """It would be reached, and is passed over for what failed a moment ago."""
    STALE = 2
    """Nothing is wrong with it, but that discovery does not name it."""
    WELL = 3


Measure = Callable[[int], float]
"""What a number is ranked by: the least first."""


class Ranking:
    """Numbers by what they measure, those of equal measure in ascending order.

    A number comes or goes by bisection, and by one move of what is behind it in memory: some 0.1 µs
    of a thousand.
    """

    __slots__ = ("_equal", "_filed", "_measure", "_values")

    def __init__(self, measure: Measure, numbers: Iterable[int]) -> None:
        self._measure = measure
        self._filed: dict[int, float] = {}
        self._equal: dict[float, list[int]] = {}
        """Those of each value, and"""
        self._values: list[float] = []
        """these values in order."""
        for each in numbers:
            self.add(each)

    def add(self, number: int) -> None:
        """One that was not there."""
        value = self._filed[number] = self._measure(number)
        equal = self._equal.get(value)
        if equal is None:
            equal = self._equal[value] = []
            insort(self._values, value)
        insort(equal, number)

    def remove(self, number: int) -> None:
        """One that was there."""
        value = self._filed.pop(number)
        equal = self._equal[value]
        del equal[bisect_left(equal, number)]
        if not equal:
            del self._equal[value]
            del self._values[bisect_left(self._values, value)]

    def renew(self, number: int) -> None:
        """What it measures may have changed; nothing if it is not there."""
        before = self._filed.get(number)
        if before is not None and self._measure(number) != before:
            self.remove(number)
            self.add(number)

    def first(self, begin: int, without: Collection[int]) -> int:
        """The first of the least, from the number `begin` on; somebody is left beside `without`."""
        for value in self._values:
            equal = self._equal[value]
            at = bisect_left(equal, begin) - len(equal)
            # Never more steps than there are in `without`, and one.
            for step in range(len(equal)):
                if equal[at + step] not in without:
                    return equal[at + step]
        raise AssertionError("nobody is left")


class Group:
    """Numbers in ascending order, and ranked by each measure that was asked for."""

    __slots__ = ("numbers", "rankings")

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.rankings: dict[Measure, Ranking] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    def __contains__(self, number: int) -> bool:
        at = bisect_left(self.numbers, number)
        return at < len(self.numbers) and self.numbers[at] == number

    def add(self, number: int) -> None:
        """One that was not there."""
        insort(self.numbers, number)
        for each in self.rankings.values():
            each.add(number)

    def remove(self, number: int) -> None:
        """One that was there."""
        del self.numbers[bisect_left(self.numbers, number)]
        for each in self.rankings.values():
            each.remove(number)

    def nth(self, turn: int, without: Sequence[int]) -> int:
        """The one that has this turn, where those of `without`, all of them here, have none."""
        at = turn % (len(self.numbers) - len(without))
        if without:
            for each in sorted(without):
                at += bisect_left(self.numbers, each) <= at
        return self.numbers[at]

    def least(self, measure: Measure, turn: int, without: Sequence[int]) -> int:
        """The first of those that measure least, from the one on that has this turn.

        Of few measures, each the same object every time: they are ranked from the first time on.
        """
        ranking = self.rankings.get(measure)
        if ranking is None:
            ranking = self.rankings[measure] = Ranking(measure, self.numbers)
        return ranking.first(self.nth(turn, without), without)

    def forget(self, measure: Measure) -> None:
        """Rank by it anew when it is asked for again: all may have changed."""
        self.rankings.pop(measure, None)


class Candidates:
    """Who may be chosen, and whom a request gets: everything by bisection."""

    def __init__(self) -> None:
        self._standing: dict[int, Standing] = {}
        self._groups: Final = {standing: Group() for standing in Standing}
        """By the least standing of their members."""

    def __getitem__(self, standing: Standing) -> Group:
        """Those that stand so well or better."""
        return self._groups[standing]

    def place(self, number: int, standing: Standing | None) -> None:
        """It stands there from now on; None: it is no candidate."""
        before = self._standing.pop(number, None)
        if standing is not None:
            self._standing[number] = standing
        for least, group in self._groups.items():
            was_in = before is not None and before >= least
            is_in = standing is not None and standing >= least
            if was_in and not is_in:
                group.remove(number)
            elif is_in and not was_in:
                group.add(number)

    def renew(self, number: int) -> None:
        """What it measures, such as its load, has changed."""
        for group in self._groups.values():
            for each in group.rankings.values():
                each.renew(number)

    def forget(self, measure: Measure) -> None:
        for group in self._groups.values():
            group.forget(measure)

    def asked(self, exclude: Collection[int] = ()) -> tuple[Group, list[int]]:
        """Whom to choose from, which may be nobody: a group, and those of `exclude` that are in it.

        First those that are well. Stale ones count as much if discovery names less than half of
        what is reached: when all leases have ended in one moment, the first to register again must
        not get what all others were sent (Envoy's panic threshold has the same reason and the same
        half). If nobody is left, all of them: their faults may have passed, and refusing the
        request outright would certainly fail it.
        """
        well, without = self._left(Standing.WELL, exclude)
        healthy, _ = found = self._left(Standing.STALE, exclude)
        well_count = len(well) - len(without)
        if 2 * well_count < len(healthy) - len(found[1]):
            return found
        return (well, without) if well_count else self._left(Standing.OUT, exclude)

    def _left(self, standing: Standing, exclude: Collection[int]) -> tuple[Group, list[int]]:
        group = self._groups[standing]
        return group, [each for each in exclude if each in group]


# --- the choice ---


class Policy(enum.StrEnum):
    """How to choose among equals."""

    ROUND_ROBIN = "round_robin"
    """Each in its turn."""
    RANDOM = "random"
    """Any, drawn for each request."""
    DIRECT = "direct"
    """Only the one that the request names (over HTTP in `X-Trinamo-Worker`), even if it failed just now: who
    is named is asked under every policy."""
    LEAST_LOADED = "least_loaded"
    """The fewest requests under way; of several the first from the one on that has this turn."""
    POWER_OF_TWO = "power_of_two"
    """Of two that are drawn, the one with fewer requests under way: routers that know little of each
    other do not all run to the same one."""
    KV = "kv"
    """By the blocks that each holds of a prompt and by predicted load, which `runtime/caller/kv/` weighs; as
    `least_loaded` for requests of which no prompt is known."""


TOLD_LOAD: Final = frozenset({Policy.LEAST_LOADED, Policy.POWER_OF_TWO, Policy.KV})
"""Under these, workers tell how busy they are and whether they drain."""


def pick(
    policy: Policy,
    group: Group,
    without: Sequence[int],
    *,
    turn: int,
    load: Measure,
    rng: random.Random,
) -> int:
    """Choose one of `group`, and none of `without`, all of them there; somebody is left.

    `turn` counts picks, `load` says how many requests are under way to one. `direct` chooses nobody.
    """
    match policy:
        case Policy.RANDOM:
            return group.nth(rng.randrange(len(group) - len(without)), without)
        case Policy.POWER_OF_TWO:
            count = len(group) - len(without)
            drawn = rng.sample(range(count), min(count, 2))
            return min((group.nth(each, without) for each in drawn), key=load)
        case Policy.LEAST_LOADED | Policy.KV:
            return group.least(load, turn, without)
        case _:
            return group.nth(turn, without)
