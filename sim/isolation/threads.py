"""Threads of a run: trio's worker threads, simulated; and what would wait for a thread for ever.

A function that is given to `trio.to_thread.run_sync` runs at once, while nothing else does, and its
answer comes at a time that the run draws. All the rest is trio's own: limiter, abandonment, context.
So a thread's effects are never torn, and the hosts see them before its caller does. `time.sleep` in it makes
the answer as much later.

What this module does not do: run two functions side by side (a function that waits for another, or
for a task, is an `Escape`), or threads that the code starts for itself (`guard.py` refuses them).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import outcome
import trio
from trio import _threads as trio_threads
from trio._core import _run as trio_run
from trio._core._run import GLOBAL_RUN_CONTEXT

from .ambient import Patch, Refuse

Later = Callable[[float, Callable[[], object]], None]
"""Makes a call, some seconds from now or more."""


class Threads:
    """The stand-ins of one run; `later` draws when an answer comes."""

    def __init__(self, later: Later, refuse: Refuse) -> None:
        self._later, self._refuse = later, refuse
        self._ident = threading.get_ident()
        self._slept_s: float | None = None
        """How long the function that is running has slept; None outside of functions of threads."""
        self._hidden: dict[str, Any] = {}

    def stand_ins(self) -> list[Patch]:
        """Everything to be replaced: whose attribute, which, by what."""
        return [
            (trio_threads, "start_thread_soon", self._start),
            (trio.lowlevel, "start_thread_soon", self._start),
            (trio_threads, "_send_message_to_trio", self._from_thread()),
            (threading.Condition, "wait", self._wait()),
            (time, "sleep", self._sleep()),
        ]

    def _start(
        self, fn: Callable[[], Any], deliver: Callable[[Any], object], _name: str | None = None
    ) -> None:
        before, self._slept_s = self._slept_s, 0.0
        with self._outside_trio():
            result = outcome.capture(fn)
        slept_s, self._slept_s = self._slept_s, before
        self._later(slept_s, lambda: deliver(result))

    @contextmanager
    def _outside_trio(self) -> Iterator[None]:
        """As in another thread: there is no loop, and no task is running."""
        names, library = vars(GLOBAL_RUN_CONTEXT), vars(trio_run)["sniffio_library"]
        kept, name = dict(names), library.name
        self._hidden, before = kept, self._hidden
        names.clear()
        library.name = None
        try:
            yield
        finally:
            names.clear()
            names.update(kept)
            library.name = name
            self._hidden = before

    def _from_thread(self) -> Callable[..., Any]:
        real, refused = trio_threads._send_message_to_trio, self._refuse("trio.from_thread.run")  # noqa: SLF001 -- trio's

        def send(token: Any, message: Any) -> Any:
            if not self._hidden:
                return real(token, message)
            if isinstance(message, trio_threads.Run):
                return refused()
            names = vars(GLOBAL_RUN_CONTEXT)
            names.update(self._hidden)
            try:
                return message.unprotected_fn()
            finally:
                names.clear()

        return send

    def _wait(self) -> Callable[..., Any]:
        real = threading.Condition.wait
        refused = self._refuse("threading.Condition.wait")

        def wait(condition: threading.Condition, timeout: float | None = None) -> Any:
            # Threads that were there before the run go on.
            is_ours = threading.get_ident() == self._ident
            return refused() if is_ours else real(condition, timeout)

        return wait

    def _sleep(self) -> Callable[..., Any]:
        refused = self._refuse("time.sleep")

        def sleep(seconds: float) -> Any:
            if self._slept_s is None:
                return refused()
            self._slept_s += seconds
            return None

        return sleep


def sleep_in_thread(seconds: float) -> None:
    """Make the answer of the thread that runs so much later."""
    time.sleep(seconds)  # noqa: TID251 -- what stands in its place during a run
