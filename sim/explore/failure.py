"""The failure file, and its replay: what a failing run is played again from, and where it departs.

JSON, at most `FILE_BYTES_MAX`. It names the scenario (module, function, parameters), the seed and
where decisions come from: the seed itself (then only their number is kept) or a list, run-length
encoded. The rows of the recorded run are kept too, compressed, if they fit; else a checksum of every
so many rows. So a replay that departs says at which row it did.

Reading believes nothing: size, types and bounds of every field are checked, and a scenario is only
taken from the packages the caller allows, since replaying imports it.
"""

from __future__ import annotations

import base64
import json
import math
import platform
import re
import zlib
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import attrs
import trio

from ..core.choices import Choices, ReplayChoices, SeedChoices
from ..core.trace import Trace
from .run import Finding, Play, Played, Run, Scenario, played

SCHEMA = "trinamo.sim-failure/2"
FILE_BYTES_MAX = 100_000
ROWS_BYTES_MAX = 40_000
ROWS_TEXT_MAX = 16_000_000
MARKS_MAX = 4096
CHOICES_MAX = 10_000_000
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
PACKAGES = ("trinamo",)
MARKED_TEST = "trinamo.sim.own.marked"
"""Where failures of tests are played."""


class BadFailureFile(ValueError):  # noqa: N818 -- the file is at fault
    """The file is no failure file of this version; the text names the field and what it must be."""


@attrs.frozen
class Failure:
    """One failing run, as recorded."""

    scenario: Scenario
    seed: int
    values: list[int] | None
    """The decisions; None if they are what the seed answers."""
    count: int
    """How many decisions the run made."""
    digest: str
    finding: Finding
    rows: list[str] | None
    """All rows as text, if they were few enough to keep."""
    stride: int
    marks: list[str]
    """A checksum of all rows so far, after every `stride` rows."""
    versions: dict[str, str]

    @classmethod
    def of(cls, scenario: Scenario, source: Run | Played) -> Failure:
        """Record the failing run; plays it again unless its trace is at hand."""
        if isinstance(source, Run):
            source = played(scenario, ReplayChoices(source.values, source.seed))
        result, trace = source.run, source.trace
        if result.finding is None:
            raise ValueError("this run does not fail")
        is_seeds_own = _seeded(result.seed, source)
        rows = trace.texts()
        stride = max(1, math.ceil(len(rows) / MARKS_MAX))
        return cls(
            scenario=scenario,
            seed=result.seed,
            values=None if is_seeds_own else result.values,
            count=len(result.values),
            digest=result.digest,
            finding=result.finding,
            rows=rows if len(_packed(rows)) <= ROWS_BYTES_MAX else None,
            stride=stride,
            marks=marks(rows, stride),
            versions=versions(),
        )

    def choices(self) -> Choices:
        """The decisions of the recorded run, for one more."""
        if self.values is None:
            return SeedChoices(self.seed)
        return ReplayChoices(self.values, self.seed)

    def play(self, scenario: Play | None = None) -> Played:
        """The run again; `scenario` in the place of the named one, if given."""
        return played(scenario or self.scenario, self.choices(), to_draw=True)

    @property
    def version_changes(self) -> list[str]:
        """What has another version than when it was recorded, in words."""
        return [
            f"{name} was {self.versions.get(name)} and is {version}"
            for name, version in versions().items()
            if self.versions.get(name) != version
        ]

    def difference(self, trace: Trace) -> str:
        """The first row in which `trace` departs from the recorded run, in words; empty if none."""
        texts = trace.texts()
        if self.rows is not None:
            for number, (old, new) in enumerate(zip(self.rows, texts, strict=False)):
                if old != new:
                    return f"row {number}:\n  recorded {old}\n  now      {new}"
        else:
            for index, (old, new) in enumerate(
                zip(self.marks, marks(texts, self.stride), strict=False)
            ):
                if old != new:
                    first, last = index * self.stride, (index + 1) * self.stride - 1
                    now = "\n  ".join(texts[first : last + 1][:20])
                    return f"row {first} or one after it, up to {last}; now they are\n  {now}"
        if trace.digest != self.digest:
            return f"the end: the recorded run has other rows after row {len(texts) - 1}"
        return ""


def versions() -> dict[str, str]:
    """What a run depends on besides the scenario."""
    from importlib.metadata import (  # noqa: PLC0415 -- takes longer than a short run
        PackageNotFoundError,
        version,
    )

    try:
        own = version("trinamo")
    except PackageNotFoundError:
        # A checkout on the path, which nobody installed.
        own = "checkout"
    return {
        "trinamo": own,
        "python": platform.python_version(),
        "trio": trio.__version__,
    }


def marks(rows: Iterable[str], stride: int) -> list[str]:
    """A running checksum, sixteen bits of it, after every `stride` rows."""
    found, checksum = [], 0
    for number, row in enumerate(rows, 1):
        checksum = zlib.crc32(row.encode(), checksum)
        if number % stride == 0:
            found.append(f"{checksum & 0xFFFF:04x}")
    return found


def _seeded(seed: int, source: Played) -> bool:
    again = SeedChoices(seed)
    return all(again.below(n, label) == value for label, n, value in source.record)


def _packed(rows: list[str]) -> str:
    return base64.b85encode(zlib.compress("\n".join(rows).encode(), 9)).decode()


# --- playing it again -----------------------------------------------------------------------------


@attrs.frozen
class Replay:
    """What came of a replay.

    `difference` names the first row that is not the recorded one, and the versions that are not
    those it was recorded with; empty if the replay is exact.
    """

    played: Played
    difference: str

    @property
    def is_exact(self) -> bool:
        """Whether every row was as recorded."""
        return not self.difference


def replay(failure: Failure, scenario: Play | None = None) -> Replay:
    """Play the recorded run, in `scenario` if the named one is not to be imported.

    A run that departs goes on to its end all the same: the recorded decisions go on answering, dull
    past their end, or the seed does. Whether that still counts is for the caller to say.
    """
    again, changes = failure.play(scenario), failure.version_changes
    difference = failure.difference(again.trace)
    if difference and changes:
        difference = f"{difference}\n({'; '.join(changes)})"
    return Replay(again, difference)


# --- writing --------------------------------------------------------------------------------------


def save_failure(failure: Failure, path: Path) -> None:
    """Write the file; `ValueError` if it would be larger than `FILE_BYTES_MAX` (shrink first)."""
    values = failure.values
    content = {
        "schema": SCHEMA,
        "scenario": attrs.asdict(failure.scenario),
        "seed": failure.seed,
        "choices": {
            "count": failure.count,
            "runs": None
            if values is None
            else [[value, len(list(same))] for value, same in groupby(values)],
        },
        "digest": failure.digest,
        "violation": attrs.asdict(failure.finding),
        "rows": None if failure.rows is None else _packed(failure.rows),
        "marks": {"stride": failure.stride, "sums": "" if failure.rows else "".join(failure.marks)},
        "versions": failure.versions,
    }
    text = json.dumps(content, separators=(",", ":"))
    if len(text) > FILE_BYTES_MAX:
        raise ValueError(
            f"{len(text)} bytes, and a failure file has at most {FILE_BYTES_MAX}; shrink the run first"
        )
    path.write_text(text + "\n", "utf-8")


# --- reading --------------------------------------------------------------------------------------


def load_failure(path: Path, *, packages: tuple[str, ...] = PACKAGES) -> Failure:
    """Read the file; `BadFailureFile` names what is wrong with it.

    The scenario's module must be in one of `packages`. Versions are read, not compared: see
    `replay`.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 2)
    except OSError as error:
        raise BadFailureFile(f"{path} cannot be read: {error.strerror}") from error
    if len(raw) > FILE_BYTES_MAX + 1:
        raise BadFailureFile(f"{path}: larger than {FILE_BYTES_MAX} bytes")
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadFailureFile(
            f"{path}: no JSON, which a failure file is, as --save and `trinamo sim swarm` write it:"
            f" {error}"
        ) from error
    try:
        return _failure(_Fields(content, ""), packages)
    except BadFailureFile as error:
        raise BadFailureFile(f"{path}: {error}") from None


class _Fields:
    """A JSON object whose fields are taken by type, with words for what is wrong."""

    def __init__(self, content: Any, where: str) -> None:
        if not isinstance(content, dict):
            raise BadFailureFile(f"{where or 'the file'} must be an object")
        self._content, self._where = content, where

    def text(self, name: str, length_max: int) -> str:
        value = self._content.get(name)
        if not isinstance(value, str) or len(value) > length_max:
            raise BadFailureFile(f"{self._where}{name} must be a text of at most {length_max}")
        return value

    def number(self, name: str, low: float, high: float) -> float:
        value = self._content.get(name)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not low <= value <= high
        ):
            raise BadFailureFile(f"{self._where}{name} must be a number from {low} to {high}")
        return value

    def integer(self, name: str, low: int, high: int) -> int:
        value = self.number(name, low, high)
        if not isinstance(value, int):
            raise BadFailureFile(f"{self._where}{name} must be an integer")
        return value

    def fields(self, name: str) -> _Fields:
        return _Fields(self._content.get(name), f"{self._where}{name}.")

    def get(self, name: str) -> Any:
        return self._content.get(name)


def _failure(file: _Fields, packages: tuple[str, ...]) -> Failure:
    schema = file.text("schema", 100)
    if schema != SCHEMA:
        raise BadFailureFile(f"schema is {schema!r}, and this version reads {SCHEMA!r}")
    violation, seen = file.fields("violation"), file.fields("marks")
    values, count = _values(file.fields("choices"))
    sums = seen.text("sums", 4 * MARKS_MAX)
    return Failure(
        scenario=_scenario(file.fields("scenario"), packages),
        seed=file.integer("seed", -(2**63), 2**63),
        values=values,
        count=count,
        digest=file.text("digest", 64),
        finding=Finding(
            violation.text("invariant", 200),
            violation.number("at_s", 0.0, 1e12),
            violation.text("text", 10_000),
        ),
        rows=_rows(file.get("rows")),
        stride=seen.integer("stride", 1, 10**9),
        marks=[sums[at : at + 4] for at in range(0, len(sums), 4)],
        versions={
            name: file.fields("versions").text(name, 100) for name in ("trinamo", "python", "trio")
        },
    )


def _scenario(fields: _Fields, packages: tuple[str, ...]) -> Scenario:
    module, function = fields.text("module", 200), fields.text("function", 100)
    if not MODULE.fullmatch(module) or not function.isidentifier() or function.startswith("_"):
        raise BadFailureFile(f"scenario {module}:{function} is no module and public function")
    if not any(f"{module}.".startswith(f"{package}.") for package in packages):
        raise BadFailureFile(_played_elsewhere(module, packages))
    parameters = fields.get("parameters")
    if not isinstance(parameters, dict):
        raise BadFailureFile("scenario.parameters must be an object")
    return Scenario(module, function, parameters)


def _played_elsewhere(module: str, packages: tuple[str, ...]) -> str:
    if module == MARKED_TEST:
        return "it is the failure of a test: `pytest --sim-replay` plays it"
    if MARKED_TEST in packages and module.startswith("trinamo.sim."):
        return "it is the failure of a scenario: `trinamo sim replay` plays it"
    return f"scenario.module {module} is not in {', '.join(packages)}"


def _values(fields: _Fields) -> tuple[list[int] | None, int]:
    count, runs = fields.integer("count", 0, CHOICES_MAX), fields.get("runs")
    if runs is None:
        return None, count
    values: list[int] = []
    for pair in runs if isinstance(runs, list) else [None]:
        if not (
            isinstance(pair, list)
            and len(pair) == 2
            and all(type(each) is int and 0 <= each <= 2**63 for each in pair)
            and len(values) + pair[1] <= count
        ):
            raise BadFailureFile("choices.runs must be [value, how often] pairs, count in all")
        values += [pair[0]] * pair[1]
    if len(values) != count:
        raise BadFailureFile(f"choices.runs has {len(values)} decisions, and count is {count}")
    return values, count


def _rows(packed: Any) -> list[str] | None:
    if packed is None:
        return None
    try:
        unpacker = zlib.decompressobj()
        raw = unpacker.decompress(base64.b85decode(packed), ROWS_TEXT_MAX)
        if not unpacker.eof:
            raise BadFailureFile("rows is cut short, or too much")
        return raw.decode().split("\n") if raw else []
    except (TypeError, ValueError, zlib.error) as error:
        raise BadFailureFile(f"rows is not packed as it should be: {error}") from error
