from __future__ import annotations

import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import trio

from trinamo.sim import Choices, ReplayChoices, SeedChoices, Violation, World
from trinamo.sim.explore import (
    BadFailureFile,
    Failure,
    Run,
    Scenario,
    load_failure,
    replay,
    run,
    save_failure,
    shrink,
)

STALE_ACK = Scenario("trinamo.sim.programs.leased_queue", parameters={"fenced": False})


def _failing(scenario: Scenario = STALE_ACK) -> Run:
    return next(found for seed in range(200) if (found := run(scenario, seed)).finding)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "failure.json"


def test_a_failure_replays_exactly_from_its_file(path: Path) -> None:
    failing = _failing()
    save_failure(Failure.of(STALE_ACK, failing), path)
    again = replay(load_failure(path))
    assert again.is_exact
    assert again.played.run == failing
    assert path.stat().st_size < 4000
    assert json.loads(path.read_text())["choices"]["runs"] is None, "the seed says it all"


def test_a_shrunk_failure_replays_exactly_from_its_file(path: Path) -> None:
    shrunk = shrink(STALE_ACK, SeedChoices(_failing().seed))
    save_failure(Failure.of(shrunk.scenario, shrunk.run), path)
    again = replay(load_failure(path))
    assert again.is_exact
    assert again.played.run.deviation_count == 1


def play_long(choices: Choices, rows: int = 20_000, odd: int = -1) -> None:
    """Many rows; the one numbered `odd` is another one than it was."""
    world = World(choices, policy="fifo", trace_steps=False)

    async def main() -> None:
        for number in range(rows):
            world.note("row", number=number, noise=choices.below(1000, "noise"), odd=number == odd)
        await trio.lowlevel.checkpoint()
        raise Violation("I0", "always")

    world.run(main)


def test_a_replay_of_changed_code_names_the_first_row_that_differs(path: Path) -> None:
    scenario = Scenario(__name__, "play_long", {"rows": 50})
    save_failure(Failure.of(scenario, run(scenario, 1)), path)
    failure = load_failure(path, packages=(__name__,))
    assert replay(failure).is_exact
    departed = replay(failure, scenario.changed(odd=17))
    assert departed.difference.startswith("row 17:\n  recorded (0.0, 'driver', 'row'")
    assert "('odd', True)" in departed.difference
    longer = replay(failure, scenario.changed(rows=51))
    assert longer.difference.startswith("row 50:\n  recorded (0.0, 'driver', 'drawn'")


def test_a_long_run_is_filed_with_checksums_that_bracket_the_difference(path: Path) -> None:
    scenario = Scenario(__name__, "play_long")
    save_failure(Failure.of(scenario, run(scenario, 1)), path)
    assert path.stat().st_size < 100_000
    failure = load_failure(path, packages=(__name__,))
    assert failure.rows is None
    assert failure.marks.stride == 5
    assert replay(failure).is_exact
    departed = replay(failure, scenario.changed(odd=12_345))
    assert departed.difference.startswith("row 12345 or one after it, up to 12349; now they are")


def test_a_failure_too_large_for_a_file_is_refused(path: Path) -> None:
    scenario = Scenario(__name__, "play_long", {"rows": 40_000})
    long = run(scenario, ReplayChoices([7, 8] * 20_000))
    with pytest.raises(ValueError, match="at most 100000; shrink the run first"):
        save_failure(Failure.of(scenario, long), path)


def test_other_versions_are_told_of(path: Path) -> None:
    save_failure(Failure.of(STALE_ACK, _failing()), path)
    content = json.loads(path.read_text())
    content["versions"]["trio"] = "0.1"
    content["digest"] = "0"
    path.write_text(json.dumps(content))
    failure = load_failure(path)
    again = replay(failure)
    assert failure.version_changes == [f"trio was 0.1 and is {trio.__version__}"]
    assert "trio was 0.1" in again.difference


def _set(*keys: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        *path, last = keys
        for key in path:
            content = content[key]
        content[last] = to

    return change


BAD: dict[str, Callable[[dict[str, Any]], None]] = {
    "schema is 'x/2'": _set("schema", to="x/2"),
    r"Expected `int`, got `str` - at `\$.seed`": _set("seed", to="1"),
    r"Expected `int`, got `float` - at `\$.seed`": _set("seed", to=1.5),
    r"Expected `str`, got `null` - at `\$.digest`": _set("digest", to=None),
    r"Expected `object`, got `array` - at `\$.scenario`": _set("scenario", to=[]),
    "is no module": _set("scenario", "module", to="os; import sys"),
    "no module and public function": _set("scenario", "function", to="_private"),
    "scenario.module os is not in trinamo": _set("scenario", "module", to="os"),
    "trinamo_evil is not in": _set("scenario", "module", to="trinamo_evil"),
    r"at `\$.scenario.parameters`": _set("scenario", "parameters", to=3),
    r"at `\$.choices.count`": _set("choices", "count", to=-1),
    r"at `\$.choices.runs\[0\]\[1\]`": _set("choices", "runs", to=[[0, -1]]),
    "choices.runs has 1000000000000 decisions": _set("choices", "runs", to=[[0, 10**12]]),
    "choices.runs has 1 decisions": _set("choices", "runs", to=[[0, 1]]),
    r"at `\$.violation.text`": _set("violation", "text", to=3),
    r"at `\$.violation.at_s`": _set("violation", "at_s", to=True),
    "rows is not packed": _set("rows", to="not zlib"),
    r"at `\$.marks.stride`": _set("marks", "stride", to=0),
    "missing required field `trio`": _set("versions", to={"trinamo": "1", "python": "3"}),
}


@pytest.mark.parametrize("words", BAD)
def test_a_bad_field_is_named(path: Path, words: str) -> None:
    save_failure(Failure.of(STALE_ACK, _failing()), path)
    content = json.loads(path.read_text())
    BAD[words](content)
    path.write_text(json.dumps(content))
    with pytest.raises(BadFailureFile, match=words):
        load_failure(path)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "no JSON"),
        (b"[]", "Expected `object`, got `array`"),
        (b"\xff\xfe{", "no JSON"),
        (b"[" * 90_000, "no JSON"),
        (b" " * 200_000, "larger than 100000"),
    ],
)
def test_a_file_that_is_no_failure_file_is_refused(path: Path, raw: bytes, words: str) -> None:
    path.write_bytes(raw)
    with pytest.raises(BadFailureFile, match=words):
        load_failure(path)


def test_a_checkout_that_nobody_installed_saves_and_replays(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    save_failure(Failure.of(STALE_ACK, _failing()), path)

    failure = load_failure(path)
    assert failure.versions.trinamo == "checkout"
    assert replay(failure).is_exact
