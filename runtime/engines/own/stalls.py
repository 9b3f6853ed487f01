"""How long a generator keeps everybody else waiting: it computes, or waits, without `await`.

Only its own steps are measured, from one `await` to the next, so the engine that is named is the one
that did it. What its child tasks do is not: the histogram of the loop's lag shows that.
"""

from __future__ import annotations

import logging
import time
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import Any, Final, TypeVar

__all__ = ["Stalls"]

_log = logging.getLogger("trinamo.engines")
T = TypeVar("T")
STALL_S: Final = 0.25
"""Of one step. Leases, streams and HTTP clients of the process stand still as long."""
QUIET_S: Final = 30.0
"""After a warning, how long further ones are only counted."""


class Stalls:
    """Measures the steps of one engine's generators, and warns of those that are too long."""

    def __init__(self, engine: str, thread: str) -> None:
        self._engine = engine
        self._thread = thread
        """How its loop computes elsewhere."""
        self._quiet_until = 0.0
        self._untold = 0

    def next_of(self, items: AsyncGenerator[Any, None]) -> Awaitable[Any]:
        """`anext(items)`, measured."""
        return self._measured(anext(items), items)

    @types.coroutine
    def _measured(
        self, step: Awaitable[T], items: AsyncGenerator[Any, None]
    ) -> Generator[Any, Any, T]:
        awaited = step.__await__()
        resume: Callable[[Any], Any] = awaited.send
        value: Any = None
        while True:
            began = time.perf_counter()
            try:
                waits_for = resume(value)
            except StopIteration as end:
                returned: T = end.value
                return returned
            finally:
                took_s = time.perf_counter() - began
                if took_s >= STALL_S:
                    self._warn(took_s, items)
            try:
                resume, value = awaited.send, (yield waits_for)
            except BaseException as error:  # noqa: BLE001 -- whatever it is, it is the generator's
                resume, value = awaited.throw, error

    def _warn(self, took_s: float, items: AsyncGenerator[Any, None]) -> None:
        now = time.perf_counter()
        if now < self._quiet_until:
            self._untold += 1
            return
        self._quiet_until = now + QUIET_S
        more = f", and {self._untold} times before" if self._untold else ""
        self._untold = 0
        _log.warning(
            "engine %s held the event loop for %.2f s%s%s; meanwhile this process answers nobody:"
            " compute in a thread (await %s(...))",
            *(self._engine, took_s, _place_of(items), more, self._thread),
        )


def _place_of(items: AsyncGenerator[Any, None]) -> str:
    """Where a generator is, as ` (mine.py:12)`; empty if it has ended."""
    frame: types.FrameType | None = getattr(items, "ag_frame", None)
    if frame is None:
        return ""
    return f" ({frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"
