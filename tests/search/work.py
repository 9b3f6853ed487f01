"""Pieces of a search, each for a process of its own: seeds of a scenario or of a library's, a file of properties."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import attrs

from tests.sources import ROOT
from trinamo.cli.sim.files import scenario_of
from trinamo.sim import Policy
from trinamo.sim.explore import Run, Scenario
from trinamo.sim.explore.swarm import play_seeds

PROFILE: Final = "search"
FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
NOTHING_COLLECTED: Final = 5
MINUTES_MAX: Final = 20


def hush() -> None:
    """Simulated processes tell their story in the trace."""
    logging.disable(logging.CRITICAL)


@attrs.frozen
class Seeds:
    """Some seeds of one scenario, under one policy."""

    name: str
    policy: Policy
    first: int
    count: int
    bug: str = ""
    streams: str | None = None
    """What streams travel on, if the scenario is not about one carrier."""

    @property
    def play(self) -> Scenario:
        return scenario_of(self.name, bug=self.bug, policy=self.policy, streams=self.streams)

    def __call__(self) -> list[Run]:
        return play_seeds(self.play, [*range(self.first, self.first + self.count)])


@attrs.frozen
class Examined:
    """What came of the properties of one file: those that failed, and what pytest said."""

    failed: list[str]
    output: str


@attrs.frozen
class Properties:
    """The properties of one file, with examples that were not drawn before."""

    file: str
    storage: Path
    """Where hypothesis keeps what fails."""

    def environ(self) -> dict[str, str]:
        """What makes a run draw anew, and a replay find what was kept."""
        return {
            "HYPOTHESIS_PROFILE": PROFILE,
            "HYPOTHESIS_STORAGE_DIRECTORY": str(self.storage),
        }

    def command(self, test: str) -> str:
        """How to play a failure of `test` again."""
        words = [f"{key}={value}" for key, value in self.environ().items()]
        return " ".join([*words, sys.executable, "-m pytest", f"'{test}'"])

    def __call__(self) -> Examined:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", self.file, "-m", "hypothesis or search"),
                *("-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", "--timeout=0"),
            ],
            cwd=ROOT,
            env={**os.environ, **self.environ()},
            capture_output=True,
            text=True,
            timeout=60 * MINUTES_MAX,
            check=False,
        )
        output = done.stdout + done.stderr
        if done.returncode in {0, NOTHING_COLLECTED}:
            return Examined([], output)
        return Examined(FAILED.findall(done.stdout) or [self.file], output)


@attrs.frozen
class Published:
    """Some seeds of a scenario of a published library, in the environment of those; each is played twice."""

    name: str
    finds: str
    """How findings begin that are known of the library."""
    first: int
    count: int
    environment: Path

    @property
    def file(self) -> str:
        """As which it is counted."""
        return f"published/{self.name}"

    def _words(self, first: int, count: int) -> list[str]:
        python = str(self.environment / "bin" / "python")
        return [python, "-m", "tests.published.play", str(first), f"{self.name}={count}"]

    def command(self, test: str) -> str:
        """How to play a failure again; `test` ends with its seed."""
        words = self._words(int(test.rpartition(" ")[2]), 1)
        return f"PYTHONPATH={ROOT / 'src'}:{ROOT} {' '.join(words)}"

    def __call__(self) -> Examined:
        done = subprocess.run(
            self._words(self.first, self.count),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
            capture_output=True,
            text=True,
            timeout=60 * MINUTES_MAX,
            check=False,
        )
        output = done.stdout + done.stderr
        if done.returncode:
            return Examined([f"{self.file} cannot be played, from seed {self.first}"], output)
        played = json.loads(done.stdout)
        kinds = dict.fromkeys(played["unequal"], "does not replay") | {
            seed: text
            for seed, text in played["failed"].items()
            if not (self.finds and text.startswith(self.finds))
        }
        first = {text: seed for seed, text in reversed(kinds.items())}
        return Examined(
            [f"{self.file}: {text}, seed {seed}" for text, seed in first.items()], output
        )


def property_files() -> list[str]:
    """The files with tests that hypothesis feeds, or that have more to do in a swarm."""
    return sorted(
        path.relative_to(ROOT).as_posix()
        for folder in ("properties", "tests")
        for path in (ROOT / folder).rglob("test_*.py")
        if re.search(r"^from hypothesis|pytest.mark.search", path.read_text("utf-8"), re.MULTILINE)
    )
