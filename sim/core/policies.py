"""In which order runnable tasks take their steps: the scheduling policies.

    fifo      creation order; nothing is decided
    batch     whole batches, each in a seeded permutation: cheap, and no recorded decisions
    choice    whole batches, every pick a recorded decision
    grouped   as choice inside a host, hosts in fixed order: hosts share no memory, so the order
              between them changes nothing (partial-order reduction by construction)
    step      one task at a time, every pick a recorded decision: any interleaving can happen
    pct       one task at a time, by random priorities that change at a few random steps, which
              finds a bug of depth d with a known probability (Burckhardt et al., ASPLOS 2010;
              `pct_chance` has it). The changes are recorded, the priorities are not

A policy is given the runnable tasks, oldest first, and says which run now, in which order: all of
them, or one, and then the others stay runnable. 0 is always the default answer: creation order, or whose turn it is.

Under `step` and `pct` the next event (a delivery, a fault) and the next deadline compete with the
runnable tasks, so they fall between any two steps. Time then goes on while tasks could run, as on
a machine whose steps take time; no task is kept waiting for longer than `LATE_S_MAX` by that, or
everything would time out. Under the others events come when no task can run.
Read next: `scheduler.py`, which puts a policy in trio's place of decision.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

from typing_extensions import override

from .choices import Choices
from .host import incarnation_of
from .machines import Machines

if TYPE_CHECKING:
    from trio.lowlevel import Task


Policy = Literal["batch", "choice", "fifo", "grouped", "pct", "step"]

PCT_CHANGES = 10
"""How many changes of priority `pct` makes. A bug that needs fewer is found by whichever of them fit."""
PCT_HORIZONS = (32, 128, 512, 2048, 8192)
"""How many steps a run may be taken to have when `pct` places its changes of priority.

The seed draws one, so that short runs and long ones are met without a run that counts steps first.
"""
TURNS_MAX = 200
"""How many steps in a row `pct` lets one task take while others wait, before it goes last."""


LATE_S_MAX = 0.001
"""How long events and deadlines may keep a runnable task waiting: two trips of a default link."""
EVENT_ONE_IN = 4
"""How often `step` lets the next event come before the next step, where it may."""


def pct_chance(*, tasks: int, steps: int, depth: int) -> float:
    """The share of seeds that show a bug of `depth` under `pct`, at least; of a run of so many tasks and steps.

    One task must begin, `depth` - 1 changes must come at their steps, the others after the end. In a horizon
    that is shorter than the run nothing is sure. 0 for a bug that needs more changes than `pct` makes.
    """
    needed, share = depth - 1, 0.0
    for horizon in PCT_HORIZONS:
        if horizon >= steps and needed <= PCT_CHANGES:
            late = (horizon + 1 - steps) / (horizon + 1)
            ways = math.comb(PCT_CHANGES, needed) * late ** (PCT_CHANGES - needed)
            share += ways / (horizon + 1) ** needed
    return share / len(PCT_HORIZONS) / max(1, tasks)


Arrange = Callable[[list["Task"]], list["Task"]]
"""A policy at work. Takes the runnable tasks; gives all of them in order, or one, or none.

None means: first what happens next.
"""


def is_interleaved(name: Policy) -> bool:
    """Whether single steps are interleaved with each other, and with what happens."""
    return name in ("step", "pct")


def policy_named(name: Policy, choices: Choices, clock: Machines) -> Arrange:
    """The policy called `name`, deciding by `choices`; `ValueError` if there is none."""
    if name not in get_args(Policy):
        raise ValueError(f"no such policy: {name!r}; there are {', '.join(get_args(Policy))}")
    if name == "fifo":
        return lambda tasks: tasks
    if name == "batch":
        return _Batch(choices.stream("schedule"))
    if name == "choice":
        return _Choice(choices)
    if name == "grouped":
        return _Grouped(choices)
    if name == "step":
        return _Step(choices, clock)
    return _Priorities(choices, clock)


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


class _OneByOne(ABC):
    """What the single-step policies share: whose turn it is, and how long it has been."""

    def __init__(self, clock: Machines) -> None:
        self._clock = clock
        self._since_s: dict[Task, float] = {}
        """Of each runnable task, in the order of their turns: since when it waits for its own."""

    def __call__(self, tasks: list[Task]) -> list[Task]:
        since_s, now_s = self._since_s, self._clock.current_time()
        for task in tasks:
            since_s.setdefault(task, now_s)
        if len(since_s) > len(tasks):
            # A pause or a kill took some out of the batch; they get a new turn when they are back.
            for task in set(since_s).difference(tasks):
                del since_s[task]
        # Whoever became runnable first is the default answer, so default runs are fair.
        tasks = list(since_s)
        next_s = self._clock.next_happening_s()
        is_soon = next_s <= since_s[tasks[0]] + LATE_S_MAX
        if is_soon and self._gives_way(tasks, next_s):
            return []
        chosen = self._pick(tasks)
        del since_s[chosen]
        return [chosen]

    @abstractmethod
    def _gives_way(self, tasks: list[Task], next_s: float) -> bool:
        """Whether what happens next, at `next_s`, comes before any step."""

    @abstractmethod
    def _pick(self, tasks: list[Task]) -> Task:
        """Who takes the next step; the tasks are sorted by their turns."""


class _Step(_OneByOne):
    def __init__(self, choices: Choices, clock: Machines) -> None:
        super().__init__(clock)
        self._choices = choices

    @override
    def _gives_way(self, tasks: list[Task], next_s: float) -> bool:
        return self._choices.chance(EVENT_ONE_IN, "event first")

    @override
    def _pick(self, tasks: list[Task]) -> Task:
        return tasks[self._choices.below(len(tasks), "step")]


class _Priorities(_OneByOne):
    def __init__(self, choices: Choices, clock: Machines) -> None:
        super().__init__(clock)
        self._rng = choices.stream("schedule")
        self._priorities: dict[Task, float] = {}
        horizon = self._rng.choice(PCT_HORIZONS)
        # By the number of the step, from 1; 0 is the dull answer, no change. Which of two changes
        # takes a task lower does not depend on which comes first.
        self._changes = {
            choices.below(horizon + 1, "priority change"): -1.0 - nth for nth in range(PCT_CHANGES)
        }
        self._step = 0
        self._lowest = -1.0 - PCT_CHANGES
        self._last: Task | None = None
        self._turns_in_a_row = 0
        self._next_s, self._next_priority = -1.0, 0.0

    @override
    def _gives_way(self, tasks: list[Task], next_s: float) -> bool:
        # What happens at one moment is one more participant, with a priority of its own.
        if next_s != self._next_s:
            self._next_s, self._next_priority = next_s, self._rng.random()
        return self._next_priority > max(map(self._priority_of, tasks))

    @override
    def _pick(self, tasks: list[Task]) -> Task:
        chosen = max(tasks, key=self._priority_of)
        self._turns_in_a_row = self._turns_in_a_row + 1 if chosen is self._last else 0
        self._last = chosen
        self._step += 1
        # This rule is not in the paper: a task that polls would starve the others for ever.
        if self._turns_in_a_row > TURNS_MAX:
            self._lowest -= 1.0
            self._priorities[chosen] = self._lowest
            self._turns_in_a_row = 0
        elif self._step in self._changes:
            self._priorities[chosen] = self._changes[self._step]
        return chosen

    def _priority_of(self, task: Task) -> float:
        priority = self._priorities.get(task)
        if priority is None:
            priority = self._priorities[task] = self._rng.random()
        return priority
