"""The dice of real life: unguessable, of every width, never the same twice."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trinamo.runtime.env import RealEnv


@pytest.mark.parametrize("bits", [1, 7, 32, 63, 64, 65, 128, 200])
def test_every_width_is_drawn_from_end_to_end(bits: int) -> None:
    rng = RealEnv().rng
    drawn = [rng.getrandbits(bits) for _ in range(256)]
    assert all(0 <= each < 1 << bits for each in drawn)
    every, none = 0, (1 << bits) - 1
    for each in drawn:
        every, none = every | each, none & each
    assert (every, none) == ((1 << bits) - 1, 0)


def test_nothing_is_drawn_twice() -> None:
    rng = RealEnv().rng
    drawn = [rng.getrandbits(64) for _ in range(2000)]
    assert len(set(drawn)) == len(drawn)


def test_a_fork_does_not_repeat_what_its_parent_draws() -> None:
    """What the child draws is not in what both were born with, nor in what the parent draws."""
    program = """
import os
from trinamo.runtime.env import RealEnv
rng = RealEnv().rng
rng.getrandbits(64)
child = os.fork()
for _ in range(100):
    os.write(1, b"%d " % rng.getrandbits(128))
if child:
    os.waitpid(child, 0)
"""
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    drawn = said.stdout.split()
    assert len(set(drawn)) == len(drawn) == 200
