"""The constants of the exact engine, computed with integers only.

No libm function takes part, because its last digit differs between machines and versions; numpy's
generators are not used either, because their streams may change with numpy. So the tables, and
with them every token, are the same everywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

ROTATION_SCALE = 64
"""The cosine of 0 in the rotation tables."""
SOFTMAX_SCALE = 65536
"""The weight of the largest score."""
SOFTMAX_STEPS = 512
"""The weight falls by exp(-1/32) a step and is 0 at the last."""

_FIXED_BITS = 64
_ONE = 1 << _FIXED_BITS
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_PIECE = 4096


def integers(seed: int, count: int, bound: int) -> Array:
    """`count` float64 integers from -bound to bound, a function of the arguments alone.

    SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014) at the
    counters seed + 1 … seed + count.
    """
    found = np.empty(count)
    # In pieces: temporaries as large as the weights would stay in the process's heap.
    for start in range(0, count, _PIECE):
        z = np.arange(start + 1, min(start + _PIECE, count) + 1, dtype=np.uint64)
        z += np.uint64(seed)
        z *= np.uint64(_GOLDEN_GAMMA)
        z ^= z >> np.uint64(30)
        z *= np.uint64(0xBF58476D1CE4E5B9)
        z ^= z >> np.uint64(27)
        z *= np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
        z %= np.uint64(2 * bound + 1)
        found[start : start + z.size] = z
    found -= bound
    return found


def rotations(positions: int, pairs: int) -> tuple[Array, Array]:
    """Cosines and sines, times 64 and rounded, of position / 2**pair: two [positions, pairs]."""
    cosines = np.empty((positions, pairs))
    sines = np.empty((positions, pairs))
    for pair in range(pairs):
        step_cosine, step_sine = _cosine_and_sine(_ONE >> pair)
        cosine, sine = _ONE, 0
        for position in range(positions):
            cosines[position, pair] = _rounded(cosine * ROTATION_SCALE)
            sines[position, pair] = _rounded(sine * ROTATION_SCALE)
            cosine, sine = (
                (cosine * step_cosine - sine * step_sine) >> _FIXED_BITS,
                (cosine * step_sine + sine * step_cosine) >> _FIXED_BITS,
            )
    return cosines, sines


def softmax() -> Array:
    """`round(65536 * exp(-i / 32))` for i = 0 … 511, but 0 at the last."""
    table = np.empty(SOFTMAX_STEPS)
    factor = _exponential_of_minus(_ONE // 32)
    weight = _ONE
    for index in range(SOFTMAX_STEPS):
        table[index] = _rounded(weight * SOFTMAX_SCALE)
        weight = (weight * factor) >> _FIXED_BITS
    table[-1] = 0
    return table


def _rounded(fixed: int) -> int:
    return (fixed + (_ONE >> 1)) >> _FIXED_BITS


def _cosine_and_sine(angle: int) -> tuple[int, int]:
    """Of a fixed-point angle from 0 to 1, by the Taylor series."""
    cosine = sine = 0
    term, index = _ONE, 0
    while term:
        sign = -1 if index % 4 >= 2 else 1
        if index % 2:
            sine += sign * term
        else:
            cosine += sign * term
        index += 1
        term = (term * angle >> _FIXED_BITS) // index
    return cosine, sine


def _exponential_of_minus(x: int) -> int:
    """exp(-x) of a fixed-point x from 0 to 1, by the Taylor series."""
    total, term, index = 0, _ONE, 0
    while term:
        total += -term if index % 2 else term
        index += 1
        term = (term * x >> _FIXED_BITS) // index
    return total
