"""A scenario file as the searchers want it: a function of choices that raises what is wrong.

`play_of` makes an `explore.Scenario` that carries the file's text, so a failure replays without the
file. Its parameter `faults` lists which `[[fault]]` tables take part, which `shrink` makes shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs

from ..cluster.outcome import Outcome
from ..core.choices import Choices
from ..errors import Violation
from ..explore.run import Scenario as Play
from .file import load_scenario, parse_scenario
from .run import run_scenario


def play_of(path: str | Path, *, bug: str = "") -> Play:
    """The scenario in a file, with `bug` planted if there is one; raises `ConfigError`."""
    scenario = load_scenario(path)
    parameters = {
        "text": Path(path).read_text("utf-8"),
        "where": Path(path).name,
        "bug": bug,
        "faults": list(range(len(scenario.faults))),
    }
    return Play(__name__, parameters=parameters)


def run(
    choices: Choices,
    *,
    text: str,
    where: str = "scenario",
    bug: str = "",
    faults: Sequence[int] | None = None,
) -> Outcome:
    """Play the scenario in `text` with the faults of these numbers; raises its first `Violation`.

    With fewer faults than the file has, what it expects of them no longer counts.
    """
    scenario = parse_scenario(text, where)
    if faults is not None and len(faults) < len(scenario.faults):
        kept = tuple(scenario.faults[number] for number in faults)
        expect = attrs.evolve(scenario.expect, notes=())
        scenario = attrs.evolve(scenario, faults=kept, expect=expect)
    outcome = run_scenario(scenario, choices, bug=bug)
    for violation in outcome.violations:
        raise Violation(violation.invariant, violation.text)
    return outcome
