"""The pytest plugin in a fresh folder: what a user writes, runs, and reads when it fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT

RACE = '''
import pytest
import trio

from trinamo.sim import Violation


@pytest.fixture
def greeting():
    return b"hello"


@pytest.mark.sim(seeds=50, policy="fifo")
async def test_race(world, network, greeting):
    """Two clients; now and then the second is heard first."""
    heard = []

    async def answer(stream):
        heard.append(b"".join([bytes(chunk) async for chunk in stream]))

    async def ask(name):
        await trio.sleep(0.01 * world.choices.below(3, "thinks"))
        async with await trio.open_tcp_stream("server", 7000) as stream:
            await stream.send_all(greeting + name)

    world.boot("server", trio.serve_tcp, answer, 7000)
    await trio.sleep(0.1)
    for host in [world.boot(name, ask, name.encode()) for name in ("a", "b")]:
        await host.ended.wait()
    await trio.sleep(1)
    world.note("heard", count=len(heard))
    assert heard[:1] == [b"helloa"], "the second came first"
'''
INI = "[pytest]\naddopts = -p trinamo.pytest_plugin --strict-markers\nfilterwarnings = error\n"


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "pytest.ini").write_text(INI)

    def run(self, code: str, *arguments: str) -> tuple[int, str]:
        (self.path / "test_it.py").write_text(code)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *arguments],
            cwd=self.path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "trinamo.cli", "sim", *words],
            cwd=self.path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.mark.check
def test_a_failure_is_told_with_its_rule_seed_decisions_command_and_page(folder: Folder) -> None:
    """Also beside pytest-trio and xdist; the command that it prints replays it."""
    code, told = folder.run(RACE, "--sim-html", "pages", "-n", "1", "-o", "trio_mode=true")
    assert code == 1, told
    assert "error AssertionError broken in test_it.py::test_race, seed " in told
    assert "the second came first" in told
    assert re.search(r"decisions: \d+ that are not the default before shrinking, 1 after", told)
    assert "thinks = 1 of 3" in told
    assert re.search(r"at test_it\.py:\d+: assert heard", told)
    assert "traceback entries are hidden" not in told
    page = re.search(r"page: (\S+\.html)", told)
    assert page is not None
    assert "test_race" in (folder.path / page[1]).read_text()
    command = re.search(r"replay: pytest (\S+) --sim-replay (\S+)", told)
    assert command is not None
    code, again = folder.run(RACE, command[1], "--sim-replay", command[2])
    assert code == 1
    assert "the second came first" in again
    assert "def test_race" in again, "a replay fails with its own traceback"


@pytest.mark.check
def test_a_mended_test_passes_its_replay_with_a_warning_that_the_run_is_another(
    folder: Folder,
) -> None:
    code, told = folder.run(RACE, "--sim-html", "pages")
    file = re.search(r"--sim-replay (\S+)", told)
    assert file is not None, told
    mended = RACE.replace('assert heard[:1] == [b"helloa"]', "assert heard").replace(
        "0.01 * world", "0.02 * world"
    )
    code, told = folder.run(mended, "--sim-replay", file[1], "-W", "default")
    assert code == 0, told
    assert "not the recorded run any more" in told
    code, told = folder.run(mended.replace("test_race", "test_else"), "--sim-replay", file[1])
    assert (code, "1 skipped" in told) == (0, True), told


@pytest.mark.check
def test_a_saved_failure_is_played_before_the_seeds_until_it_holds_twice(folder: Folder) -> None:
    saved = folder.path / ".pytest_cache/d/trinamo-sim"
    _, first = folder.run(RACE)
    # None of the seeds is played: the failure is there already, and small.
    status, again = folder.run(RACE)
    assert status == 1
    assert "1 of 1 runs failed" in again
    assert "1 of 1 runs failed" not in first
    (file,) = saved.glob("*.json")
    mended = RACE.replace("assert heard[:1] == ", "assert heard or ")
    status, output = folder.run(mended, "-W", "default")
    assert status == 0, output
    assert not file.exists()
    assert not file.with_suffix(".html").exists()


@pytest.mark.check
def test_a_file_that_no_test_can_play_gets_a_sentence(folder: Folder) -> None:
    _, told = folder.run(RACE, "--sim-html", "pages")
    file = re.search(r"--sim-replay (\S+)", told)
    assert file is not None, told
    text = (folder.path / file[1]).read_text()
    (folder.path / "swarm.json").write_text(text.replace("sim.own.marked", "sim.own.scenario"))

    code, told = folder.run(RACE, "--sim-replay", "swarm.json")
    assert code == 1
    assert "of a scenario: `trinamo sim replay` plays it" in told
    code, told = folder.run(RACE, "--sim-replay", "nothing.json")
    assert code == 1
    assert "--sim-replay: nothing.json cannot be read: No such file or directory" in told
    assert "Traceback" not in told
    done = folder.command("shrink", file[1])
    assert done.returncode == 2
    assert "of a test: `pytest --sim-replay` plays it" in done.stderr
    (folder.path / "test_it.py").rename(folder.path / "gone.py")
    done = folder.command("replay", file[1])
    assert done.returncode == 2
    assert "is of a test in 'test_it.py', and there is no such file" in done.stderr


@pytest.mark.check
def test_a_seed_or_a_number_of_seeds_can_be_asked_for(folder: Folder) -> None:
    counting = """
import pytest

runs = []

@pytest.mark.sim(seeds=[5, 7])
def test_seeds(choices, world):
    assert world.choices is choices
    async def main():
        runs.append(choices.seed)
        world.note("die", value=choices.below(9, "die"))
    world.run(main)

def test_afterwards():
    with open("runs", "w") as file:
        print(runs, file=file)

def test_one_run_without_the_mark(choices, world, network):
    assert network.world is world
    with open("seed", "w") as file:
        print(choices.seed, file=file)
"""
    for arguments, runs, seed in (
        ([], "[5, 7]", "0"),
        (["--sim-seeds", "3"], "[0, 1, 2]", "0"),
        (["--sim-seed", "9"], "[9]", "9"),
    ):
        code, told = folder.run(counting, *arguments)
        assert code == 0, told
        # Every so often a run is played twice, to see that it is the same.
        seen = list(dict.fromkeys(eval((folder.path / "runs").read_text())))
        assert str(seen) == runs
        assert (folder.path / "seed").read_text().strip() == seed


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("def test_it(tmp_path): pass", "must take choices, world or network"),
        ("def test_it(world): pass", "made a world and did not run it"),
        ("def test_it(choices): raise KeyError('x')", "KeyError"),
    ],
)
def test_a_mistake_gets_a_sentence(folder: Folder, code: str, sentence: str) -> None:
    status, told = folder.run(f"import pytest\n\n@pytest.mark.sim(seeds=2)\n{code}\n")
    assert status == 1
    assert re.search(sentence, told), told


def test_a_plain_run_of_pytest_imports_nothing_of_the_simulator(folder: Folder) -> None:
    code, told = folder.run(
        "import sys\n\ndef test_it():\n"
        "    heavy = ('trinamo.sim', 'trinamo.runtime', 'trio', 'hypothesis')\n"
        "    assert [name for name in heavy if name in sys.modules] == []\n",
        "-p", "no:trio", "-p", "no:hypothesispytest", "-p", "no:anyio", "-p", "no:xdist",
    )  # fmt: skip
    assert code == 0, told


def test_the_package_offers_the_plugin_to_pytest() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert (
        '[project.entry-points.pytest11]\n"trinamo.pytest_plugin" = "trinamo.pytest_plugin"' in text
    )


OPTIONS = """
import time

import pytest
import trio

from trinamo.sim import arm

PLAN = [
    {"do": "pause", "host": "a", "at_s": 1, "for_s": 2},
    {"do": "kill", "host": "a", "at_s": 5},
    {"do": "cut", "host": "a", "to": "b", "at_s": 6, "for_s": 1},
]


async def beats(world):
    while True:
        await trio.sleep(1)
        world.note("beat", read_s=time.monotonic())


@pytest.mark.sim(seeds=5, policy="fifo", ambient="virtual", faults=PLAN)
async def test_beats(world):
    host = world.boot("a", beats, world)
    await trio.sleep(8)
    assert world.policy == "fifo"
    assert host.state.value == "up", "it died"


@pytest.mark.sim(seeds=5, faults=PLAN[:1])
async def test_own_plan(world, network, faults):
    assert [fault["do"] for fault in faults] == ["pause"]
    world.boot("a", beats, world)
    arm(world, network, faults)
    await trio.sleep(2)
    assert world.struck["pause"] == 1, "not armed twice"


@pytest.fixture
def sim_options():
    return {"policy": "step", "ambient": "virtual", "faults": PLAN[1:2]}


def test_fixtures(world, network):
    async def main():
        world.boot("a", beats, world)
        await trio.sleep(8)

    world.run(main)
    assert world.policy == "step"
    assert world.noted["beat"] == 4


@pytest.fixture
def mine():
    return "mine"


class TestOwnFixture:
    @pytest.fixture
    def faults(self, mine):
        return mine

    @pytest.mark.sim(seeds=1)
    async def test_called_faults(self, world, faults):
        assert faults == "mine"
        await trio.sleep(world.choices.below(3, "how long"))


@pytest.mark.sim(ambient="raise")
def test_makes_its_own(choices):
    pass
"""


def test_the_mark_and_the_fixtures_take_a_policy_ambient_and_a_plan_of_faults(
    folder: Folder,
) -> None:
    code, told = folder.run(OPTIONS, "--sim-html", "pages")
    assert code == 1
    assert "2 failed, 3 passed" in told
    assert "test_makes_its_own makes its own world, which takes the ambient" in told
    assert "it died" in told
    file = re.search(r"--sim-replay (pages/test_it-test_beats\S+)", told)
    assert file is not None
    # Only the fault that matters is left in the plan, and a replay plays that plan.
    plan = json.loads((folder.path / file[1]).read_text())["scenario"]["parameters"]["faults"]
    assert [fault["do"] for fault in plan] == ["kill"]
    code, told = folder.run(OPTIONS, "-k", "test_beats", "--sim-replay", file[1], "-W", "error")
    assert code == 1
    assert "it died" in told
    assert "not the recorded run" not in told


FED = """
import pytest
import trio
from hypothesis import HealthCheck, assume, example, given, settings, strategies as st

from trinamo.sim import Choices, Network, ReplayChoices, World, arm
from trinamo.sim.strategies import choices, fault_plans, schedules

runs = []

class Opaque:
    pass

@pytest.fixture
def limit():
    return 3

class TestDrawn:
    @settings(derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(choices(), fault_plans(["a", "b"], kinds=["kill", "pause"]), schedules(), st.tuples(st.integers(0, 3), st.booleans()))
    def test_drawn(self, limit, drawn: Choices, plan, policy, pair: tuple[int, bool]):
        runs.append(pair)
        world = World(drawn, policy=policy)
        network = Network(world)

        async def main():
            for name in ("a", "b"):
                world.boot(name, trio.sleep_forever)
            arm(world, network, plan)
            noise = [drawn.below(10, "noise") for _ in range(20)]
            die = drawn.below(6, "die")
            await trio.sleep(10)
            world.note("end")
            assert die < limit or "kill" not in world.struck, "killed"

        world.run(main)
        assume(True)

    def test_few_runs(self):
        assert len(runs) < 400

@settings(derandomize=True, deadline=None)
@given(drawn=choices(), what=st.builds(Opaque))
def test_opaque(drawn, what):
    async def main():
        assert drawn.below(6, "die") < 5, "five"

    World(drawn).run(main)

@given(drawn=choices(), number=st.integers())
def test_fails_without_a_run(drawn, number):
    assert number < 10
"""


@pytest.mark.check
def test_what_hypothesis_finds_is_made_small_saved_and_played_again(folder: Folder) -> None:
    """By our shrinker, which knows decisions and faults; by pytest or by the simulator's command."""
    code, told = folder.run(FED, "--sim-html", "pages", "-p", "no:cacheprovider")
    assert code == 1, told
    assert "3 failed, 1 passed" in told, told
    assert re.search(r"decisions: \d+ that are not the default before shrinking, 1 after", told)
    assert "die = 3 of 6" in told
    assert "drawn=<256 drawn decisions" in told, "no list of hundreds"
    file = re.search(r"--sim-replay (pages/test_it-test_drawn\S+)", told)
    assert file is not None, told
    saved = json.loads((folder.path / file[1]).read_text())["scenario"]["parameters"]
    assert [fault["do"] for fault in saved["faults"]] == ["kill"]
    code, again = folder.run(FED, "-k", "test_drawn", "--sim-replay", file[1], "-W", "error")
    assert (code, "killed" in again, "2 skipped" in again) == (1, True, False), again
    done = folder.command("replay", file[1])
    assert (done.returncode, "AssertionError: killed" in done.stdout) == (1, True), done.stdout
    # What JSON cannot hold is drawn again by Hypothesis.
    assert "replay: pytest test_it.py::test_opaque\n" in told
    assert "die = 5 of 6" in told
    text = (folder.path / file[1]).read_text().replace('"pair":[[', '"pair":[["x",')
    (folder.path / "wrong.json").write_text(text)
    _, wrong = folder.run(FED, "-k", "test_drawn", "--sim-replay", "wrong.json")
    assert "--sim-replay: scenario.parameters.drawn: " in wrong
