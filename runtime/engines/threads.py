"""How many threads the numeric libraries may start.

Call `limit_threads` before numpy is imported, in the worker's entry point: OpenBLAS reads its
variable once, when it is loaded, and two engines that spin on the same cores are far slower than
two that use one thread each. This module imports nothing but the standard library.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

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


def core_count(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """How many cores this process may use: as the system schedules it, and as its container pays for.

    Threads that spin beyond a container's quota are stopped for most of each period.
    """
    cores = len(os.sched_getaffinity(0))
    try:
        granted, period = quota.read_text("ascii").split()
        cores = min(cores, int(granted) // int(period))
    except (OSError, ValueError):
        pass  # No cgroup of version 2, or no bound ("max").
    return max(1, cores)
