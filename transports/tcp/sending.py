"""Send bytes, and give way to other tasks only if the socket makes us wait.

trio's own sends end in a checkpoint even when the kernel took everything at once: another pass of
the loop for every item of a stream. A writer that waits for something after each send needs none.
Only trio's public functions are used, so simulated sockets are served alike.
"""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from typing import Any, Final, Generic, TypeVar

import outcome
import trio

T = TypeVar("T")

_CHECKPOINT: Final[object] = trio.lowlevel.cancel_shielded_checkpoint().send(None)  # noqa: ASYNC105 -- asked, not awaited
"""What trio's loop is told by a task that gives way without waiting for anything. Should it one day
be told something new each time, `Promptly` only stops saving anything."""


class Promptly(Generic[T]):
    """Awaits `work`, but answers its shielded checkpoints on the spot instead of giving way.

    It still raises `trio.Cancelled` where `work` would, and waits where `work` has to. Whoever
    awaits it in a loop must wait for something else in every turn, or nobody else will ever run.
    """

    __slots__ = ("_work",)

    def __init__(self, work: Awaitable[T]) -> None:
        self._work = work

    def __await__(self) -> Generator[Any, Any, T]:
        work = self._work.__await__()
        try:
            trap = work.send(None)
            while True:
                # The answer is what trio's loop would give in its next pass. Cancellation comes in
                # answers, too, so nothing is ever thrown in here.
                trap = work.send(outcome.Value(None) if trap is _CHECKPOINT else (yield trap))
        except StopIteration as done:
            result: T = done.value
            return result
