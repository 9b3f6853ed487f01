"""Rules over the state of a run and over time: looked at after every step and every event.

A deadline of a rule stands beside the heap of events, not in it: when nothing can run and nothing will
happen any more, the run is a deadlock, though a rule still waits. Predicates only look: one that draws
a decision or adds a row ends the run, since a rule that holds must leave the run as it is.

What this module does not do: rules about notes (`checker.py`). Read next: `world.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import attrs
import trio
from typing_extensions import override

from ..errors import Violation
from .stacks import host_of, task_name

if TYPE_CHECKING:
    from trio.lowlevel import Task

Predicate = Callable[[], object]
EVENT = "an event"


@attrs.define(eq=False)
class Rule:
    """`then` must hold: always, or once by `due_s`; or within `within_s` of every time `when` holds."""

    name: str
    then: Predicate
    when: Predicate | None = None
    within_s: float = 0.0
    due_s: float = math.inf
    is_always: bool = False

    def look(self, now_s: float) -> bool:
        """Take the state as it is now; False if the rule is broken."""
        if self.is_always:
            return bool(self.then())
        if self.due_s < now_s:
            return False
        if self.due_s == math.inf and not (self.when is not None and self.when()):
            return True
        if self.then():
            self.due_s = math.inf
        elif self.due_s == math.inf:
            self.due_s = now_s + self.within_s
        return True

    @property
    def is_over(self) -> bool:
        """Whether it can be broken no more."""
        return not self.is_always and self.when is None and self.due_s == math.inf


class Rules(trio.abc.Instrument):
    """The rules of one world. `now` is its clock, `fail` ends its run.

    `mark` changes with every decision that is drawn and every row that is added.
    """

    def __init__(
        self,
        now: Callable[[], float],
        fail: Callable[[BaseException], object],
        mark: Callable[[], object],
    ) -> None:
        self._now, self._fail, self._mark = now, fail, mark
        self._rules: list[Rule] = []
        self._has_deadlines = False
        self.due_s = math.inf
        """The first moment at which a rule is broken if nothing happens; infinite for none."""
        self.is_used = False
        """Whether the run was held to any."""
        self.is_over = False
        """Whether the run has ended, so that nothing is looked at any more."""

    def add(self, rule: Rule) -> None:
        """Hold the run to it from now on."""
        self._rules.append(rule)
        self.due_s = min(self.due_s, rule.due_s)
        self._has_deadlines |= not rule.is_always
        self.is_used = True

    def look(self, after: Task | str = EVENT) -> None:
        """Hold the run to its rules as it is now, after what was said, or after a step of the task."""
        if self.is_over or not self._rules:
            return
        now_s, before = self._now(), self._mark()
        try:
            for rule in self._rules:
                if not rule.look(now_s):
                    self._break(rule, now_s, after)
                    return
        except Exception as error:  # noqa: BLE001 -- must not unwind through trio's loop
            self._fail(error)
            return
        if self._mark() != before:
            names = ", ".join(repr(rule.name) for rule in self._rules)
            self._fail(
                RuntimeError(f"a predicate drew or noted something, and may only look: {names}")
            )
        if self._has_deadlines:
            self._rules = [rule for rule in self._rules if not rule.is_over]
            self.due_s = min((rule.due_s for rule in self._rules), default=math.inf)

    def _break(self, rule: Rule, now_s: float, after: Task | str) -> None:
        if rule.is_always:
            if not isinstance(after, str):
                after = f"a step of {host_of(after)} {task_name(after)}"
            text = f"it does not hold at {now_s:g} s\nafter {after}"
        elif rule.when is None:
            text = f"it did not come to hold by {rule.due_s:g} s"
        else:
            since_s = rule.due_s - rule.within_s
            text = f"what began at {since_s:g} s did not lead to it by {rule.due_s:g} s"
        self._fail(Violation(rule.name, text))

    def undecided(self, ended_s: float) -> Iterator[str]:
        """A sentence about each rule whose deadline lies after the end of the run."""
        for rule in self._rules:
            if rule.due_s != math.inf:
                yield (
                    f'the rule "{rule.name}" was not decided: the run ended at {ended_s:g} s, and'
                    f" it has until {rule.due_s:g} s"
                )

    @override
    def after_task_step(self, task: Task) -> None:
        self.look(task)
