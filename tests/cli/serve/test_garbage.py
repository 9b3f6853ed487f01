"""A serving process looks for garbage seldom, but it does."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, weakref
from trinamo.cli.serve.garbage import OBJECTS_MAX, collect_seldom

class Cycle:
    def __init__(self):
        self.itself = self

collect_seldom()
assert gc.isenabled() and gc.get_freeze_count() > 0
cycles = [weakref.ref(Cycle()) for _ in range(3 * OBJECTS_MAX)]
print(sum(cycle() is not None for cycle in cycles) <= OBJECTS_MAX)
"""


def test_cycles_are_found_once_there_are_many() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout == "True\n"
