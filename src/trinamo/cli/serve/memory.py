"""How a serving process treats its memory: what is garbage, and what goes back to the kernel.

Almost all that a request makes goes with its last reference. Python's collector looks for the rest
each time 700 objects more were made than freed, which took an eighth of a frontend's time under load
(64 unary requests at once, `bench/bench_http.py`, seven pairs).
"""

from __future__ import annotations

import ctypes
import gc
from typing import Final

OBJECTS_MAX: Final = 20_000
"""So many new objects may be alive before cycles among them are looked for: some megabytes."""
MAPPED_BYTES_MIN: Final = 256 << 10
_M_MMAP_THRESHOLD: Final = -3  # of glibc's malloc.h


def settle_memory(*, maps_bodies: bool) -> None:
    """Call it once the process has started.

    What is alive then always will be: the collector leaves it out, and looks at the rest after every
    `OBJECTS_MAX` objects. A full collection would else walk every class and module, and hold all
    streams up for tens of milliseconds. What only the start needed goes back: 5 MB a worker.

    With `maps_bodies` long bodies leave with their requests: glibc raises the size from which it maps
    memory apart as soon as a long body is freed, and the next ones then stay in its heap. A burst of
    64 bodies of 4 MB left 200 MB behind, for good. A worker's buffers are used again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(OBJECTS_MAX, 10, 10)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        if maps_bodies:
            libc.mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES_MIN)
        libc.malloc_trim(0)
