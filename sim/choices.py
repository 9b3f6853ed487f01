"""Every decision of a simulated run goes through one object: `below(n, label)`.

0 is always the dullest answer (no tear, no jitter, creation order), so a shrinker that lowers
numbers removes deviations. Two sources live here: a seed, and a list to replay. All of them record
what they answered; seed and record together replay the run.

What this module does not do: decide what is worth deciding. Callers name each decision with a
label, and draw bulk randomness (a handler's dice, a whole permutation) from `stream`, because a
seed is no decision: enumerating its 2**31 values would explore nothing.
Read next: `world.py`, which owns the choices of one run.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Choice", "Choices", "ReplayChoices", "SeedChoices"]


class Choice(NamedTuple):
    """One answered question: `value` out of `range(n)`."""

    label: str
    n: int
    value: int


class Choices:
    """Where decisions come from; subclasses say how one is picked."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.record: list[Choice] = []

    def below(self, n: int, label: str) -> int:
        """An integer in `range(n)`, recorded under `label`; with one answer only, unrecorded."""
        if n <= 1:
            return 0
        value = self._pick(n)
        self.record.append(Choice(label, n, value))
        return value

    def chance(self, one_in: int, label: str) -> bool:
        """True about once in `one_in`; False is the dull answer. Never true if `one_in` < 2."""
        return self.below(one_in, label) == 1

    def stream(self, name: str) -> random.Random:
        """A generator of its own for `name`, derived from the seed alone and not recorded."""
        # A text seed is hashed with SHA-512, so it does not depend on PYTHONHASHSEED.
        return random.Random(f"{self.seed}/{name}")

    @property
    def values(self) -> list[int]:
        """What was answered so far, ready for `ReplayChoices`."""
        return [choice.value for choice in self.record]

    def _pick(self, n: int) -> int:  # noqa: ARG002 -- the subclasses' parameter
        return 0


class SeedChoices(Choices):
    """Random answers from one seed."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._rng = self.stream("choices")

    def _pick(self, n: int) -> int:
        return self._rng.randrange(n)


class ReplayChoices(Choices):
    """Answers from a list, each taken modulo the number of answers; past its end all are dull.

    `seed` must be the recorded run's for an exact replay: it feeds `stream`.
    """

    def __init__(self, values: Iterable[int], seed: int = 0) -> None:
        super().__init__(seed)
        self._values = list(values)
        self._position = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether the run asked more questions than the list answers."""
        return self._position > len(self._values)

    def _pick(self, n: int) -> int:
        position = self._position
        self._position += 1
        return self._values[position] % n if position < len(self._values) else 0
