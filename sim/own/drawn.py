"""A test that Hypothesis feeds with `choices()`: what fails is made small, filed, drawn and told, as by `search`.

Hypothesis finds; it knows nothing of decisions, so making them few is left to our shrinker: once an example
has failed, others pass unplayed. A failure file holds what was drawn beside the decisions, if JSON can.
What this module does not do: know pytest (`trinamo/pytest_plugin.py`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any, get_type_hints

import attrs
import msgspec
from hypothesis.errors import HypothesisException
from hypothesis.strategies import DataObject
from typing_extensions import override

from ..core.choices import Choices, ReplayChoices
from ..core.world import World
from ..errors import fails_run
from ..explore.failure import BadFailureFile, Failure
from .marked import MarkedTest, Options
from .search import Found, examine


class DrawnTest(MarkedTest):
    """One test with what it was given, `drawn` by Hypothesis; of that `choices` are the run's decisions.

    The first plan of faults among it may be made shorter. Without `drawn` it is what replays failure files.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., object],
        arguments: dict[str, Any],
        options: Options,
        drawn: Mapping[str, Any],
    ) -> None:
        plan = next((key for key, value in drawn.items() if _is_plan(value)), None)
        faults = () if plan is None else drawn[plan]
        super().__init__(name, function, arguments, attrs.evolve(options, faults=faults))
        object.__setattr__(self, "drawn", drawn)
        object.__setattr__(self, "plan", plan)
        self.parameters["drawn"] = _as_json(function, drawn)

    drawn: Mapping[str, Any]
    plan: str | None

    @property
    @override
    def is_filed(self) -> bool:
        return self.parameters["drawn"] is not None

    def with_drawn(self, drawn: Mapping[str, Any]) -> DrawnTest:
        """The same test, with this drawn."""
        return DrawnTest(self.name, self.test.func, self.test.keywords, self.options, drawn)

    @override
    def changed(self, **parameters: Any) -> DrawnTest:
        shorter = {self.plan: parameters["faults"]} if self.plan and "faults" in parameters else {}
        return self.with_drawn({**self.drawn, **shorter})

    @override
    def __call__(self, choices: Choices) -> object:
        given = {
            key: choices if isinstance(value, Choices) else value
            for key, value in self.drawn.items()
        }
        return self.test(**given)

    @override
    def recorded(self, failure: Failure) -> DrawnTest:
        recorded = failure.scenario.parameters.get("drawn")
        if not isinstance(recorded, dict):
            raise BadFailureFile("scenario.parameters.drawn has not what Hypothesis drew")
        hints = _hints(self.test.func)
        try:
            return self.with_drawn(
                {
                    key: Choices()
                    if value is None
                    else msgspec.convert(value[0], hints.get(key, Any))
                    for key, value in recorded.items()
                }
            )
        except (msgspec.ValidationError, TypeError, LookupError) as error:
            raise BadFailureFile(f"scenario.parameters.drawn: {error}") from error

    @override
    def command(self, found: Found) -> str:
        # Hypothesis plays the examples first that failed before, if it keeps them.
        return (
            f"pytest {shlex.quote(self.name)}" if found.failure is None else super().command(found)
        )

    def feeding(self, given: Collection[str]) -> Callable[..., object]:
        """The test as Hypothesis is to call it; what is called so is not drawn, as fixtures are."""
        function = self.test.func
        first: Mapping[str, Any] | None = None
        told = ""

        @wraps(function)
        def feed(**kwargs: Any) -> object:
            nonlocal first, told
            drawn = {key: kwargs[key] for key in kwargs if key not in given}
            if first is not None and _is_another(drawn, first):
                return None
            try:
                return function(**kwargs)
            except BaseException as error:
                choices = _decisions_in(drawn)
                if choices is None or not _fails_in_a_run(error, choices):
                    raise
                if first is None:
                    first = drawn
                    fixed = {key: kwargs[key] for key in kwargs if key in given}
                    test = DrawnTest(self.name, function, fixed, self.options, drawn)
                    told = test._examined(choices)
                error.add_note(told)
                raise

        return feed

    def _examined(self, choices: Choices) -> str:
        """What a person reads of the failure; the run is made small for it."""
        again = ReplayChoices(choices.values, choices.seed)
        try:
            found = examine(self, again, out=self.options.out)
        except Exception as error:  # noqa: BLE001 -- the failure itself is raised
            return f"the run cannot be made small: {error}"
        if found is None:
            return "the run does not fail again when it is played once more"
        return self.told(found)


def _is_plan(value: object) -> bool:
    return isinstance(value, list) and any(
        isinstance(each, dict) and "do" in each for each in value
    )


def _decisions_in(drawn: Mapping[str, Any]) -> Choices | None:
    """The decisions, if there is one list of them and nothing is drawn inside the run."""
    found = [each for each in drawn.values() if isinstance(each, Choices)]
    has_data = any(isinstance(each, DataObject) for each in drawn.values())
    return found[0] if len(found) == 1 and not has_data else None


def _fails_in_a_run(error: BaseException, choices: Choices) -> bool:
    world = choices.world
    is_ours = fails_run(error) and not isinstance(error, HypothesisException)
    return is_ours and isinstance(world, World) and world.has_run


def _is_another(drawn: Mapping[str, Any], first: Mapping[str, Any]) -> bool:
    """Whether these were drawn otherwise; what compares by identity only tells nothing."""
    for key, value in drawn.items():
        if isinstance(value, ReplayChoices):
            if (value.seed, value.answers) != (first[key].seed, first[key].answers):
                return True
        elif not _is_compared_by_identity(value) and value != first[key]:
            return True
    return False


def _is_compared_by_identity(value: Any) -> bool:
    return getattr(type(value), "__eq__", None) is object.__eq__


def _hints(function: Callable[..., object]) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except NameError:
        # Of types that are imported for their checker only.
        return {}


def _as_json(function: Callable[..., object], drawn: Mapping[str, Any]) -> dict[str, Any] | None:
    """What was drawn, each in a list of its own, and null for the decisions; None if it would not come back."""
    hints = _hints(function)
    values: dict[str, list[Any] | None] = {}
    for key, value in drawn.items():
        values[key] = None
        if not isinstance(value, Choices):
            try:
                plain = json.loads(json.dumps(msgspec.to_builtins(value)))
                if msgspec.convert(plain, hints.get(key, Any)) != value:
                    return None
            except (TypeError, ValueError):
                return None
            values[key] = [plain]
    return values
