"""Functions in anybody's file as scenarios: which ones are, what they are given, what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trinamo.sim import BadScenario, Network, SeedChoices, Violation, World, own_scenario
from trinamo.sim.explore import Scenario, played, run
from trinamo.sim.own import file_stem, functions_of, own_change

RACE = """\
import trio
from trinamo.sim import Violation, World


async def race(world, network):
    seen = []

    async def serve(stream):
        async for chunk in stream:
            seen.append(bytes(chunk))

    async def ask(name):
        async with await trio.open_tcp_stream("server", 7000) as stream:
            await stream.send_all(name)

    world.boot("server", trio.serve_tcp, serve, 7000)
    await trio.sleep(0.1)
    asking = [world.boot(name, ask, name.encode()) for name in ("a", "b")]
    for host in asking:
        await host.ended.wait()
    await trio.sleep(1)
    world.note("seen", order=b"".join(seen))
    if seen == [b"b", b"a"]:
        raise Violation("order", f"{seen}")


def dice(choices, faults=((1, "a"), (2, "b")), policy="batch"):
    world = World(choices, policy=policy)

    async def main():
        world.note("faults", of=str(faults))
        if choices.below(3, "die") == 2:
            raise Violation("die", f"it was two, with {len(faults)} faults")

    world.run(main)


def _private(world):
    pass


def takes_more(world, port):
    pass


def helper(number=1):
    return number
"""


@pytest.fixture(autouse=True)
def _nothing_stays_imported() -> Iterator[None]:
    modules, path = set(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - modules:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith("/tmp"):
            del sys.modules[name]
    sys.path[:] = path


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("protocol.py")
    path.write_text(RACE)
    return path


def test_functions_that_take_the_parts_of_a_run_are_scenarios(file: Path) -> None:
    assert functions_of(file) == ["race", "dice"]


def test_an_async_function_is_the_main_of_a_world_with_a_network(file: Path) -> None:
    results = [run(own_scenario(file, "race"), seed) for seed in range(12)]
    broken = {result.finding.invariant for result in results if result.finding}
    assert broken == {"order"}
    assert any(result.finding is None for result in results)


def test_a_function_of_choices_makes_its_own_world(file: Path) -> None:
    results = [run(own_scenario(file, "dice"), seed) for seed in range(20)]
    assert {bool(result.finding) for result in results} == {True, False}


def test_one_seed_is_one_run(file: Path) -> None:
    play = own_scenario(file, "race")
    assert run(play, 3).digest == run(play, 3).digest
    assert run(play, 3).digest != run(play, 4).digest


def test_a_plan_of_faults_is_a_parameter_that_can_be_made_shorter(file: Path) -> None:
    play = own_scenario(file, "dice")
    assert play.parameters["faults"] == [[1, "a"], [2, "b"]]
    rows = played(play.changed(faults=[]), 0).trace.rows
    assert [row.field("of") for row in rows if row.kind == "faults"] == ["[]"]


def test_another_policy_is_handed_on(file: Path) -> None:
    for function in ("race", "dice"):
        choices = SeedChoices(1)
        own_scenario(file, function, policy="step")(choices)
        assert isinstance(choices.world, World)
        assert choices.world.policy == "step"


def test_a_scenario_is_named_by_its_file_from_here(file: Path, tmp_path: Path) -> None:
    play = own_scenario(tmp_path / "protocol.py", "dice")
    assert play.parameters["file"] == "protocol.py"
    assert file_stem(play) == "protocol-dice"


def test_a_file_that_changed_is_noticed(file: Path) -> None:
    play = own_scenario(file, "dice")
    assert own_change(play) == ""
    file.write_text(RACE + "# more\n")
    assert "protocol.py has changed" in own_change(play)


def test_what_lies_beside_the_file_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("LIMIT = 7\n")
    path = tmp_path / "uses_it.py"
    path.write_text(
        "from beside_it import LIMIT\n\nasync def main(world):\n    world.note('limit', of=LIMIT)\n"
    )
    rows = played(own_scenario(path), 0).trace.rows
    assert [row.field("of") for row in rows if row.kind == "limit"] == [7]


def test_a_file_in_a_package_is_imported_as_part_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "a_package_of_theirs"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "limits.py").write_text("LIMIT = 8\n")
    path = folder / "scenario.py"
    path.write_text(
        "from .limits import LIMIT\n\nasync def main(world):\n    world.note('limit', of=LIMIT)\n"
    )
    rows = played(own_scenario(path), 0).trace.rows
    assert [row.field("of") for row in rows if row.kind == "limit"] == [8]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "say which scenario of protocol.py: protocol.py::NAME, with one of race, dice"),
        ("rcae", "protocol.py has no function 'rcae'; it has race, dice"),
        ("_private", "is private"),
        ("takes_more", "takes port: a scenario takes"),
        ("helper", "takes none of"),
    ],
)
def test_what_is_no_scenario_is_refused_with_a_sentence(file: Path, name: str, words: str) -> None:
    with pytest.raises(BadScenario, match=words):
        own_scenario(file, name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def scenario(world:\n", "line 1 is no Python"),
        (
            "import no_such_module_at_all\ndef scenario(world): ...\n",
            "cannot be imported: ModuleNot",
        ),
        ("def scenario(world): ...\ndel scenario\n", "does not define scenario"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_a_sentence(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "theirs.py"
    path.write_text(text)
    with pytest.raises(BadScenario, match=words):
        own_scenario(path)
    with pytest.raises(BadScenario, match="cannot be read"):
        own_scenario(tmp_path / "nowhere.py")


def test_a_private_file_is_not_run_before_it_is_known_to_hold_a_scenario(tmp_path: Path) -> None:
    """A failure file may name any file below its folder: what holds no scenario is not imported."""
    path = tmp_path / "setup_of_theirs.py"
    path.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n\ndef wipe(folder): ...\n")
    play = Scenario("trinamo.sim.own.scenario", "play", {"file": str(path), "function": "wipe"})
    with pytest.raises(BadScenario):
        play(SeedChoices(0))
    assert not (tmp_path / "ran").exists()


def test_a_world_that_is_never_run_is_a_mistake_of_the_scenario(tmp_path: Path) -> None:
    path = tmp_path / "forgets.py"
    path.write_text("def scenario(world, network):\n    network.cut('a', 'b')\n")
    with pytest.raises(BadScenario, match=r"did not run it: call world\.run\(main\)"):
        run(own_scenario(path), 0)


def test_an_error_before_there_is_a_world_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "breaks.py"
    path.write_text("def scenario(choices):\n    return undefined_name\n")
    with pytest.raises(BadScenario, match=r"NameError: .*breaks\.py, line 2"):
        run(own_scenario(path), 0)


def test_a_network_is_given_to_who_asks_for_it(tmp_path: Path) -> None:
    path = tmp_path / "asks.py"
    path.write_text(
        "async def main(network, choices, world):\n"
        "    assert network.world is world and world.choices is choices\n"
        "    world.note('is', network=type(network).__name__)\n"
    )
    rows = played(own_scenario(path), 0).trace.rows
    assert [row.field("network") for row in rows if row.kind == "is"] == [Network.__name__]


def test_a_violation_is_what_the_function_raised(file: Path) -> None:
    play = own_scenario(file, "dice")
    seed = next(seed for seed in range(20) if run(play, seed).finding)
    with pytest.raises(Violation, match="die: it was two"):
        play(SeedChoices(seed))
