"""Libraries of others, as published, on simulated ground: those without a known bug hold, the others do not.

Each scenario of `scenarios/` is played in an environment of the libraries' own, with seeds that nobody
has played, each twice; what is known of them is the table below.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any, Final

import attrs
import pytest

from tests.clients.environments import INSTALL_TIMEOUT_S, Environment, InstallError, environ
from tests.needs import A_PROGRAM
from tests.sources import ROOT

# The first test may install the libraries, which is given more time than a test that hangs.
pytestmark = [pytest.mark.check, pytest.mark.timeout(INSTALL_TIMEOUT_S + 600)]

ENVIRONMENT: Final = Environment("published", pinned_in=Path(__file__).with_name("pins"))
LINES_MAX: Final = 60
OVER_PROCESSES: Final = 3
"""Seeds that are also played in a second process, with hashes of its own."""
PLAY_TIMEOUT_S: Final = 300.0


@attrs.frozen
class Scenario:
    """A file of `scenarios/`, and what its seeds are to show."""

    name: str
    seeds: int
    """Each played twice. Where a bug is known, so many that fewer than one in 10,000 rounds miss it."""
    finds: str = ""
    """How the finding begins that some seed must have, and no seed another; empty if all must hold."""
    has_certificates: bool = False
    """Whether each process makes some, so that its digests are its own."""


SCENARIOS: Final = (
    Scenario("aiohttp_", 25),
    # A job that is closed while it waits makes room for one too many: 25 %.
    Scenario("locks/aiojobs_", 60, "at most two jobs run"),
    # The answer to a command that was given up goes to the next: 22 %.
    Scenario("aiomcache_", 60, "error "),
    # A lost connection is told as a cancellation: 30 %.
    Scenario("aiorpcx_", 40, "error CancelledError"),
    # Readers stay behind a writer who gave up: 8 %.
    Scenario("locks/aiorwlock_", 150, "a reader waits for writers only"),
    Scenario("anyio_", 40),
    # A place of the pool is lost when a connection is given up: 18 to 29 % of the seeds.
    Scenario("pools/coredis_", 80, "recovers: no answer"),
    # A place of the pool is lost when its request is given up as it gets it: 18 to 25 %.
    Scenario("pools/httpcore_", 60, "recovers: no answer"),
    Scenario("hypercorn_", 10),
    Scenario("mcp_", 6),
    Scenario("quart_", 15),
    Scenario("redis_", 15),
    # It reads on after the end: 10 to 26 %.
    Scenario("redio_", 90, "step limit: "),
    # Answers get into those of another connection: 30 to 49 %.
    Scenario("redtrio_", 50, "error "),
    Scenario("ssl_", 15, has_certificates=True),
    # Readers stay behind a writer who gave up: 23 %.
    Scenario("locks/tricycle_", 80, "readers wait for writers only"),
    # A request that is given up stops the reader: 38 to 49 %.
    Scenario("trio_jsonrpc_", 40, "recovers: no answer"),
    Scenario("trio_websocket_", 15),
)


@pytest.fixture(scope="module")
def python() -> str:
    """The interpreter of the libraries' environment, which is made if it is not there."""
    try:
        ENVIRONMENT.make()
    except InstallError as error:
        print(error)
        A_PROGRAM.lacking()
    return str(ENVIRONMENT.folder / "bin" / "python")


def play(python: str, place: Path, name: str, first: int, count: int, hashes: str) -> Any:
    """What `play.py` says of these seeds, in a process of its own."""
    ours = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "PYTHONHASHSEED": hashes}
    done = subprocess.run(
        [python, "-m", "tests.published.play", str(first), f"{name}={count}"],
        cwd=ROOT,
        env=environ(place, ours),
        capture_output=True,
        text=True,
        timeout=PLAY_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_it_runs_as_published_and_replays(scenario: Scenario, python: str, tmp_path: Path) -> None:
    first = time.time_ns() % 10**9

    said = play(python, tmp_path, scenario.name, first, scenario.seeds, "1")

    assert not said["unequal"], f"seeds that differ when they are played again: {said['unequal']}"
    if not scenario.has_certificates:
        again = play(python, tmp_path, scenario.name, first, OVER_PROCESSES, "2")
        assert again["digests"].items() <= said["digests"].items(), again
    others = {
        seed: text
        for seed, text in said["failed"].items()
        if not (scenario.finds and text.startswith(scenario.finds))
    }
    assert not others, others
    assert bool(said["failed"]) == bool(scenario.finds), f"from seed {first} nothing was found"


def test_each_scenario_stands_in_the_table_and_is_short() -> None:
    folder = Path(__file__).with_name("scenarios")
    lines = {
        file.relative_to(folder).with_suffix("").as_posix(): len(
            file.read_text("utf-8").splitlines()
        )
        for file in folder.rglob("*.py")
    }

    assert sorted(lines) == sorted(each.name for each in SCENARIOS)
    assert {name: count for name, count in lines.items() if count > LINES_MAX} == {}
