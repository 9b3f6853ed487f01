"""The order in which runnable tasks take their steps.

trio sorts each batch of runnable tasks by creation number and then has its random generator
shuffle it. `Scheduler` stands in for that generator. The list it is given is the one trio then
works through from its end, so the scheduler may reorder it, and may take out the tasks of paused
and dead hosts, also while the batch is being worked through.

Policies: `batch`, a seeded permutation; `choice`, every pick a recorded decision; `fifo`, creation
order. What this module does not do: interleave within a batch step by step; the three policies run
whole batches. Read next: `world.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from .choices import Choices
from .host import incarnation_of

if TYPE_CHECKING:
    from trio.lowlevel import Task

__all__ = ["Policy", "Scheduler"]

Policy = Literal["batch", "choice", "fifo"]


class Scheduler:
    """What trio believes to be its random generator; see the module's words.

    `on_batch` is called with the tasks of each batch in the order in which they will run.
    """

    def __init__(
        self, choices: Choices, policy: Policy, on_batch: Callable[[list[Task]], None]
    ) -> None:
        if policy not in ("batch", "choice", "fifo"):
            raise ValueError(f"no such policy: {policy!r}")
        self._choices = choices
        self._policy = policy
        self._rng = choices.stream("schedule")
        self._on_batch = on_batch
        self._batch: list[Task] = []
        self.is_unwinding = False

    def shuffle(self, batch: list[Task]) -> None:
        """Called by trio with the runnable tasks, sorted; decides who runs, and in which order."""
        self._batch = batch
        self.hold_back()
        order = list(batch)
        if len(order) > 1:
            if self._policy == "batch":
                self._rng.shuffle(order)
            elif self._policy == "choice":
                order = [order.pop(self._pick(len(order))) for _ in range(len(order))]
        self._on_batch(order)
        # trio pops from the end of the list.
        batch[:] = reversed(order)

    def _pick(self, n: int) -> int:
        return 0 if self.is_unwinding else self._choices.below(n, "schedule")

    def hold_back(self) -> None:
        """Take the tasks of paused and dead hosts out of the current batch and keep them."""
        if self.is_unwinding:
            return
        running = []
        for task in self._batch:
            incarnation = incarnation_of(task)
            if incarnation is None or incarnation.may_run:
                running.append(task)
            else:
                incarnation.host.frozen.append(task)
        self._batch[:] = running

    def random(self) -> float:
        """For trio's unsorted scheduling, which is off during a run."""
        return 0.0

    def uniform(self, low: float, high: float) -> float:  # noqa: ARG002 -- trio's signature
        """For trio's own clock, which is not used during a run."""
        return low
