"""How often a serving process looks for garbage in cycles.

Almost all that a request makes goes with its last reference. Python's collector looks for the rest
each time 700 objects more were made than freed, which took an eighth of a frontend's time under load
(64 unary requests at once, `bench/bench_http.py`, seven pairs). What was made while the process
started is not garbage, and is not looked at.
"""

from __future__ import annotations

import gc
from typing import Final

OBJECTS_MAX: Final = 20_000
"""So many new objects may be alive before cycles among them are looked for: some megabytes."""


def collect_seldom() -> None:
    """Leave out what is alive now, and look at the rest after every `OBJECTS_MAX` objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(OBJECTS_MAX, 10, 10)
