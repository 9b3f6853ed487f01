"""What a test may leave behind in its process: objects for Python's collector, and descriptors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


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


def open_descriptors() -> frozenset[tuple[int, str]]:
    """The number of each open descriptor, and what it refers to, such as `socket:[4711]`.

    Compare with `<=`: a descriptor that an earlier test left to the collector may be closed at any time,
    and a count would then differ forever.
    """
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        # That of the listing itself is closed by now.
        with suppress(OSError):
            found.add((int(each.name), str(each.readlink())))
    return frozenset(found)
