"""What the simulator's commands are given: scenarios by path, function or shipped name, and failure files.

A failure file is somebody else's: beyond what `load_failure` checks, only scenario files' own text,
the scenarios that ship, with parameters they know and sizes that end, and scenario functions of
files below this folder (`own.py`) may be played.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import typer

from .own import (
    OWN_SCENARIO,
    complete_own,
    is_own_name,
    objection,
    open_own,
    warn_of_change,
)
from .text import quietly, say

if TYPE_CHECKING:
    from trinamo.sim.core.policies import Policy
    from trinamo.sim.explore import Failure, Played, Run, Scenario


EXIT_BROKEN: Final = 1
EXIT_USAGE: Final = 2
EXIT_UNSTEADY: Final = 3
EXIT_ESCAPE: Final = 4
UNSTEADY: Final = (
    "  if the code is the same, it asks for what each process has of its own: the order of a set of"
    " texts (sort it), hash() or id(), the environment, real files"
)
HOSTS_MAX: Final = 1000
NUMBER_MAX: Final = 10_000
FILE_SCENARIO: Final = "trinamo.sim.scenario.play"
SHIPPED_SCENARIOS: Final = "trinamo.sim.programs"
SCENARIO_BYTES_MAX: Final = 1_000_000


def refuse(message: str, code: int = EXIT_USAGE) -> NoReturn:
    """One sentence on standard error, and the end."""
    sys.stderr.write(f"trinamo sim: {' '.join(message.split())}\n")
    raise typer.Exit(code)


def exit_code_for(invariant: str | None) -> int:
    """What the process exits with for a run that broke this rule, or none."""
    if invariant is None:
        return 0
    return {"escape": EXIT_ESCAPE, "determinism": EXIT_UNSTEADY}.get(invariant, EXIT_BROKEN)


# --- scenarios -------------------------------------------------------------------------------


def catalogue_names() -> list[str]:
    """The names of the shipped scenarios, without loading the simulator."""
    folder = Path(__file__).parents[2] / "sim" / "catalogue"
    return sorted(path.stem for path in folder.glob("*.toml"))


def complete_scenario(incomplete: str) -> list[str]:
    """For tab completion: shipped names, scenario files and functions in Python files that begin so."""
    names = [name for name in catalogue_names() if name.startswith(incomplete)]
    head, slash, _ = incomplete.rpartition("/")
    folder = Path(head or (slash or "."))
    found = [f"{head}{slash}{path.name}" for path in sorted(folder.glob("*.toml"))]
    files = [path for path in found if path.startswith(incomplete)]
    return names + files + complete_own(incomplete)


def resolve(name: str) -> Path:
    """The scenario file called `name`: a path, or the name of a shipped one."""
    if is_own_name(name):
        refuse(f"{name} is code, and this command plays scenario files")
    path = Path(name)
    if path.is_file():
        if path.stat().st_size > SCENARIO_BYTES_MAX:
            refuse(f"{name} is larger than {SCENARIO_BYTES_MAX} bytes, so it is no scenario file")
        return path
    names = catalogue_names()
    if name in names:
        return Path(__file__).parents[2] / "sim" / "catalogue" / f"{name}.toml"
    from difflib import get_close_matches

    near = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else "`trinamo sim list` shows those that ship"
    refuse(f"there is no file and no shipped scenario {name!r}; {hint}")


def scenario_of(
    name: str, *, bug: str = "", policy: Policy | None = None, streams: str | None = None
) -> Scenario:
    """The scenario as the searchers want it; ends with a sentence if it cannot be read.

    A function in a Python file that is none raises `BadScenario`, a sentence too.
    """
    if is_own_name(name):
        if bug or streams:
            refuse(f"--bug and --streams are about our own cluster, and {name} is code")
        return open_own(name, policy)
    from trinamo.runtime.errors import ConfigError
    from trinamo.sim.scenario.play import play_of

    path = resolve(name)
    try:
        _check_size(path.read_text("utf-8"), name)
        play = play_of(path, bug=bug)
        for key, word in (("policy", policy), ("streams", streams)):
            if word is not None:
                play = play.changed(text=_with(play.parameters["text"], key, word))
    except OSError as error:
        refuse(f"{name} cannot be read: {error.strerror}")
    except (ConfigError, UnicodeDecodeError, RecursionError) as error:
        refuse(f"{name}: {error}" if isinstance(error, ValueError) else str(error))
    _check_file_scenario(play)
    return play


def _with(text: str, key: str, word: str) -> str:
    """The file with another top-level `key`; the rest of it, and its lines, as they were."""
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if line.lstrip().startswith("["):
            break
        if line.partition("=")[0].strip() == key:
            lines[number] = f'{key} = "{word}"\n'
            return "".join(lines)
    return f'{key} = "{word}"\n{text}'


def seeds_of(text: str) -> range:
    """`A..B`, both ends included, or one number."""
    first, dots, last = text.partition("..")
    try:
        low = int(first)
        high = int(last) if dots else low
    except ValueError:
        refuse(f"--seeds {text!r}: write A..B, such as 1..200")
    if low > high or low < 0:
        refuse(f"--seeds {text!r}: the first seed must be 0 or more and not above the last")
    return range(low, high + 1)


# --- failure files -----------------------------------------------------------------------------


def open_failure(path: Path) -> Failure:
    """Read a failure file; a sentence and exit 2 for anything that is none."""
    from trinamo.sim.explore import BadFailureFile, load_failure

    try:
        failure = load_failure(path, packages=(FILE_SCENARIO, OWN_SCENARIO, SHIPPED_SCENARIOS))
    except BadFailureFile as error:
        refuse(str(error))
    if failure.scenario.module == FILE_SCENARIO:
        _check_file_scenario(failure.scenario, str(path))
    elif failure.scenario.module == OWN_SCENARIO:
        if why := objection(failure.scenario):
            refuse(f"{path}: {why}")
        warn_of_change(failure.scenario)
    else:
        _check_shipped_scenario(failure.scenario, str(path))
    return failure


def play_test_again(path: Path) -> int | None:
    """Have pytest play the failure of a test again; its exit code, or None if the file holds no such."""
    from trinamo.sim.explore import BadFailureFile, load_failure
    from trinamo.sim.explore.failure import MARKED_TEST

    try:
        failure = load_failure(path, packages=(MARKED_TEST,))
    except BadFailureFile:
        return None
    test = str(failure.scenario.parameters.get("where", ""))
    file = Path(test.partition("::")[0])
    is_here = file.is_file() and file.resolve().is_relative_to(Path.cwd().resolve())
    if not is_here or file.suffix != ".py":
        refuse(f"{path} is of a test in {str(file)!r}, and there is no such file below this folder")
    words = [sys.executable, "-m", "pytest", test, "--sim-replay", str(path)]
    return subprocess.run(words, check=False).returncode  # noqa: S603 -- a test below this folder


def _check_file_scenario(play: Scenario, where: str = "") -> None:
    from trinamo.runtime.errors import ConfigError
    from trinamo.sim.mutants import BUGS
    from trinamo.sim.scenario.file import parse_scenario

    parameters: dict[str, Any] = {"where": "", "bug": "", "faults": None, **play.parameters}
    unknown = sorted({*parameters} - {"text", "where", "bug", "faults"})
    text, name, bug = (parameters.get(key) for key in ("text", "where", "bug"))
    if unknown or play.function != "run" or not (isinstance(text, str) and isinstance(name, str)):
        refuse(f"{where}: scenario.parameters must be text, where, bug and faults")
    if bug and bug not in BUGS:
        refuse(f"{where or name}: there is no planted bug {bug!r}; there are {', '.join(BUGS)}")
    _check_size(text, where or name)
    try:
        scenario = parse_scenario(text, name)
    except (ConfigError, RecursionError) as error:
        refuse(f"{where + ': ' if where else ''}{error}")
    faults, count = parameters["faults"], len(scenario.faults)
    if faults is not None and not (
        isinstance(faults, list) and all(type(n) is int and 0 <= n < count for n in faults)
    ):
        refuse(f"{where}: scenario.parameters.faults must number faults from 0 to {count - 1}")


def _check_size(text: str, where: str) -> None:
    """Refuse a file that asks for more than memory holds, before anything is made of it."""
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        # Whoever reads the whole file says what is wrong with it, and where.
        return

    def number(section: Any, key: str) -> int:
        value = section.get(key, 1) if isinstance(section, dict) else 1
        return value if isinstance(value, int) else 1

    cluster, loads, queue = (table.get(key) for key in ("cluster", "workload", "queue"))
    groups = loads if isinstance(loads, list) else []
    sizes = [number(cluster, "frontends"), number(cluster, "workers")]
    sizes += [number(group, "clients") for group in groups]
    sizes += [number(queue, "workers"), number(queue, "jobs")]
    requests = sum(number(group, "clients") * number(group, "requests") for group in groups)
    if sum(sizes) > HOSTS_MAX or requests > 100 * HOSTS_MAX:
        limit = f"at most {HOSTS_MAX} hosts and {100 * HOSTS_MAX} requests are simulated"
        refuse(f"{where}: {limit}")


def _check_shipped_scenario(play: Scenario, where: str) -> None:
    import importlib
    import inspect

    from trinamo.sim import programs as scenarios

    name = play.module.removeprefix(f"{SHIPPED_SCENARIOS}.")
    known = [path.stem for path in Path(scenarios.__path__[0]).glob("[!_]*.py")]
    if name not in known or play.function != "run":
        refuse(f"{where}: there is no shipped scenario {play.module}:{play.function}")
    accepted = [*inspect.signature(importlib.import_module(play.module).run).parameters][1:]
    for key, value in play.parameters.items():
        is_small = isinstance(value, (int, float, str, bool, type(None))) and (
            not isinstance(value, (int, float)) or abs(value) <= NUMBER_MAX
        )
        is_plan = key == "faults" and isinstance(value, list) and len(value) <= HOSTS_MAX
        if key not in accepted or not (is_small or is_plan):
            refuse(f"{where}: scenario.parameters.{key[:50]} is not one that {name} takes")


def play_again(path: Path, *, is_loose: bool = False) -> tuple[Failure, Played, bool]:
    """A failure file, its run, and whether that is exact.

    Ends with the first difference, unless `is_loose`.
    """
    from trinamo.sim.explore import BadScenario, replay

    failure = open_failure(path)
    if (changes := failure.version_changes) and not is_loose:
        refuse(f"recorded with other versions ({'; '.join(changes)}); --loose replays all the same")
    try:
        with quietly():
            again = replay(failure)
    except BadScenario:
        raise
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        # The scenario never got as far as a world, so its parameters are wrong.
        refuse(f"the recorded scenario cannot be played: {type(error).__name__}: {error}")
    if not again.is_exact:
        sys.stderr.write(f"trinamo sim: the replay departs at {again.difference}\n{UNSTEADY}\n")
        if not is_loose:
            raise typer.Exit(EXIT_UNSTEADY)
    return failure, again.played, again.is_exact


def save_played(play: Scenario, source: Run | Played, path: Path) -> None:
    """Write the failure file of a run, which is played again unless its trace is at hand."""
    from trinamo.sim.explore import Failure, save_failure

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with quietly():
            save_failure(Failure.of(play, source), path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        refuse(f"{path} cannot be written: {why}")


def write_file(path: Path, text: str) -> None:
    """Write a file that was asked for, or say why not."""
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        refuse(f"{path} cannot be written: {error.strerror}")


def draw(path: Path | None, title: str, played: Played, *, until_s: float | None = None) -> None:
    """Write the page of a run, if one was asked for, and say so."""
    if path is not None:
        from trinamo.sim.explore import page_of

        write_file(path, page_of(title, played, until_s=until_s))
        say(f"The picture is in {path}.")
