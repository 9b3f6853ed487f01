"""Makes a failing run dull: fewer faults, fewer decisions that are not 0, lower ones.

A candidate is kept if it fails in the same way (`Finding.key` is equal: another bug that breaks the
same rule is another failure). After every success
the new run's own record is what is shrunk further, so positions always mean what they say. The order
is from coarse to fine: drop faults, silence whole labels, then halves, quarters, single decisions,
then lower what is left.

What this module does not do: promise the smallest; it stops at a result no single step improves, or
at its limit of processor time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import attrs

from ..core.choices import Choice, Choices, LabelledChoices, ReplayChoices
from .run import Run, Scenario, played


@attrs.define
class Shrunk:
    """The dullest failing run that was found, and how."""

    scenario: Scenario
    run: Run
    record: list[Choice]
    attempts: int = 0
    is_finished: bool = False
    """Whether it stopped because nothing got duller, not because the time was up."""


class _TimeUp(Exception):  # noqa: N818 -- no error: it ends the search
    pass


def shrink(
    scenario: Scenario,
    choices: Choices,
    *,
    cpu_s_max: float = 60.0,
    on_progress: Callable[[Shrunk], object] = lambda _shrunk: None,
) -> Shrunk:
    """Shrink the failing run of `scenario` with `choices`; `ValueError` if it does not fail.

    `on_progress` is called whenever a duller run was found.
    """
    first = played(scenario, choices)
    if first.run.finding is None:
        raise ValueError("this run does not fail, so there is nothing to shrink")
    shrinker = _Shrinker(
        Shrunk(scenario, first.run, first.record), time.process_time() + cpu_s_max, on_progress
    )
    try:
        shrinker.shrink()
        shrinker.best.is_finished = True
    except _TimeUp:
        pass
    return shrinker.best


class _Shrinker:
    def __init__(
        self, best: Shrunk, until_cpu_s: float, on_progress: Callable[[Shrunk], object]
    ) -> None:
        assert best.run.finding is not None
        self.best = best
        self._key = best.run.finding.key
        self._until_cpu_s = until_cpu_s
        self._on_progress = on_progress

    def shrink(self) -> None:
        while True:
            before = self._measure(self.best.scenario, self.best.record)
            self._drop_faults()
            self._silence_labels()
            self._silence_blocks()
            self._lower_values()
            if self._measure(self.best.scenario, self.best.record) >= before:
                return

    @staticmethod
    def _measure(scenario: Scenario, record: list[Choice]) -> tuple[int, int, int, int]:
        non_default = [choice.value for choice in record if choice.value]
        return len(_faults(scenario)), len(non_default), sum(non_default), len(record)

    def _try(self, choices: Choices, scenario: Scenario | None = None) -> bool:
        """Play; keep the run if it fails alike and is duller."""
        if time.process_time() > self._until_cpu_s:
            raise _TimeUp
        best = self.best
        scenario = scenario or best.scenario
        best.attempts += 1
        result = played(scenario, choices)
        finding = result.run.finding
        if finding is None or finding.key != self._key:
            return False
        if self._measure(scenario, result.record) >= self._measure(best.scenario, best.record):
            return False
        best.scenario, best.run, best.record = scenario, result.run, result.record
        self._on_progress(best)
        return True

    def _drop_faults(self) -> None:
        size = len(_faults(self.best.scenario))
        while size:
            start = 0
            while start < len(faults := _faults(self.best.scenario)):
                fewer = self.best.scenario.changed(faults=faults[:start] + faults[start + size :])
                values, seed = self.best.run.values, self.best.run.seed
                if not (
                    self._try(ReplayChoices(values, seed), fewer)
                    or self._try(LabelledChoices(_by_label(self.best.record), seed), fewer)
                ):
                    start += size
            size //= 2

    def _silence_labels(self) -> None:
        seed = self.best.run.seed
        if self._try(ReplayChoices([], seed)):
            return
        non_default = Counter(choice.label for choice in self.best.record if choice.value)
        for label, _ in non_default.most_common():
            answers = _by_label(self.best.record)
            answers.pop(label, None)
            if not self._try(LabelledChoices(answers, seed)):
                self._silence_half_a_label(label)

    def _silence_half_a_label(self, label: str) -> None:
        """Of one label, keep no answers after the first half, quarter, … that suffice."""
        answers = _by_label(self.best.record)
        kept = len(answers.get(label, []))
        while kept > 1:
            kept //= 2
            shorter = {**answers, label: answers[label][:kept]}
            if not self._try(LabelledChoices(shorter, self.best.run.seed)):
                return

    def _silence_blocks(self) -> None:
        """Zero ever smaller groups of non_default decisions, until no single one can be zeroed."""
        size = max(1, len(_lively(self.best.record)) // 2)
        while True:
            start = 0
            while start < len(positions := _lively(self.best.record)):
                values = list(self.best.run.values)
                for position in positions[start : start + size]:
                    values[position] = 0
                last = positions[-1] + 1
                if not self._try(ReplayChoices(values[:last], self.best.run.seed)):
                    start += size
            if size == 1:
                return
            size //= 2

    def _lower_values(self) -> None:
        index = 0
        while index < len(positions := _lively(self.best.record)):
            position = positions[index]
            value = self.best.run.values[position]
            for lower in sorted({1, value // 2, value - 1} - {0, value}):
                values = list(self.best.run.values)
                values[position] = lower
                if self._try(ReplayChoices(values, self.best.run.seed)):
                    break
            else:
                index += 1


def _faults(scenario: Scenario) -> list[Any]:
    faults = scenario.parameters.get("faults")
    return faults if isinstance(faults, list) else []


def _lively(record: list[Choice]) -> list[int]:
    return [position for position, choice in enumerate(record) if choice.value]


def _by_label(record: list[Choice]) -> dict[str, list[int]]:
    answers: dict[str, list[int]] = {}
    for choice in record:
        answers.setdefault(choice.label, []).append(choice.value)
    return answers
