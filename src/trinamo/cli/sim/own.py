"""Other people's scenarios on the command line: `FILE.py::function`, and what a failure file may say of one.

Replaying one runs the code of a file. So a failure file may name a file below the folder it is
replayed in only, and there a function that has the shape of a scenario.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

if TYPE_CHECKING:
    from trinamo.sim.core.policies import Policy
    from trinamo.sim.explore import Scenario


OWN_SCENARIO: Final = "trinamo.sim.own.scenario"
PARAMETERS: Final = frozenset({"file", "function", "digest", "policy", "faults"})
FAULTS_MAX: Final = 1000
COMPLETED_MAX: Final = 50
"""How many files are looked into for a tab."""


def is_own_name(name: str) -> bool:
    """Whether this names a function in a file, not a scenario file or a shipped one."""
    return "::" in name or name.endswith(".py")


def open_own(name: str, policy: Policy | None) -> Scenario:
    """The scenario `FILE.py::function`, or the only one of `FILE.py`; raises `BadScenario`."""
    from trinamo.sim.own import own_scenario

    file, _, function = name.partition("::")
    # As `python FILE.py` and pytest do, also for a file that is imported by a name.
    return own_scenario(Path(file), function, policy=policy)


def complete_own(incomplete: str) -> list[str]:
    """For tab completion: the scenario functions of Python files, as `FILE.py::function`.

    bash, to which `::` is a word of its own, completes the beginning of the file's name only.
    """
    file, colons, function = incomplete.partition("::")
    if colons:
        return [f"{file}::{name}" for name in _known(Path(file)) if name.startswith(function)]
    head, slash, _ = incomplete.rpartition("/")
    folder = Path(head or (slash or "."))
    files = [f"{head}{slash}{path.name}" for path in sorted(folder.glob("*.py"))]
    begun = [file for file in files if file.startswith(incomplete)][:COMPLETED_MAX]
    return [f"{file}::{name}" for file in begun for name in _known(Path(file))]


def _known(file: Path) -> list[str]:
    from trinamo.sim.explore import BadScenario
    from trinamo.sim.own import functions_of

    try:
        return functions_of(file)
    except BadScenario:
        return []


def objection(play: Scenario) -> str:
    """Why what a failure file says of an own scenario must not be played; empty if it may be."""
    from trinamo.sim import Policy
    from trinamo.sim.explore import BadScenario
    from trinamo.sim.own import functions_of

    parameters: dict[str, Any] = play.parameters
    texts = [parameters.get(name, "") for name in ("file", "function", "digest", "policy")]
    faults = parameters.get("faults", [])
    if (
        play.function != "play"
        or not PARAMETERS.issuperset(parameters)
        or not all(isinstance(text, str) for text in texts)
        or not (isinstance(faults, list) and len(faults) <= FAULTS_MAX)
    ):
        return f"scenario.parameters must be {', '.join(sorted(PARAMETERS))}"
    if texts[3] and texts[3] not in get_args(Policy):
        return f"scenario.parameters.policy must be one of {', '.join(get_args(Policy))}"
    file = Path(texts[0])
    if not file.resolve().is_relative_to(Path.cwd().resolve()):
        return f"it names {file}, which is not below this folder; replay it where that file lies"
    try:
        if texts[1] not in functions_of(file):
            return f"{file} has no scenario function {texts[1]!r}"
    except BadScenario as error:
        return str(error)
    return ""


def warn_of_change(play: Scenario) -> None:
    """Say on standard error that the file is not the one that was recorded."""
    from trinamo.sim.own import own_change

    if change := own_change(play):
        sys.stderr.write(f"trinamo sim: {change}\n")
