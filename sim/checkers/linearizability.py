"""Linearizability: operations look as if each happened at one instant between its call and its return.

The search is Wing and Gong's ("Testing and Verifying Concurrent Objects", 1993) with Lowe's memory of
what was tried ("Testing for Linearizability", 2017): try every operation that may come next, undo it
if no order of the others follows, and never try the same set of operations from the same state
twice. Objects of different keys are judged one by one, which is the same (Herlihy and Wing: the
property is local). It is bounded, since the problem is hard in general.

What this module does not do: weaker rules (sequential, causal), or several objects in one operation.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import Any, Final

import attrs
from typing_extensions import override

from ..core.checker import Checker
from .models import Specification, register

TRIES_MAX: Final = 200_000
"""How many steps the search takes for one key before it gives up: about a second."""
LISTED_MAX: Final = 12
BAR_MAX: Final = 48
"""How many characters wide the timeline of a failing history is."""


@attrs.define(eq=False)
class Operation:
    """One call, and what came of it."""

    client: str
    name: str
    arguments: tuple[Any, ...]
    called: int
    returned: float = math.inf
    """Its place among all calls and returns; infinite while it has not returned."""
    result: Any = None

    @property
    def words(self) -> str:
        """What was called, without its end."""
        return f"{self.name}({', '.join(repr(argument) for argument in self.arguments)})"

    def __str__(self) -> str:
        end = "no return" if self.returned == math.inf else repr(self.result)
        return f"{self.client} {self.words} → {end}"


class Linearizability(Checker):
    """Judges the operations that clients report, at the end of the run.

        history = world.watch(Linearizability(register, initial=0))
        read = history.call("reader1", "read")
        history.ends(read, await ask())

    An operation that never returned (its client was killed, or does not know) may have happened at
    any later time, or not at all. One that certainly did not happen is `drop`ped.
    """

    rule = "linearizability"

    def __init__(
        self, specification: Specification = register, *, initial: Hashable = None
    ) -> None:
        self._specification, self._initial = specification, initial
        self._operations: dict[Hashable, list[Operation]] = {}
        self._clock = 0
        self.undecided: list[Hashable] = []
        """Keys whose operations were too many, or too concurrent, to be judged."""

    def call(self, client: str, name: str, *arguments: Hashable, key: Hashable = None) -> Operation:
        """A client calls an operation on the object `key`, now."""
        self._clock += 1
        operation = Operation(client, name, arguments, self._clock)
        self._operations.setdefault(key, []).append(operation)
        self.say("operation", client=client, called=self._clock, text=operation.words)
        return operation

    def ends(self, operation: Operation, result: Any = None) -> None:
        """The operation returns `result` now."""
        self._clock += 1
        operation.returned, operation.result = self._clock, result
        self.say("operation.end", called=operation.called, text=repr(result))

    def drop(self, operation: Operation) -> None:
        """It is known that the operation did not happen, and never will."""
        for operations in self._operations.values():
            if operation in operations:
                operations.remove(operation)

    @override
    def hints(self) -> Iterator[str]:
        calls = [each for operations in self._operations.values() for each in operations]
        if calls and all(each.returned == math.inf for each in calls):
            yield "not one operation returned, and clients called some: nothing was there to be judged"

        if self.undecided:
            keys = ", ".join(map(repr, self.undecided[:LISTED_MAX]))
            yield (
                f"the operations of {keys} were too many, or too many at once, to be judged: let"
                " fewer clients call, for a shorter time, or give each object a key of its own"
            )

    @override
    def at_end(self) -> None:
        for key, operations in self._operations.items():
            is_explained, longest = _explained(operations, self._specification, self._initial)
            if is_explained is None:
                self.undecided.append(key)
            elif not is_explained:
                self.violate(_told(key, operations, longest))


def _explained(
    operations: list[Operation], specification: Specification, initial: Hashable
) -> tuple[bool | None, list[Operation]]:
    """Whether some order explains them (None: not found out), and the longest that was tried."""
    finished = sum(1 << n for n, each in enumerate(operations) if each.returned != math.inf)
    order: list[int] = []
    longest: list[int] = []
    # Of each step so far: the operations done, the state, and those that may still come next.
    stack = [(0, initial, _next(operations, 0))]
    seen: set[tuple[int, Hashable]] = {(0, initial)}
    for _ in range(TRIES_MAX):
        done, state, candidates = stack[-1]
        if done & finished == finished:
            return True, []
        if not candidates:
            stack.pop()
            if not stack:
                return False, [operations[n] for n in longest]
            order.pop()
            continue
        number = candidates.pop()
        each = operations[number]
        after, result = specification(state, each.name, *each.arguments)
        place = done | 1 << number, after
        if (each.returned != math.inf and result != each.result) or place in seen:
            continue
        seen.add(place)
        order.append(number)
        if len(order) > len(longest):
            longest = list(order)
        stack.append((*place, _next(operations, place[0])))
    return None, []


def _next(operations: list[Operation], done: int) -> list[int]:
    """Those not done that were called before any other of them returned; the earliest last."""
    left = [n for n in range(len(operations)) if not done >> n & 1]
    first = min((operations[n].returned for n in left), default=math.inf)
    return [n for n in reversed(left) if operations[n].called < first]


def _told(key: Hashable, operations: list[Operation], longest: list[Operation]) -> str:
    where = "" if key is None else f" on {key!r}"
    left = [each for each in operations if each not in longest and each.returned != math.inf]
    return "\n".join(
        [
            f"no order of the operations{where} explains what they returned",
            "at best, in this order:",
            *(f"  {each}" for each in longest[-LISTED_MAX:]),
            "and then none of:",
            *(f"  {each}" for each in left[:LISTED_MAX]),
            "as they came, time from left to right:",
            *_timeline([*longest[-LISTED_MAX:], *left[:LISTED_MAX]]),
        ]
    )


def _timeline(operations: list[Operation]) -> Iterator[str]:
    """A bar for each operation from its call to its return; one without a return has no right end."""
    ends = (end for each in operations for end in (each.called, each.returned))
    # Only the order of calls and returns is known, so each is one step.
    places = {end: place for place, end in enumerate(sorted({*ends} - {math.inf}))}
    width = min(BAR_MAX, len(places))

    def column(end: float) -> int:
        return places[end] * (width - 1) // max(1, len(places) - 1)

    for each in sorted(operations, key=lambda each: each.called):
        start = column(each.called)
        if each.returned == math.inf:
            bar = "[" + "-" * (width - 1 - start)
        else:
            bar = "[" + "-" * (column(each.returned) - start - 1) + "]"
        yield f"  {' ' * start}{bar:{width - start + 1}}{each}"
