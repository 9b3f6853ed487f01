"""In which order runnable tasks take their steps: the scheduling policies.

    fifo      creation order; nothing is decided
    batch     whole batches, each in a seeded permutation: cheap, and no recorded decisions
    choice    whole batches, every pick a recorded decision
    grouped   as choice inside a host, hosts in fixed order: hosts share no memory, so the order
              between them changes nothing (partial-order reduction by construction)
    step      one task at a time, every pick a recorded decision: any interleaving can happen
    pct       one task at a time, by random priorities that change at a few random steps, which
              finds a bug of depth d with a known probability (Burckhardt et al., ASPLOS 2010)

A policy is given the runnable tasks, oldest first, and says which run now, in which order: all of
them, or one, and then the others stay runnable. 0 is always the dull answer: creation order, or whose turn it is.
Read next: `scheduler.py`, which puts a policy in trio's place of decision.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from .choices import Choices
from .host import incarnation_of

if TYPE_CHECKING:
    from trio.lowlevel import Task

__all__ = ["Arrange", "Policy", "policy_named"]

Policy = Literal["batch", "choice", "fifo", "grouped", "pct", "step"]

PCT_DEPTH = 3
"""Bugs that need so many ordered steps are what `pct` looks for."""
PCT_STEPS = 4000
"""How many steps a run is taken to have when `pct` places its changes of priority."""
TURNS_MAX = 200
"""How many steps in a row `pct` lets one task take while others wait, before it goes last."""


class Arrange(Protocol):
    """A policy at work. Takes two or more tasks, gives all of them in order, or one."""

    def __call__(self, tasks: list[Task]) -> list[Task]: ...


def policy_named(name: Policy, choices: Choices) -> Arrange:
    """The policy called `name`, deciding by `choices`; `ValueError` if there is none."""
    if name not in get_args(Policy):
        raise ValueError(f"no such policy: {name!r}; there are {', '.join(get_args(Policy))}")
    if name == "fifo":
        return _as_created
    if name == "batch":
        return _Batch(choices.stream("schedule"))
    if name == "choice":
        return _Choice(choices)
    if name == "grouped":
        return _Grouped(choices)
    if name == "step":
        return _Step(choices)
    return _Priorities(choices.stream("schedule"))


def _as_created(tasks: list[Task]) -> list[Task]:
    return tasks


class _Batch:
    def __init__(self, rng: random.Random) -> None:
        self._shuffle = rng.shuffle

    def __call__(self, tasks: list[Task]) -> list[Task]:
        self._shuffle(tasks)
        return tasks


class _Choice:
    def __init__(self, choices: Choices) -> None:
        self._choices = choices

    def __call__(self, tasks: list[Task]) -> list[Task]:
        below = self._choices.below
        return [tasks.pop(below(len(tasks), "schedule")) for _ in range(len(tasks))]


class _Grouped(_Choice):
    def __call__(self, tasks: list[Task]) -> list[Task]:
        groups: dict[str, list[Task]] = {}
        for task in tasks:
            incarnation = incarnation_of(task)
            groups.setdefault(incarnation.host.name if incarnation else "", []).append(task)
        order: list[Task] = []
        for name in sorted(groups):
            order += super().__call__(groups[name])
        return order


class _Step:
    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._turns: dict[Task, int] = {}
        self._next_turn = 0

    def __call__(self, tasks: list[Task]) -> list[Task]:
        turns = self._turns
        for task in tasks:
            if task not in turns:
                turns[task] = self._next_turn
                self._next_turn += 1
        # Whoever became runnable first is the dull answer, so dull runs are fair.
        tasks.sort(key=turns.__getitem__)
        chosen = tasks[self._choices.below(len(tasks), "step")]
        # The others may be taken out of the batch by a pause or a kill; they get a new turn then.
        self._turns = {task: turns[task] for task in tasks if task is not chosen}
        return [chosen]


class _Priorities:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._priorities: dict[Task, float] = {}
        self._changes = {rng.randrange(PCT_STEPS) for _ in range(PCT_DEPTH - 1)}
        self._step = 0
        self._lowest = 0.0
        self._last: Task | None = None
        self._turns = 0

    def __call__(self, tasks: list[Task]) -> list[Task]:
        priorities = self._priorities
        for task in tasks:
            if task not in priorities:
                priorities[task] = self._rng.random()
        chosen = max(tasks, key=priorities.__getitem__)
        self._turns = self._turns + 1 if chosen is self._last else 0
        self._last = chosen
        # The second rule is not in the paper: a task that polls would starve the others for ever.
        if self._step in self._changes or self._turns > TURNS_MAX:
            self._lowest -= 1.0
            priorities[chosen] = self._lowest
            self._turns = 0
        self._step += 1
        return [chosen]
