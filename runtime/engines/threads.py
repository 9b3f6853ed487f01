"""How many threads a step of a model has, and the numeric libraries may start.

`threads_of_step` decides the former from what `count_cores` and `busy_cores` read of the system.
Call `limit_threads` before numpy is imported, in the worker's entry point: OpenBLAS reads its
variable once, when it is loaded, and two engines that spin on the same cores are far slower than
two that use one thread each. This module imports nothing but the standard library.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

BUSY_SAMPLE_S: Final = 0.5
_IDLE_FIELDS: Final = slice(3, 5)
"""Of a line of /proc/stat: idle, and idle with a disk's answer outstanding."""

THREAD_VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
)


def limit_threads(count: int = 1) -> bool:
    """Let the numeric libraries of this process and its children use `count` threads each.

    A variable that the operator has set already stays. False says that numpy was imported before,
    so that the limit holds for children only.
    """
    if count < 1:
        raise ValueError(f"at least one thread is needed, not {count}")
    for name in THREAD_VARIABLES:
        os.environ.setdefault(name, str(count))
    return "numpy" not in sys.modules


class Cores(NamedTuple):
    """The processor cores of this process."""

    scheduled: int
    """Those that the system may run it on."""
    granted: int
    """As many as its container pays for."""

    @property
    def usable(self) -> int:
        """At least 1. Threads that spin beyond a container's quota are stopped for most of each period."""
        return max(1, min(self.scheduled, self.granted))


def count_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> Cores:
    """The cores of this process, by its affinity and by the quota of its control group."""
    scheduled = granted = len(os.sched_getaffinity(0))
    try:
        budget, period = quota.read_text("ascii").split()
        granted = int(budget) // int(period)
    except (OSError, ValueError):
        pass  # No cgroup of version 2, or no bound ("max").
    return Cores(scheduled, granted)


def busy_cores(
    stat: Path = Path("/proc/stat"),
    sleep: Callable[[float], object] = time.sleep,  # noqa: TID251 -- no engine is in the simulator
) -> float:
    """How many of the scheduled cores are in use, over `BUSY_SAMPLE_S`; blocks as long.

    The load average is no measure of it: it follows within a minute, and counts what waits for a
    disk. 0 where the system does not say.
    """
    first = _ticks(stat)
    sleep(BUSY_SAMPLE_S)
    then = _ticks(stat)
    busy = 0.0
    for name, (idle, total) in then.items():
        idle_before, total_before = first.get(name, (idle, total))
        if total > total_before:
            busy += 1 - (idle - idle_before) / (total - total_before)
    return busy


def _ticks(stat: Path) -> dict[str, tuple[int, int]]:
    """Of each scheduled core: the time it was idle, and all its time."""
    found: dict[str, tuple[int, int]] = {}
    wanted = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    try:
        lines = stat.read_text("ascii").splitlines()
    except OSError:
        return found
    for line in lines:
        name, *fields = line.split()
        if name in wanted:
            # The last two are guests', which user and nice time have counted already.
            ticks = [int(each) for each in fields[:8]]
            found[name] = sum(ticks[_IDLE_FIELDS]), sum(ticks)
    return found


def threads_of_step(cores: Cores, *, busy: float, sharing: int) -> int:
    """Threads of one step for each of `sharing` engines that start now, while `busy` cores are in use.

    Threads of llama.cpp wait for each other at hundreds of places of a step, by spinning: if one of
    them has no core, all wait until the system lets it run. Beside one busy process on two cores two
    threads gave a sixth of the tokens of one, while a core too few costs its own share only. So a
    core counts that is free at least half of the time, and of those no more than the quota pays for.
    """
    free = int(cores.scheduled - busy + 0.5)
    return max(1, min(free, cores.granted) // max(1, sharing))
