"""The failure file, and its replay: what a failing run is played again from, and where it departs.

JSON, at most `FILE_BYTES_MAX`. It names the scenario (module, function, parameters), the seed and
where decisions come from: the seed itself (then only their number is kept) or a list, run-length
encoded. The rows of the recorded run are kept too, compressed, if they fit; else a checksum of every
so many rows. So a replay that departs says at which row it did.

Reading believes nothing: the size, the types and the bounds are checked, and a scenario is only
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
from typing import Annotated, Any

import attrs
import msgspec
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


Short = Annotated[str, msgspec.Meta(max_length=200)]
Number = Annotated[int, msgspec.Meta(ge=0)]


class Decisions(msgspec.Struct, frozen=True):
    """What a run decided."""

    count: Annotated[int, msgspec.Meta(ge=0, le=CHOICES_MAX)]
    runs: list[tuple[Number, Number]] | None
    """Values and how often each, one after another; null if they are what the seed answers."""


class Marks(msgspec.Struct, frozen=True):
    """A checksum of all rows so far, after every `stride` rows, four characters each."""

    stride: Annotated[int, msgspec.Meta(ge=1, le=10**9)]
    sums: Annotated[str, msgspec.Meta(max_length=4 * MARKS_MAX)]


class Versions(msgspec.Struct, frozen=True):
    """What a run depends on besides the scenario."""

    trinamo: Short
    python: Short
    trio: Short


class Failure(msgspec.Struct, frozen=True):
    """One failing run, as its file has it."""

    schema: Short
    scenario: Scenario
    seed: int
    decisions: Decisions = msgspec.field(name="choices")
    digest: Short
    finding: Finding = msgspec.field(name="violation")
    rows: str | None
    """All rows as text, packed, if they are few enough to keep."""
    marks: Marks
    """Of rows that are not kept."""
    versions: Versions

    @classmethod
    def of(cls, scenario: Scenario, source: Run | Played) -> Failure:
        """Record the failing run; plays it again unless its trace is at hand."""
        if isinstance(source, Run):
            source = played(scenario, ReplayChoices(source.values, source.seed))
        result, rows = source.run, source.trace.texts()
        if result.finding is None:
            raise ValueError("this run does not fail")
        values, packed = result.values, _packed(rows)
        is_kept = len(packed) <= ROWS_BYTES_MAX
        stride = max(1, math.ceil(len(rows) / MARKS_MAX))
        runs = [(each, len(list(same))) for each, same in groupby(values)]
        return cls(
            schema=SCHEMA,
            scenario=scenario,
            seed=result.seed,
            decisions=Decisions(len(values), None if _seeded(result.seed, source) else runs),
            digest=result.digest,
            finding=result.finding,
            rows=packed if is_kept else None,
            marks=Marks(stride, "" if is_kept else "".join(marks(rows, stride))),
            versions=versions(),
        )

    @property
    def values(self) -> list[int] | None:
        """The decisions; None if they are what the seed answers."""
        count, runs = self.decisions.count, self.decisions.runs
        if runs is None:
            return None
        found = sum(often for _, often in runs)
        if found != count:
            raise BadFailureFile(f"choices.runs has {found} decisions, and count is {count}")
        return [value for value, often in runs for _ in range(often)]

    def choices(self) -> Choices:
        """The decisions of the recorded run, for one more."""
        values = self.values
        return SeedChoices(self.seed) if values is None else ReplayChoices(values, self.seed)

    def play(self, scenario: Play | None = None) -> Played:
        """The run again; `scenario` in the place of the named one, if given."""
        return played(scenario or self.scenario, self.choices(), to_draw=True)

    @property
    def version_changes(self) -> list[str]:
        """What has another version than when it was recorded, in words."""
        before, now = map(msgspec.structs.asdict, (self.versions, versions()))
        return [
            f"{name} was {before[name]} and is {now[name]}"
            for name in now
            if before[name] != now[name]
        ]

    def difference(self, trace: Trace) -> str:
        """The first row in which `trace` departs from the recorded run, in words; empty if none."""
        texts = trace.texts()
        if self.rows is not None:
            for number, (old, new) in enumerate(zip(_unpacked(self.rows), texts, strict=False)):
                if old != new:
                    return f"row {number}:\n  recorded {old}\n  now      {new}"
        else:
            stride, sums = self.marks.stride, self.marks.sums
            known = [sums[at : at + 4] for at in range(0, len(sums), 4)]
            for index, (old, new) in enumerate(zip(known, marks(texts, stride), strict=False)):
                if old != new:
                    first, last = index * stride, (index + 1) * stride - 1
                    now = "\n  ".join(texts[first : last + 1][:20])
                    return f"row {first} or one after it, up to {last}; now they are\n  {now}"
        if trace.digest != self.digest:
            return f"the end: the recorded run has other rows after row {len(texts) - 1}"
        return ""


def versions() -> Versions:
    """Those of now."""
    from importlib.metadata import (  # noqa: PLC0415 -- takes longer than a short run
        PackageNotFoundError,
        version,
    )

    try:
        own = version("trinamo")
    except PackageNotFoundError:
        # A checkout on the path, which nobody installed.
        own = "checkout"
    return Versions(own, platform.python_version(), trio.__version__)


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


# --- the file -------------------------------------------------------------------------------------


def save_failure(failure: Failure, path: Path) -> None:
    """Write the file; `ValueError` if it would be larger than `FILE_BYTES_MAX` (shrink first)."""
    text = json.dumps(msgspec.to_builtins(failure, enc_hook=attrs.asdict), separators=(",", ":"))
    if len(text) > FILE_BYTES_MAX:
        raise ValueError(
            f"{len(text)} bytes, and a failure file has at most {FILE_BYTES_MAX}; shrink the run first"
        )
    path.write_text(text + "\n", "utf-8")


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
        return _failure(content, packages)
    except (BadFailureFile, msgspec.ValidationError) as error:
        raise BadFailureFile(f"{path}: {error}") from None


def _failure(content: Any, packages: tuple[str, ...]) -> Failure:
    schema = content.get("schema", SCHEMA) if isinstance(content, dict) else SCHEMA
    if schema != SCHEMA:
        raise BadFailureFile(f"schema is {schema!r}, and this version reads {SCHEMA!r}")
    failure = msgspec.convert(content, Failure)
    _check_place(failure.scenario, packages)
    # Both raise what is wrong with them.
    failure.choices()
    if failure.rows is not None:
        _unpacked(failure.rows)
    return failure


def _check_place(scenario: Scenario, packages: tuple[str, ...]) -> None:
    module, function = scenario.module, scenario.function
    if not MODULE.fullmatch(module) or not function.isidentifier() or function.startswith("_"):
        raise BadFailureFile(f"scenario {module}:{function} is no module and public function")
    if any(f"{module}.".startswith(f"{package}.") for package in packages):
        return
    if module == MARKED_TEST:
        raise BadFailureFile("it is the failure of a test: `pytest --sim-replay` plays it")
    if MARKED_TEST in packages and module.startswith("trinamo.sim."):
        raise BadFailureFile("it is the failure of a scenario: `trinamo sim replay` plays it")
    raise BadFailureFile(f"scenario.module {module} is not in {', '.join(packages)}")


def _packed(rows: list[str]) -> str:
    return base64.b85encode(zlib.compress("\n".join(rows).encode(), 9)).decode()


def _unpacked(packed: str) -> list[str]:
    try:
        unpacker = zlib.decompressobj()
        raw = unpacker.decompress(base64.b85decode(packed), ROWS_TEXT_MAX)
        if not unpacker.eof:
            raise BadFailureFile("rows is cut short, or too much")
        return raw.decode().split("\n") if raw else []
    except (ValueError, zlib.error) as error:
        raise BadFailureFile(f"rows is not packed as it should be: {error}") from error
