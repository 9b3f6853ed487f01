"""How long a generator keeps everybody else waiting: it computes, or waits, without `await`.

Only its own steps are measured, from one `await` to the next, so the engine that is named is the one
that did it. What its child tasks do is not: the histogram of the loop's lag shows that. A step that
does not end is told by a thread, for nothing else runs then; one that holds the interpreter's lock,
too, is told by nobody.
"""

from __future__ import annotations

import logging
import threading
import time
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import Any, Final, NamedTuple, TypeVar

from ...errors import EngineError
from ...logs.notices import Throttle
from .telling import told

_log = logging.getLogger("trinamo.engines")
T = TypeVar("T")
STALL_S: Final = 0.25
"""Of one step. Leases, streams and HTTP clients of the process stand still as long."""
QUIET_S: Final = 30.0
"""After a warning, how long further ones are only counted."""
ENDLESS_S: Final = 5.0
"""Of one step that has not ended: half of what a lease lasts by default."""
LOOK_S: Final = 1.0
"""Between two looks of the thread."""


class _Step(NamedTuple):
    began: float
    items: AsyncGenerator[Any, None]
    context: Context
    """Of the request: its id is in the log's lines."""


class Stalls:
    """Measures the steps of one engine's generators, and warns of those that are too long.

    `endless_s` and `look_s` are seconds, of a step that has not ended and between two looks for one.
    """

    def __init__(
        self, engine: str, thread: str, *, endless_s: float = ENDLESS_S, look_s: float = LOOK_S
    ) -> None:
        self._engine = engine
        self._endless_s = endless_s
        self._look_s = look_s
        self._step: _Step | None = None
        """That runs now."""
        self._thread = thread
        """How its loop computes elsewhere."""
        self._throttle = Throttle(QUIET_S)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Have a thread tell, once, of each step that does not end."""
        left = threading.Event()
        thread = threading.Thread(
            target=self._watch, args=(left,), name=f"stalls of {self._engine}", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            left.set()
            thread.join()

    def _watch(self, left: threading.Event) -> None:
        last: _Step | None = None
        while not left.wait(self._look_s):
            step = self._step
            if step is None or step is last:
                continue
            held_s = time.perf_counter() - step.began
            if held_s >= self._endless_s:
                last = step
                step.context.copy().run(self._tell, held_s, step.items)

    def _tell(self, held_s: float, items: AsyncGenerator[Any, None]) -> None:
        _log.error(
            "engine %s has held the event loop for %.0f s and still does%s; this process answers"
            " nobody, and is taken for dead when its lease runs out: compute in a thread (await %s(...))",
            *(self._engine, held_s, _place_of(items), self._thread),
        )

    def next_of(self, items: AsyncGenerator[Any, None]) -> Awaitable[Any]:
        """`anext(items)`, measured.

        What would end the process, `SystemExit`, is an `EngineError`: it would end all answers.
        """
        return self._measured(anext(items), items)

    @types.coroutine
    def _measured(
        self, step: Awaitable[T], items: AsyncGenerator[Any, None]
    ) -> Generator[Any, Any, T]:
        awaited = step.__await__()
        resume: Callable[[Any], Any] = awaited.send
        value: Any = None
        context = copy_context()
        while True:
            began = time.perf_counter()
            self._step = _Step(began, items, context)
            try:
                waits_for = resume(value)
            except StopIteration as end:
                returned: T = end.value
                return returned
            except SystemExit as error:
                raise EngineError(f"engine {self._engine} raised {told(error)}") from error
            finally:
                self._step = None
                took_s = time.perf_counter() - began
                if took_s >= STALL_S:
                    self._warn(took_s, items)
            try:
                resume, value = awaited.send, (yield waits_for)
            except BaseException as error:  # noqa: BLE001 -- whatever it is, it is the generator's
                resume, value = awaited.throw, error

    def _warn(self, took_s: float, items: AsyncGenerator[Any, None]) -> None:
        untold = self._throttle.admit("", time.perf_counter())
        if untold is None:
            return
        more = f", and {untold} times before" if untold else ""
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
