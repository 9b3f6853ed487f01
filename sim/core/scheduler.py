"""Stands in for trio's dice, and so decides which runnable task takes the next step.

trio sorts each batch of runnable tasks by creation number and then has its random generator
shuffle it. The list it hands over is the one it then works through from its end, so `TaskScheduler` may
reorder it, take out the tasks of paused and dead hosts (also while the batch is being worked
through), and put tasks back for the next batch, which is how single steps are interleaved.

What this module does not do: choose the order (`policies.py`). Read next: `world.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .choices import Choices
from .host import incarnation_of
from .machines import Machines
from .policies import Policy, is_interleaved, policy_named

if TYPE_CHECKING:
    from trio.lowlevel import Task


class TaskScheduler:
    """What trio believes to be its random generator; see the module's words.

    `on_batch` is called with the tasks of each batch in the order in which they will run,
    `requeue` with those that are to stay runnable. `clock` has the events and deadlines that
    single-step policies may let happen before any of them.
    """

    def __init__(
        self,
        choices: Choices,
        policy: Policy,
        clock: Machines,
        on_batch: Callable[[list[Task]], None],
        requeue: Callable[[list[Task]], None],
    ) -> None:
        self._arrange = policy_named(policy, choices, clock)
        self._is_interleaved = is_interleaved(policy)
        self._clock = clock
        self._on_batch, self._requeue = on_batch, requeue
        self._batch: list[Task] = []
        self.is_unwinding = False
        self._may_hold = False
        """Whether a process was ever paused, or ended. Until then every task may run."""

    def shuffle(self, batch: list[Task]) -> None:
        """Called by trio with the runnable tasks, sorted; decides who runs, and in which order."""
        self._batch = batch
        if self.is_unwinding:
            self._on_batch(batch)
            return
        if self._may_hold:
            self._take_out()
        if self._is_interleaved and batch:
            order = self._arrange(list(batch))
            if order:
                batch.remove(order[0])
            self._requeue(batch)
            if not order:
                batch.clear()
                self._clock.happen()
                return
        elif len(batch) > 1:
            order = self._arrange(list(batch))
        else:
            order = batch[:]
        self._on_batch(order)
        # trio pops from the end of the list.
        order.reverse()
        batch[:] = order

    def hold_back(self) -> None:
        """Take the tasks of paused and dead hosts out of the current batch and of all that follow."""
        self._may_hold = True
        if not self.is_unwinding:
            self._take_out()

    def _take_out(self) -> None:
        kept: list[Task] = []
        for task in self._batch:
            incarnation = incarnation_of(task)
            if incarnation is None or incarnation.may_run:
                kept.append(task)
            else:
                incarnation.host.frozen.append(task)
        self._batch[:] = kept

    def random(self) -> float:
        """For trio's unsorted scheduling, which is off during a run."""
        return 0.0

    def uniform(self, low: float, high: float) -> float:  # noqa: ARG002 -- trio's signature
        """For trio's own clock, which is not used during a run."""
        return low
