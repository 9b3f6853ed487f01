"""Ends a step that never yields, as `while True: pass` in the code under test, which would hang the process.

trio takes one step at a time, so whoever does not await holds all the others. A timer of the
process's own time looks whether the run has gone on since it last looked, and raises where the code
is, if it has not for long. A look leaves no trace, so real time decides nothing in a run that ends.

What this module does not do: watch a run outside of the main thread, which hears no signals, on a
system without such a timer, or where somebody else uses it.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ..errors import EndlessStep
from .escapes import call_site
from .threads import interrupt, running_frame

LOOKS = 4
"""How often the run is found where it was before its step is taken for endless."""
AGAIN_S = 0.01
ADVICE = (
    "await in the loop (trio.sleep, a checkpoint); the clock of a run stands still while a task runs."
    " World(step_cpu_s_max=…) allows more"
)


@contextmanager
def watched(
    cpu_s_max: float,
    progress: Callable[[], tuple[object, ...] | None],
    on_endless: Callable[[EndlessStep], None],
) -> Iterator[None]:
    """Raise an `EndlessStep` where `progress()` stays equal for `cpu_s_max` seconds of the processor.

    It begins with whose step it is; None is never too slow. `on_endless` is told first. The error is raised
    again and again until there is progress, so no handler in a loop keeps it. Entered inside trio's loop.
    """
    if not _can_watch(cpu_s_max):
        yield
        return
    look_s = cpu_s_max / LOOKS
    seen: tuple[object, ...] | None = None
    error: EndlessStep | None = None
    looks = 0

    def look(_signal: int, frame: FrameType | None) -> None:
        nonlocal seen, looks, error
        now = progress()
        if now is None or now != seen:
            seen, looks = now, 0
            return
        looks += 1
        if looks >= LOOKS:
            signal.setitimer(signal.ITIMER_VIRTUAL, min(AGAIN_S, look_s), look_s)
            if error is None:
                error = EndlessStep(
                    f"{now[0]} took {cpu_s_max:g} s of processor time in one step and did not end it"
                    f"{call_site(running_frame() or frame)}\n  instead: {ADVICE}"
                )
                on_endless(error)
            if not interrupt(EndlessStep):
                raise error

    # A signal would wake trio's loop, which is a step of a task of trio's own. trio puts back at its end what
    # was there before it.
    signal.set_wakeup_fd(-1)
    before = signal.signal(signal.SIGVTALRM, look)
    signal.setitimer(signal.ITIMER_VIRTUAL, look_s, look_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _can_watch(cpu_s_max: float) -> bool:
    return (
        cpu_s_max < math.inf
        and hasattr(signal, "setitimer")
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGVTALRM) is signal.SIG_DFL
    )
