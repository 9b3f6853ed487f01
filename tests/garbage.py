"""What is left for Python's collector, which a process that serves calls seldom."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[Callable[[type], list[object]]]:
    """Nothing is collected inside. Yields what tells those of a kind that were made there and are there still."""
    gc.collect()
    gc.freeze()  # what other tests have left in this process; it stays out, as what was collected does
    gc.disable()
    try:
        yield lambda kind: [each for each in gc.get_objects() if isinstance(each, kind)]
    finally:
        gc.enable()
