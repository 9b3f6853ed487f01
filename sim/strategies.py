"""Hypothesis strategies for simulated runs: their decisions, their faults, their schedules.

    @given(choices(), fault_plans(["a", "b", "c"]), schedules())
    def test_no_value_is_lost(choices, faults, policy): ...

Hypothesis draws everything before the run; nothing may be drawn inside one, since what Hypothesis
raises then must not cross trio's loop. It needs the extra `testing`.

What this module does not do: play anything, or judge it. Read next: `core/choices.py`, `faults.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, get_args

from hypothesis import strategies as st
from typing_extensions import override

from .core.choices import Choices, PrefixChoices, ReplayChoices
from .core.policies import Policy
from .faults import AT_ONCE, ON_HOSTS, ON_LINKS, Fault

ANSWER_BYTES: Final = 2
"""Each decision is drawn from so many, and taken modulo the number of its answers."""
TAIL_SEEDS: Final = 2**32
SHOWN_MAX: Final = 32
"""Of how many decisions that are not the default a list is shown before the run."""


def choices(*, decisions_max: int = 256) -> st.SearchStrategy[Choices]:
    """The decisions of one run: they explore as seeds do, and shrink as lists do.

    Every example draws the first `decisions_max` decisions, all of them at once and none favoured, so
    a bug shows in about as many examples as in seeds; a list of Hypothesis' own length leaves most
    decisions of a run at their default, and finds little. Each of them shrinks towards the default
    answer by itself. Later decisions, and the dice of `Choices.stream`, come from a seed that is drawn
    too; the former shrink all together. Raise `decisions_max` for runs that decide more (one costs
    about 5 µs an example), to at most 2048, where Hypothesis' own limit of an example is near.
    """
    if not 1 <= decisions_max <= 2048:
        raise ValueError(f"decisions_max is from 1 to 2048, not {decisions_max}")
    # In one draw, since Hypothesis spends examples on copies of one draw in the place of another.
    size = decisions_max * ANSWER_BYTES
    answers = st.binary(min_size=size, max_size=size)
    # The first is what Hypothesis shrinks to: no tail, so that all decisions are in sight.
    has_tail = st.sampled_from([False, True, True, True])
    # Composite, so that a failing example is printed as the choices print themselves.
    return st.composite(_drawn)(answers, has_tail, st.integers(0, TAIL_SEEDS))


def _drawn(
    draw: st.DrawFn,
    many_answers: st.SearchStrategy[bytes],
    has_tail: st.SearchStrategy[bool],
    seeds: st.SearchStrategy[int],
) -> Choices:
    answers = draw(many_answers)
    values = [
        int.from_bytes(answers[at : at + ANSWER_BYTES])
        for at in range(0, len(answers), ANSWER_BYTES)
    ]
    is_tailed, seed = draw(has_tail), draw(seeds)
    return _Tailed(values, tail_seed=seed, seed=seed) if is_tailed else _Listed(values, seed)


class _Listed(ReplayChoices):
    """Prints itself as what replays it."""

    @override
    def __repr__(self) -> str:
        # Before the run the drawn values; afterwards what they answered, which is easier to read.
        values = self.values if self.record else self.answers[:]
        while values and not values[-1]:
            values.pop()
        if not self.record and sum(value != 0 for value in values) > SHOWN_MAX:
            return f"<{len(values)} drawn decisions>"
        return f"ReplayChoices({values}, seed={self.seed})"


class _Tailed(PrefixChoices):
    """As above; drawn values in a row of hundreds tell nobody anything, so there is no list."""

    @override
    def __repr__(self) -> str:
        if self.record:
            return f"ReplayChoices({self.values}, seed={self.seed})"
        return f"<{len(self.answers)} drawn decisions, then those of seed {self.seed}>"


def fault_plans(
    hosts: Sequence[str],
    *,
    kinds: Sequence[str] = (*ON_HOSTS, *ON_LINKS),
    until_s: float = 5.0,
    lasts_s_max: float = 5.0,
    notes: Sequence[str] = (),
    size_max: int = 3,
) -> st.SearchStrategy[list[Fault]]:
    """Plans of at most `size_max` faults for `faults.arm`, on these hosts and the links between them.

    Each strikes before `until_s`, or within 10 ms of one of the first eight notes of a kind among
    `notes` (then maybe the host that made the note), and lasts at most `lasts_s_max`. They shrink to fewer, earlier, shorter faults on the
    first of the hosts. Disks fail too with `kinds=(*ON_HOSTS, *ON_LINKS, *ON_DISKS)` of `faults.py`.
    """
    names = list(hosts)
    wanted = [kind for kind in kinds if kind not in ON_LINKS or len(names) > 1]
    if not names or not wanted:
        raise ValueError("a fault plan needs a host, and a link needs two")

    @st.composite
    def faults(draw: st.DrawFn) -> Fault:
        do = draw(st.sampled_from(wanted))
        host = draw(st.sampled_from(names))
        fault: Fault = {"do": do, "host": host, "at_s": 0.0}
        if do in ON_LINKS:
            fault["to"] = draw(st.sampled_from([name for name in names if name != host]))
        if do not in AT_ONCE:
            fault["for_s"] = draw(_milliseconds(1, lasts_s_max))
        is_tied = draw(st.booleans()) if notes else False
        if is_tied:
            kind, nth = draw(st.sampled_from(notes)), draw(st.integers(1, 8))
            fault["after_note"] = f"{kind}#{nth}"
            if draw(st.booleans()):
                del fault["host"]
                fault["on"] = "note"
        fault["at_s"] = draw(_milliseconds(0, 0.01 if "after_note" in fault else until_s))
        return fault

    return st.lists(faults(), max_size=size_max)


def _milliseconds(low: int, high_s: float) -> st.SearchStrategy[float]:
    return st.integers(low, max(low, int(high_s * 1000))).map(lambda ms: ms / 1000)


def schedules(policies: Sequence[Policy] = get_args(Policy)) -> st.SearchStrategy[Policy]:
    """In which order a world's tasks take their steps: a `policy` for `World`.

    They shrink towards `fifo`, under which nothing about the order is decided, and then towards those
    that record what they decide.
    """
    dull_first: tuple[Policy, ...] = ("fifo", "grouped", "choice", "step", "batch", "pct")
    return st.sampled_from([policy for policy in dull_first if policy in policies])
