"""Every decision of a simulated run goes through one object: `below(n, label)`.

0 is always the default answer (no tear, no jitter, creation order), so a shrinker that lowers
numbers removes deviations. The sources: a seed; a list to replay, which is also how a list drawn by
Hypothesis answers (draw the list before the run, never inside it); a list whose end a seed goes on
from; a few deviations from the default run; and answers kept per label. All of them record what they
answered; seed and record together replay the run.

What this module does not do: decide what is worth deciding. Callers name each decision with a
label, and draw bulk randomness (a handler's dice, a whole permutation) from `stream`, because a
seed is no decision: enumerating its 2**31 values would explore nothing.
Read next: `world.py`, which owns the choices of one run; `explore/`, which makes many.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

import trio
from typing_extensions import override

from .host import current_label
from .machines import Machines


class Choice(NamedTuple):
    """One answered question: `value` out of `range(n)`."""

    label: str
    n: int
    value: int


class Choices:
    """Where decisions come from; subclasses say how one is picked.

    Good for one world, which puts itself into `world`, so that whoever made the choices finds the
    trace of the run, also of one that failed.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.record: list[Choice] = []
        self.world: Machines | None = None
        self.traces_steps = True
        """Whether the run's trace tells of each step of a task; who looks at findings alone needs none."""
        self.instruments: tuple[trio.abc.Instrument, ...] = ()
        """Hear of every step of the run; they must change nothing."""
        self.places: dict[int, tuple[float, str, str]] = {}
        """When, on which host and about what those were made that are not the default; by their number."""
        self._streams: list[tuple[str, random.Random]] = []

    def below(self, n: int, label: str) -> int:
        """An integer in `range(n)`, recorded under `label`; with one answer only, unrecorded."""
        if n <= 1:
            return 0
        value = self._pick(n, label)
        if value and self.world is not None:
            self.places[len(self.record)] = self.world.current_time(), current_label(), ""
        self.record.append(Choice(label, n, value))
        return value

    def about(self, what: str) -> None:
        """Say of the decision that was made last what it was about, for who looks at the run."""
        last = len(self.record) - 1
        if last in self.places:
            self.places[last] = (*self.places[last][:2], what)

    def chance(self, one_in: int, label: str) -> bool:
        """True about once in `one_in`; False is the default answer. Never true if `one_in` < 2."""
        return self.below(one_in, label) == 1

    def stream(self, name: str) -> random.Random:
        """A generator of its own for `name`, derived from the seed alone and not recorded."""
        # A text seed is hashed with SHA-512, so it does not depend on PYTHONHASHSEED.
        made = random.Random(f"{self.seed}/{name}")
        self._streams.append((name, made))
        return made

    def drawn(self) -> dict[str, int]:
        """How far decisions and each stream have come, as numbers that differ if the draws did."""
        places = {"decisions": crc32(repr([choice[1:] for choice in self.record]).encode())}
        # A library's dice are the module's own, seeded for the run.
        states = [(name, stream.getstate()) for name, stream in self._streams]
        for name, (_, state, _) in (*states, ("random", random.getstate())):
            # The first word changes with every 624, the last counts up to there.
            places[name] = places.get(name, 0) ^ state[0] ^ state[-1] << 32
        return places

    @property
    def values(self) -> list[int]:
        """What was answered so far, ready for `ReplayChoices`."""
        return [choice.value for choice in self.record]

    def _pick(self, n: int, label: str) -> int:  # noqa: ARG002 -- the subclasses' parameters
        return 0


class SeedChoices(Choices):
    """Random answers from one seed."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        # No stream of the run: who replays the record draws nothing from it.
        self._bits = random.Random(f"{seed}/choices").getrandbits

    @override
    def _pick(self, n: int, label: str) -> int:
        # What `randrange` answers, at half its price: this is asked for every segment.
        width = n.bit_length()
        value = self._bits(width)
        while value >= n:
            value = self._bits(width)
        return value


class ReplayChoices(Choices):
    """Answers from a list, each taken modulo the number of answers; past its end all are dull.

    `seed` must be the recorded run's for an exact replay: it feeds `stream`.
    """

    def __init__(self, values: Iterable[int], seed: int = 0) -> None:
        super().__init__(seed)
        self.answers = list(values)

    @override
    def _pick(self, n: int, label: str) -> int:
        position = len(self.record)
        return self.answers[position] % n if position < len(self.answers) else 0


class PrefixChoices(ReplayChoices):
    """Answers from a list, and past its end random ones: the same beginning, another end."""

    def __init__(self, values: Iterable[int], *, tail_seed: int, seed: int = 0) -> None:
        super().__init__(values, seed)
        self._tail = random.Random(f"{tail_seed}/tail")

    @override
    def _pick(self, n: int, label: str) -> int:
        is_past = len(self.record) >= len(self.answers)
        return self._tail.randrange(n) if is_past else super()._pick(n, label)


class DeviationChoices(Choices):
    """The default run but for some answers, given as (position, value): see `explore_bounded`."""

    def __init__(self, deviations: Sequence[tuple[int, int]], seed: int = 0) -> None:
        super().__init__(seed)
        self._deviations = dict(deviations)

    @override
    def _pick(self, n: int, label: str) -> int:
        return self._deviations.get(len(self.record), 0) % n


class LabelledChoices(Choices):
    """Answers from one list for each label, dull past its end.

    Unlike one list for all, it survives decisions that come or go under another label.
    """

    def __init__(self, answers: Mapping[str, Sequence[int]], seed: int = 0) -> None:
        super().__init__(seed)
        self._answers = {label: iter(values) for label, values in answers.items()}

    @override
    def _pick(self, n: int, label: str) -> int:
        answers = self._answers.get(label)
        return 0 if answers is None else next(answers, 0) % n
