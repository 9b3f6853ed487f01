"""Threads of a run: trio's worker threads, simulated; and what would wait for a thread for ever.

A function that is given to `trio.to_thread.run_sync` runs at once, in a thread of its own for which the loop
waits, and its answer comes at a time that the run draws. All the rest is trio's own: limiter, abandonment,
context. So a thread's effects are never torn, and the hosts see them before its caller does. `time.sleep` in
it makes the answer as much later; `trio.from_thread.run` lets the loop go on until the call is answered.

What this module does not do: run two functions side by side (a function that waits for another, or for a
task that it does not call, is an `Escape`), or threads that the code starts for itself (`guard.py` refuses them).
"""

from __future__ import annotations

import _thread
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import outcome
import trio
from trio import _threads as trio_threads
from trio._core._run import GLOBAL_RUN_CONTEXT

from .ambient import Patch, Refuse

Later = Callable[[float, Callable[[], object]], None]
"""Makes a call, some seconds from now or more."""

LISTEN_S = 0.05

_running: Function | None = None
"""The function for which the loop waits."""


def running_frame() -> FrameType | None:
    """Where the function is for which the loop waits; None if there is none."""
    return None if _running is None else sys._current_frames().get(_running.ident)  # noqa: SLF001


def interrupt(error: type[BaseException]) -> bool:
    """Raise this in the function for which the loop waits, as soon as it takes a step; False if there is none."""
    import ctypes  # noqa: PLC0415 -- a tenth of the simulator's import

    if _running is not None:
        set_error = ctypes.pythonapi.PyThreadState_SetAsyncExc
        set_error(ctypes.c_ulong(_running.ident), ctypes.py_object(error))
    return _running is not None


class Function:
    """A function in a real thread, which takes its turns only while whoever gave it one waits."""

    def __init__(self, fn: Callable[[], Any], on_end: Callable[[Function], object]) -> None:
        self._fn, self._on_end = fn, on_end
        self._turn, self._back = _thread.allocate_lock(), _thread.allocate_lock()
        self._turn.acquire()
        self._back.acquire()
        self.ident = 0
        self.slept_s = 0.0
        self.result: outcome.Outcome[Any] | None = None
        self.loop: dict[str, Any] = {}
        """What trio knows of the loop in its own thread."""

    def main(self) -> None:
        """What the thread does."""
        self._turn.acquire()
        if trace := threading.gettrace():
            sys.settrace(trace)
        self.result = outcome.capture(self._fn)
        self._back.release()

    def go_on(self) -> None:
        """Give it a turn, until it waits for the loop or has ended."""
        global _running
        before, _running = _running, self
        self.loop = dict(vars(GLOBAL_RUN_CONTEXT))
        self._turn.release()
        # Who waits without a limit hears of no signal that another thread was given.
        while not self._back.acquire(timeout=LISTEN_S):
            pass
        _running = before
        if self.result is not None:
            self._on_end(self)

    def wait(self) -> None:
        """In its thread: let the loop go on, until it is given another turn."""
        self._back.release()
        self._turn.acquire()


class _Answer:
    """In the place of the queue by which trio answers a call from a thread: the thread goes on at once."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self.result: outcome.Outcome[Any] = outcome.Error(trio.RunFinishedError("the run is over"))

    def put_nowait(self, result: outcome.Outcome[Any]) -> None:
        self.result = result
        self._function.go_on()


class _AtADrawnTime:
    """In the place of trio's token: a call into the loop takes its time."""

    def __init__(self, later: Later) -> None:
        self._later = later

    def run_sync_soon(self, call: Callable[[], object]) -> None:
        self._later(0, call)


class Threads:
    """The stand-ins of one run; `later` draws when an answer comes."""

    def __init__(self, later: Later, refuse: Refuse) -> None:
        self._later, self._refuse = later, refuse
        self._ident = threading.get_ident()
        self._start_real = _thread.start_new_thread
        self._waiting: dict[Function, None] = {}
        """Those that wait for an answer of the loop."""
        self._is_over = False

    def stand_ins(self) -> list[Patch]:
        """Everything to be replaced: whose attribute, which, by what."""
        return [
            (trio_threads, "start_thread_soon", self._start),
            (trio.lowlevel, "start_thread_soon", self._start),
            (trio_threads, "_send_message_to_trio", self._from_thread()),
            (threading.Condition, "wait", self._wait()),
            (time, "sleep", self._sleep()),
        ]

    def close(self) -> None:
        """The run is over: let those that were abandoned while they waited come to their end."""
        self._is_over = True
        for function in tuple(self._waiting):
            function.go_on()

    def _start(
        self, fn: Callable[[], Any], deliver: Callable[[Any], object], _name: str | None = None
    ) -> None:
        function = Function(fn, lambda ended: self._answer(ended, deliver))
        function.ident = self._start_real(function.main, ())
        function.go_on()

    def _answer(self, ended: Function, deliver: Callable[[Any], object]) -> None:
        if not self._is_over:
            self._later(ended.slept_s, lambda: deliver(ended.result))

    def _from_thread(self) -> Callable[..., Any]:
        real = trio_threads._send_message_to_trio  # noqa: SLF001 -- trio's

        def send(token: Any, message: Any) -> Any:
            function = _running
            if function is None or function.ident != threading.get_ident():
                return real(token, message)
            if self._is_over:
                raise trio.RunFinishedError("the run is over")
            if isinstance(message, trio_threads.Run):
                return self._called(function, token, message)
            names = vars(GLOBAL_RUN_CONTEXT)
            names.update(function.loop)
            try:
                return message.unprotected_fn()
            finally:
                names.clear()

        return send

    def _called(self, function: Function, token: Any, message: Any) -> Any:
        """The answer of the task that the message makes, or asks; the loop goes on meanwhile."""
        answer = _Answer(function)
        object.__setattr__(message, "queue", answer)
        entry: Any = _AtADrawnTime(self._later)
        if token is not None or trio_threads.PARENT_TASK_DATA.abandon_on_cancel:
            message.run_in_system_nursery(entry)
        else:
            message.run_in_host_task(entry)
        self._waiting[function] = None
        function.wait()
        del self._waiting[function]
        return answer.result.unwrap()

    def _wait(self) -> Callable[..., Any]:
        real = threading.Condition.wait
        refused = self._refuse("threading.Condition.wait")

        def wait(condition: threading.Condition, timeout: float | None = None) -> Any:
            # Threads that were there before the run go on.
            ours = (self._ident, _running.ident if _running else 0)
            is_ours = threading.get_ident() in ours
            return refused() if is_ours else real(condition, timeout)

        return wait

    def _sleep(self) -> Callable[..., Any]:
        refused = self._refuse("time.sleep")

        def sleep(seconds: float) -> Any:
            if _running is None:
                return refused()
            _running.slept_s += seconds
            return None

        return sleep


def sleep_in_thread(seconds: float) -> None:
    """Make the answer of the thread that runs so much later."""
    time.sleep(seconds)  # noqa: TID251 -- what stands in its place during a run
