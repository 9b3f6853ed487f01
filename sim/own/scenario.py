"""A function in anybody's file as a scenario: `FILE.py::function`, called by the names of its parameters.

A scenario function asks for what it needs by name: `choices` (it makes its own `World`), `world`, or
`network`. A plain function runs the world itself; an `async` one is the run's main, in a world with a
network. What else it takes must have a default that JSON can hold; a list called `faults` is the plan
that `shrink` makes shorter.

What this module does not do: find the function in its file (`source.py`), judge a run
(`explore/run.py`). Read next: `search.py`.
"""

from __future__ import annotations

import inspect
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from typing_extensions import override

from ..core.choices import Choices
from ..core.policies import Policy
from ..core.world import World
from ..explore.run import BadScenario, Run, Scenario
from ..explore.swarm import Progress
from ..faults import Fault, arm
from ..net.network import Network
from .source import (
    ALL_PARTS,
    check_callable,
    check_in_file,
    checks,
    digest_of,
    functions_of,
    in_words,
    loaded_function,
)

NEVER_AWAITED = "was never awaited"
SHOWN_MAX = 1000
_shown: set[tuple[str, type[Warning], tuple[object, ...]]] = set()
"""Warnings of simulated code that were shown, each once for all runs of the process."""


# --- naming one ------------------------------------------------------------------------------------


def own_scenario(path: Path, name: str = "", *, policy: Policy | None = None) -> Scenario:
    """The scenario `path::name`; the only one of the file if `name` is empty.

    `policy` schedules in place of what the file says. Raises `BadScenario`.
    """
    if not name:
        known = functions_of(path)
        if len(known) != 1:
            which = f"one of {', '.join(known)}" if known else f"a function of {ALL_PARTS}"
            raise BadScenario(f"say which scenario of {path}: {path}::NAME, with {which}")
        name = known[0]
    check_in_file(path, name)
    return _named(path, name, loaded_function(path, name), policy)


def function_in_file(function: Callable[..., object]) -> Scenario:
    """The scenario that this function is.

    If it stands at the top of a file, the file names it, so that processes and failure files can;
    one from inside another function is played by this process alone, and nothing else finds it.
    """
    check_callable(function)
    code = inspect.unwrap(function)
    name, file = getattr(code, "__qualname__", ""), getattr(code, "__globals__", {}).get("__file__")
    if isinstance(file, str) and name.isidentifier():
        path = Path(file)
        if path.is_file() and name in functions_of(path):
            return _named(path, name, function, None)
    arguments = {"function": name or type(function).__name__, **_plan(function)}
    return _Local(__name__, "play", arguments, call=function)


def _named(
    path: Path, name: str, function: Callable[..., object], policy: Policy | None
) -> Scenario:
    parameters: dict[str, Any] = {
        "file": _place(path),
        "function": name,
        "digest": digest_of(path),
        **_plan(function),
    }
    if policy is not None:
        parameters["policy"] = policy
        takes = set(inspect.signature(function).parameters)
        is_made_here = inspect.iscoroutinefunction(function) or takes & {"world", "network"}
        if not is_made_here and "policy" not in takes:
            raise BadScenario(
                f"{name} makes its own world: give it a parameter `policy` that it hands to World,"
                " or let it take `world`"
            )
    return Scenario(__name__, "play", parameters)


@attrs.frozen
class _Local(Scenario):
    """A function that only this process can reach."""

    call: Callable[..., object] = attrs.field(kw_only=True)

    @property
    @override
    def is_filed(self) -> bool:
        return False

    @override
    def __call__(self, choices: Choices) -> object:
        return _call(self.call, choices, None, _faults(self.parameters.get("faults")))


def is_own(scenario: Scenario) -> bool:
    """Whether this is somebody's own function, not a scenario that ships or a scenario file."""
    return scenario.module == __name__


def label_of(scenario: Scenario) -> str:
    """What people call a scenario: `FILE.py::function`, a scenario file's name, or its module's."""
    file, function, where = (
        scenario.parameters.get(name, "") for name in ("file", "function", "where")
    )
    if is_own(scenario):
        return f"{file}::{function}" if file else str(function)
    if "::" in str(where):
        # A test, as pytest names it.
        return str(where)
    return Path(str(where)).stem if where else scenario.module.rpartition(".")[2]


def file_stem(scenario: Scenario) -> str:
    """The label as the beginning of a file's name: of `a/b.py::c` it is `b-c`."""
    file, _, function = label_of(scenario).rpartition("::")
    stem = "-".join([Path(file).stem, function] if file else [function])
    return re.sub(r"[^\w.-]+", "_", stem).strip("_") or "scenario"


def own_change(scenario: Scenario) -> str:
    """A sentence if the file is not the one that the scenario was recorded with; else nothing."""
    path = Path(str(scenario.parameters.get("file")))
    if digest_of(path) == scenario.parameters.get("digest"):
        return ""
    return f"{path} has changed since this was recorded"


def standing_hints(scenario: Scenario, shown: Run | Progress) -> list[str]:
    """What runs of an own scenario, and a look at its file, say about all of them: hints, or nothing."""
    if not is_own(scenario):
        return []
    hints = [
        f"in no run did a note {kind!r} follow a fault, and there were several before: what goes on"
        " then is not seen, so no rule about it can be broken"
        for kind in sorted(set(shown.broke_off) - set(shown.followed))
    ]
    file = scenario.parameters.get("file")
    if file is not None and not shown.is_watched and not checks(Path(file)):
        missing = "it has no assert, raises no Violation and no checker watches its runs"
        hints.append(
            f"nothing is checked in {file}: {missing}, so a run fails by an error of its own only"
        )
    return hints


def _place(path: Path) -> str:
    """The path from here if the file lies below, so that a failure file fits other machines."""
    absolute = path.resolve()
    try:
        return absolute.relative_to(Path.cwd().resolve()).as_posix()
    except ValueError:
        return str(absolute)


def _plan(function: Callable[..., object]) -> dict[str, Any]:
    """The function's own fault plan as JSON has it, if that can hold it."""
    faults = inspect.signature(function).parameters.get("faults")
    if faults is None or not isinstance(faults.default, (list, tuple)):
        return {}
    try:
        return {"faults": json.loads(json.dumps(faults.default))}
    except (TypeError, ValueError):
        return {}


def _faults(faults: Any) -> dict[str, Any]:
    return {} if faults is None else {"faults": faults}


# --- calling one -----------------------------------------------------------------------------------


def play(
    choices: Choices,
    *,
    file: str,
    function: str,
    digest: str = "",  # noqa: ARG001 -- for whoever compares it with the file (`own_change`)
    policy: Policy | None = None,
    faults: list[Any] | None = None,
) -> object:
    """Play the scenario function in this file; raises what it raises, or `BadScenario`."""
    return _call(loaded_function(Path(file), function), choices, policy, _faults(faults))


def _call(
    function: Callable[..., object],
    choices: Choices,
    policy: Policy | None,
    arguments: dict[str, Any],
) -> object:
    given, run = parts_for(function, choices, {} if policy is None else {"policy": policy})
    if run is None and policy is not None:
        arguments = {**arguments, "policy": policy}
    call = partial(function, **given, **arguments)
    try:
        with _forgotten_awaits(choices):
            return call() if run is None or not inspect.iscoroutinefunction(function) else run(call)
    except Exception as error:
        if choices.world is not None:
            raise
        name = getattr(function, "__name__", "the scenario")
        raise BadScenario(f"{name} failed before it made a world: {in_words(error)}") from error


def parts_for(
    function: Callable[..., object],
    choices: Choices,
    options: Mapping[str, Any],
    faults: Sequence[Fault] = (),
) -> tuple[dict[str, Any], Callable[[Any], object] | None]:
    """The parts of a run that the function asks for, and what runs its world; None if it makes its own.

    An `async` function has a world with a network, whether it asks for them or not. `options` are the
    world's. `faults` are readied as the run begins, unless the function asks for them, too.
    """
    takes = inspect.signature(function).parameters
    is_main = inspect.iscoroutinefunction(function)
    parts: dict[str, Any] = (
        {"choices": choices, "faults": list(faults)} if faults else {"choices": choices}
    )
    run = None
    if is_main or not {"world", "network"}.isdisjoint(takes):
        world = parts["world"] = World(choices, **options)
        run = world.run
        if is_main or "network" in takes or faults:
            network = parts["network"] = Network(world)
            if faults and "faults" not in takes:
                world.on_start.append(partial(arm, world, network, faults))
    return {name: part for name, part in parts.items() if name in takes}, run


@contextmanager
def _forgotten_awaits(choices: Choices) -> Iterator[None]:
    """Make a hint of what Python warns of as never awaited; other warnings go their way."""
    found: list[str] = []

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if NEVER_AWAITED not in str(message):
            # The filters of a run are its own, so Python forgets what it has shown already.
            key = (str(message), category, where[:2])
            if key not in _shown and len(_shown) < SHOWN_MAX:
                _shown.add(key)
                before(message, category, *where, **more)
            return
        file, line = where[0], where[1]
        found.append(f"{message} ({Path(file).name}, line {line}): write `await` before the call")

    with warnings.catch_warnings():
        warnings.filterwarnings("always", f".*{NEVER_AWAITED}", RuntimeWarning)
        before, warnings.showwarning = warnings.showwarning, show
        try:
            yield
        finally:
            if isinstance(choices.world, World):
                choices.world.advisers.append(lambda: dict.fromkeys(found))
