"""By when a caller wants its answer: a bound for one call, and for the waits of one request.

The deadline itself is the context's (`Context.limit`), travels in the envelope, and ends the handler
at the worker. Here is the caller's own end of it, for a worker that has fallen silent.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

import attrs
import trio

from ..context import Context, Reason
from ..errors import DeadlineError

T = TypeVar("T")


@attrs.frozen
class Bound:
    """How long one call may take: seconds from its start, a time on trio's clock, or both."""

    timeout_s: float | None = None
    deadline: float = math.inf

    def limit(self, context: Context) -> Context:
        """`context` if there is no bound; else a child of it that ends in time. Close the child."""
        deadline = self.deadline
        if self.timeout_s is not None:
            deadline = min(deadline, trio.current_time() + self.timeout_s)
        if deadline == math.inf:
            return context
        child = Context(context.id, parent=context)
        child.limit(deadline)
        return child


async def within(context: Context, wait: Callable[[], Awaitable[T]]) -> T:
    """What `wait` returns; once the deadline is over kill the request and raise `DeadlineError`."""
    if context.deadline == math.inf:
        return await wait()
    if trio.current_time() < context.deadline:
        with trio.CancelScope(deadline=context.deadline):
            return await wait()
    context.kill(Reason.DEADLINE)
    raise DeadlineError("the request's time is up; the worker is told to end it")


def left_s(context: Context) -> float:
    """Seconds until the deadline of a request, 0 for one that has none."""
    if context.deadline == math.inf:
        return 0.0
    left = context.deadline - trio.current_time()
    if left <= 0:
        raise DeadlineError("the request's time was up before a worker had it")
    return left
