"""One run of a scenario: what it was made from, and what came of it.

A scenario is any callable that takes `Choices`, plays one world with them, and raises what is wrong:
a `Violation`, whatever the simulated code raised, or one of the simulator's own errors. The world is
found through the choices, so a scenario need not return it. A `Scenario` names such a callable by
module and function, with parameters that JSON can hold; so it crosses processes and fits in a file.

What this module does not do: search. Read next: `swarm.py`, `bounded.py`, `shrink.py`, `pin.py`.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import trio

from ..core.choices import Choice, Choices, SeedChoices
from ..core.trace import Trace
from ..core.world import World
from ..errors import (
    Deadlock,
    EndlessStep,
    Escape,
    Livelock,
    SimulationError,
    StepLimit,
    TimeLimit,
    Violation,
    fails_run,
)
from .hints import broke_off, followed, hints_of, varying

if TYPE_CHECKING:
    from ..report.causes import Causes, Step

Play = Callable[[Choices], object]
TEXT_MAX = 4000
ENDLESS_STEP = "endless step"
# Numbers, and long quotations: what differs between two runs that break a rule alike.
_PARTICULARS = re.compile(r"\d+(\.\d+)?|'[^']{20,}('|$)")


def shape_of(text: str) -> str:
    """A sentence without its particulars: equal for two that say the same of two runs."""
    return _PARTICULARS.sub("#", text)


class BadScenario(ValueError):  # noqa: N818 -- the scenario is at fault
    """This is no scenario, or it never got as far as a run; the text says why."""


@attrs.frozen
class Scenario:
    """`function(choices, **parameters)` of `module`; the parameters are what JSON can hold.

    A list under the parameter `faults` is a fault plan, which `shrink` makes shorter.
    """

    module: str
    function: str = "run"
    parameters: dict[str, Any] = attrs.field(factory=dict)

    def __call__(self, choices: Choices) -> object:
        play = getattr(importlib.import_module(self.module), self.function)
        return play(choices, **self.parameters)

    @property
    def is_filed(self) -> bool:
        """Whether a failure file can name it, so that it can be found again from elsewhere."""
        return True

    def changed(self, **parameters: Any) -> Scenario:
        """The same scenario with these parameters put in the place of its own."""
        return attrs.evolve(self, parameters={**self.parameters, **parameters})


@attrs.frozen
class Finding:
    """What was wrong with a run. `at_s` is when it ended, in virtual seconds."""

    invariant: str
    at_s: float
    text: str

    @property
    def key(self) -> str:
        """Equal for findings that are taken for the same: one rule, and one text but for particulars."""
        return f"{self.invariant}: {shape_of(self.text.partition(chr(10))[0])}"


@attrs.frozen
class Run:
    """What came of a run; small, and fit to cross processes."""

    seed: int
    values: list[int]
    digest: str
    finding: Finding | None
    steps: int
    events: int
    virtual_s: float
    rows: int
    untested: tuple[str, ...] = ()
    """What the scenario is about and did not come to pass in this run (`World.untested`)."""
    hints: tuple[str, ...] = ()
    """What looks like a mistake in the scenario (`hints.py`)."""
    varying: tuple[str, ...] = ()
    """What could go wrong: the labels of its decisions, and the faults that struck."""
    is_watched: bool = False
    """Whether a checker held it to a rule."""
    followed: tuple[str, ...] = ()
    """Kinds of notes that came after a fault."""
    broke_off: tuple[str, ...] = ()
    """Kinds that came more than once before the first fault, and never after it."""

    @property
    def deviation_count(self) -> int:
        """How many of its decisions were not the default answers."""
        return sum(value != 0 for value in self.values)


@attrs.frozen
class Played:
    """A run with what only its own process holds: the trace and the named decisions."""

    run: Run
    trace: Trace
    record: list[Choice]
    places: dict[int, tuple[float, str, str]]
    """See `Choices.places`."""
    steps: list[Step] | None = None
    """Its steps with what caused each, if they were asked for."""


def run(play: Play, choices: Choices | int) -> Run:
    """Play once, with these choices or this seed, and catch what is wrong."""
    return played(play, choices).run


def played(play: Play, choices: Choices | int, *, to_draw: bool = False) -> Played:
    """As `run`, with the trace; `to_draw` with what caused each step, which `page_of` shows."""
    if isinstance(choices, int):
        choices = SeedChoices(choices)
    causes: Causes | None = None
    if to_draw:
        from ..report.causes import Causes  # noqa: PLC0415 -- most runs are never drawn

        causes = Causes(choices)
        choices.instruments = (causes,)
    error: BaseException | None = None
    try:
        play(choices)
    except trio.TrioInternalError:
        # The simulator itself is at fault, and the process is in no state to go on.
        raise
    except BaseException as caught:
        if not fails_run(caught):
            raise
        error = caught
    world = choices.world
    if not isinstance(world, World):
        # It never got as far as a world: a mistake in the scenario, no finding about it.
        raise error or BadScenario("the scenario made no world")
    if error is None and not world.has_run:
        raise BadScenario("the scenario made a world and did not run it: call world.run(main)")
    trace = world.trace
    result = Run(
        seed=choices.seed,
        values=choices.values,
        digest=trace.digest,
        finding=None if error is None else _finding(error, world.ended_s),
        steps=world.steps,
        events=world.events,
        virtual_s=world.ended_s,
        rows=trace.count,
        untested=tuple(world.untested) if error is None else (),
        hints=tuple(hints_of(world, error)),
        varying=varying(world),
        is_watched=world.is_watched,
        followed=followed(world),
        broke_off=broke_off(world),
    )
    steps = None if causes is None else causes.steps
    return Played(result, trace, choices.record, choices.places, steps)


_OWN: tuple[tuple[type[BaseException], str], ...] = (
    (Deadlock, "deadlock"),
    (Livelock, "livelock"),
    (EndlessStep, ENDLESS_STEP),
    (StepLimit, "step limit"),
    (TimeLimit, "time limit"),
    (Escape, "escape"),
    (SimulationError, "simulation"),
)


def _finding(error: BaseException, at_s: float) -> Finding:
    if isinstance(error, Violation):
        return Finding(error.invariant, at_s, error.text[:TEXT_MAX])
    for kind, name in _OWN:
        if isinstance(error, kind):
            return Finding(name, at_s, str(error)[:TEXT_MAX])
    return Finding(f"error {type(error).__name__}", at_s, str(error)[:TEXT_MAX])


@contextmanager
def quietly() -> Iterator[None]:
    """Without the log of the simulated processes: their story is in the trace."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def page_of(
    title: str,
    played: Played,
    *,
    until_s: float | None = None,
    start_s: float | None = None,
) -> str:
    """The HTML page of a run, up to `until_s` virtual seconds if given, opened at `start_s`; see `sim.report.page`."""
    from ..report import About, Decision, page  # noqa: PLC0415 -- most runs are never drawn

    run, rows = played.run, played.trace.rows
    is_whole = until_s is None or until_s >= run.virtual_s
    end_s = run.virtual_s if until_s is None else min(until_s, run.virtual_s)
    if not is_whole:
        rows = [row for row in rows if row.time_s <= end_s]
        title = f"{title}, until {end_s:g} s"
    finding = run.finding if is_whole else None
    about = About(
        title=title,
        invariant=finding.invariant if finding else "",
        text=finding.text if finding else "",
        at_s=finding.at_s if finding else 0.0,
        end_s=end_s,
        facts=(
            ("seed", str(run.seed)),
            ("digest", run.digest),
            ("decisions", f"{len(run.values)}, {run.deviation_count} not the default"),
        ),
        decisions=tuple(
            Decision(*place, *played.record[number]) for number, place in played.places.items()
        ),
        start_s=start_s,
    )
    return page(rows, about, steps=played.steps or ())
