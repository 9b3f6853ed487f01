"""A test marked `sim`: searched over its seeds, its failure shrunk, filed, drawn and told.

What this module does not do: know pytest (`trinamo/pytest_plugin.py`).
"""

from __future__ import annotations

import inspect
import os
import shlex
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from typing_extensions import override

from ..core.choices import Choices
from ..core.policies import Policy
from ..core.world import World
from ..explore.failure import BadFailureFile, Failure, load_failure
from ..explore.run import BadScenario, Scenario
from ..faults import Fault
from ..isolation.ambient import Ambient
from .scenario import file_stem, parts_for
from .search import Found, Hint, examine, search

PLACES_MAX = 3


@attrs.frozen(kw_only=True)
class Options:
    """What the mark says, and where what is found goes."""

    seeds: Iterable[int]
    out: Path
    policy: Policy | None = None
    ambient: Ambient | None = None
    faults: Sequence[Fault] = ()
    shrink: bool = True
    plays_saved: bool = True
    """Whether failures of this test that lie in `out` are played before the seeds."""

    @property
    def of_world(self) -> dict[str, Any]:
        """Those of `World` that were given."""
        given = {"policy": self.policy, "ambient": self.ambient}
        return {name: value for name, value in given.items() if value is not None}


class MarkedTest(Scenario):
    """One test with the fixtures it was given. A failure file holds its name in its place."""

    def __init__(
        self,
        name: str,
        function: Callable[..., object],
        arguments: dict[str, Any],
        options: Options,
    ) -> None:
        # A plan stands among the parameters, so that shrinking makes it shorter.
        plan = {"faults": list(options.faults)} if options.faults else {}
        super().__init__(__name__, "MarkedTest", {"where": name, **plan})
        made = {"name": name, "options": options, "test": partial(function, **arguments)}
        # Scenarios are frozen, and what a failure file holds of one is its fields only.
        for attribute, value in made.items():
            object.__setattr__(self, attribute, value)

    name: str
    test: partial[Any]
    options: Options

    @override
    def changed(self, **parameters: Any) -> MarkedTest:
        options = attrs.evolve(self.options, faults=parameters.get("faults", self.options.faults))
        return MarkedTest(self.name, self.test.func, self.test.keywords, options)

    @override
    def __call__(self, choices: Choices) -> object:
        options = self.options
        given, run = parts_for(self.test, choices, options.of_world, options.faults)
        if run is None and "choices" not in given:
            raise BadScenario(f"{self.name} is marked sim: it must take choices, world or network")
        unused = [*options.of_world, *(["faults"] if options.faults else [])]
        if run is None and unused:
            raise BadScenario(f"{self.name} makes its own world, which takes the {unused[0]}")
        play: Callable[[], Any] = partial(self.test, **given)
        return play() if run is None or not inspect.iscoroutinefunction(self.test) else run(play)

    def search(self) -> str:
        """Play saved failures, then the seeds, until one fails; what a person reads about it, or nothing."""
        options = self.options
        found = self._fails_still() if options.plays_saved else None
        if found is None:
            found = search(self, seeds=options.seeds, out=options.out, shrink=options.shrink)
        return "" if found is None else "\n".join([self.told(found), *self._places(found)])

    def _fails_still(self) -> Found | None:
        """Of the saved failures of this test the first that still fails; those that hold twice are deleted."""
        for path in sorted(self.options.out.glob(f"{file_stem(self)}-*.json")):
            try:
                failure = self._load(path)
            except BadFailureFile:
                # Of another version, or of nobody's: it stays, and the seeds are played all the same.
                continue
            if failure.scenario.parameters.get("where") != self.name:
                continue
            recorded = self.recorded(failure)
            for _ in range(2):
                found = examine(
                    recorded, failure.choices(), out=self.options.out, shrink_cpu_s_max=0
                )
                if found is not None:
                    return found
            path.unlink()
            path.with_suffix(".html").unlink(missing_ok=True)
        return None

    def told(self, found: Found) -> str:
        """What a person reads of it, with the command of pytest that plays it again."""
        text = str(found).replace(found.replay, self.command(found))
        if found.page is not None:
            text = text.replace(str(found.page), os.path.relpath(found.page))
        return text

    def command(self, found: Found) -> str:
        """How pytest plays it again."""
        command = f"pytest {shlex.quote(self.name)}"
        if found.failure is None:
            return f"{command} --sim-seed {found.seed}"
        return f"{command} --sim-replay {shlex.quote(os.path.relpath(found.failure))}"

    def _places(self, found: Found) -> list[str]:
        """Where in the test's own file the failure came from, innermost last."""
        if found.failure is None:
            return []
        try:
            failure = self._load(found.failure)
            self.recorded(failure)(failure.choices())
        except Exception as error:  # noqa: BLE001 -- it was found before
            own = inspect.getsourcefile(inspect.unwrap(self.test.func))
            frames = traceback.extract_tb(error.__traceback__)
            return [
                f"  at {os.path.relpath(frame.filename)}:{frame.lineno}: {frame.line}"
                for frame in frames
                if frame.filename == own
            ][-PLACES_MAX:]
        return []

    def replay(self, path: Path) -> str | None:
        """Play the run of a failure file; raises what it raises. The file's test, if another."""
        failure = self._load(path)
        name = str(failure.scenario.parameters.get("where"))
        if name != self.name:
            return name
        choices = failure.choices()
        self.recorded(failure)(choices)
        assert isinstance(choices.world, World)
        departure = failure.difference(choices.world.trace)
        if departure:
            warnings.warn(f"not the recorded run any more: {departure}", Hint, stacklevel=2)
        return None

    def recorded(self, failure: Failure) -> MarkedTest:
        """The test as it was when it failed."""
        return self.changed(faults=failure.scenario.parameters.get("faults", ()))

    @staticmethod
    def _load(path: Path) -> Failure:
        return load_failure(path, packages=(__name__,))
