"""A serving process looks for garbage seldom, but every minute, and gives long bodies back."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, weakref
from trinamo.cli.serve.resources import OBJECTS_MAX, settle_memory

class Cycle:
    def __init__(self):
        self.itself = self

settle_memory(maps_bodies=True)
assert gc.isenabled() and gc.get_freeze_count() > 0
cycles = [weakref.ref(Cycle()) for _ in range(3 * OBJECTS_MAX)]
print(sum(cycle() is not None for cycle in cycles) <= OBJECTS_MAX)
"""


def test_cycles_are_found_once_there_are_many() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout == "True\n"


BODIES = """
import re, sys
from pathlib import Path
from trinamo.cli.serve.resources import settle_memory

def rss_mb():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10

settle_memory(maps_bodies=sys.argv[1] == "frontend")
before = rss_mb()
kept = []
for _ in range(3):
    bodies = []
    for _ in range(32):
        bodies.append(bytearray(4 << 20))
        # Something short stays behind each, as what is kept of a request does.
        kept.append(bytes(2048))
    del bodies
print(rss_mb() - before)
"""


def test_long_bodies_of_a_frontend_leave_with_their_requests() -> None:
    """Both roles settle in one place; here each has what is right for it."""
    command = [sys.executable, "-c", BODIES, "frontend"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert int(run.stdout) <= 4


HOLES = """
import re, trio, trio.testing
from pathlib import Path
from trinamo.cli.serve.resources import TEND_INTERVAL_S, memory_tended, settle_memory

def rss_mb():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10

async def main():
    settle_memory(maps_bodies=True)
    async with memory_tended():
        kept = [b"x" * (60_000 if number % 50 else 50_000) for number in range(2_000)]
        kept = kept[::50]
        before = rss_mb()
        await trio.sleep(TEND_INTERVAL_S + 1)
        print(before - rss_mb())

trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
"""


def test_a_frontend_gives_the_holes_of_its_heap_back() -> None:
    """120 MB are freed, and a piece after every 3 MB stays: glibc by itself gives the top back."""
    command = [sys.executable, "-c", HOLES]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert int(run.stdout) >= 50


FEW = """
import gc, trio, trio.testing, weakref
from trinamo.cli.serve.resources import TEND_INTERVAL_S, memory_tended, settle_memory

class Cycle:
    def __init__(self):
        self.itself = self

async def main():
    settle_memory(maps_bodies=False)
    async with memory_tended():
        old = Cycle()
        await trio.sleep(3 * TEND_INTERVAL_S)
        cycles = [weakref.ref(old), *(weakref.ref(Cycle()) for _ in range(100))]
        del old
        assert all(cycle() is not None for cycle in cycles)
        await trio.sleep(TEND_INTERVAL_S + 1)
        print(sum(cycle() is not None for cycle in cycles))

trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
"""


def test_few_cycles_are_found_after_a_minute_though_one_of_them_is_old() -> None:
    run = subprocess.run(
        [sys.executable, "-c", FEW], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout == "0\n"
