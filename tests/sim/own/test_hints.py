"""A beginner's mistakes get a sentence each, and what is no mistake gets none."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from trinamo.sim import (
    Hint,
    Network,
    SeedChoices,
    Violation,
    World,
    own_scenario,
    search,
)
from trinamo.sim.explore import run
from trinamo.sim.own import standing_hints
from trinamo.sim.own.scenario import function_in_file


async def serve(stream: trio.SocketStream) -> None:
    async for chunk in stream:
        await stream.send_all(bytes(chunk))


async def ask(port: int = 7000) -> None:
    async with await trio.open_tcp_stream("server", port) as stream:
        await stream.send_all(b"hello")
        await stream.receive_some()


def hints(scenario: Callable[..., object]) -> list[str]:
    return [*run(function_in_file(scenario), 0).hints]


def only(found: list[str]) -> str:
    (hint,) = found
    return hint


def test_a_healthy_scenario_gets_no_hint() -> None:
    async def healthy(world: World, network: Network) -> None:
        world.boot("server", trio.serve_tcp, serve, 7000)
        await trio.sleep(0.1)
        world.after(1, network.cut, "client", "server")
        await world.boot("client", ask).ended.wait()
        await trio.sleep(2)
        world.kill("server")

    assert hints(healthy) == []


def test_a_handler_that_raised_is_named_with_its_line() -> None:
    async def falls(_stream: trio.SocketStream) -> None:
        raise KeyError("colour")

    async def scenario(world: World) -> None:
        world.boot("server", trio.serve_tcp, falls, 7000)
        await trio.sleep(0.1)
        await world.boot("client", ask).ended.wait()
        await trio.sleep(1)

    hint = only(hints(scenario))
    assert "KeyError left the main function of server (falls, test_hints.py, line " in hint
    assert "catch in its handlers" in hint


def test_an_error_of_the_scenario_itself_is_named_with_its_line() -> None:
    async def scenario(world: World) -> None:
        counts: dict[str, int] = {}
        world.note("hosts", count=counts["none"])

    assert "KeyError was raised by the scenario itself (scenario, test_hints.py, line " in only(
        hints(scenario)
    )


def test_sockets_without_a_network_are_told_what_is_missing() -> None:
    def scenario(world: World) -> None:
        async def main() -> None:
            await ask()

        world.run(main)

    assert "this world has no network" in only(hints(scenario))


def test_a_violation_on_a_host_is_no_mistake() -> None:
    async def breaks() -> None:
        raise Violation("rule", "broken")

    async def scenario(world: World) -> None:
        await world.boot("server", breaks).ended.wait()

    assert hints(scenario) == []


def test_a_port_that_nobody_ever_listened_on_is_named() -> None:
    async def asks_politely() -> None:
        with pytest.raises(OSError, match="connect"):
            await ask(7001)

    async def scenario(world: World) -> None:
        world.boot("server", trio.serve_tcp, serve, 7000)
        await trio.sleep(0.1)
        await world.boot("client", asks_politely).ended.wait()

    assert "client connected to server, port 7001, and nothing ever listened" in only(
        hints(scenario)
    )


async def ask_in_vain() -> None:
    with pytest.raises(OSError, match="called 'server'"):
        await ask()


def test_a_name_that_no_host_ever_had_is_told() -> None:
    async def misspelt(world: World) -> None:
        world.boot("sever", trio.serve_tcp, serve, 7000)
        await trio.sleep(0.1)
        await world.boot("client", ask_in_vain).ended.wait()

    assert "client asked for 'server', and no host of that name was ever booted; there were" in (
        only(hints(misspelt))
    )


def test_a_host_that_is_booted_later_is_no_mistake() -> None:
    async def early(world: World) -> None:
        await world.boot("client", ask_in_vain).ended.wait()
        world.boot("server", trio.serve_tcp, serve, 7000)
        await trio.sleep(0.1)
        await world.boot("client", ask).ended.wait()

    assert hints(early) == []


def test_a_server_that_was_killed_did_listen() -> None:
    async def asks_politely() -> None:
        with pytest.raises(OSError, match="connect"):
            await ask()

    async def scenario(world: World) -> None:
        world.boot("server", trio.serve_tcp, serve, 7000)
        await trio.sleep(0.1)
        await world.boot("other", ask).ended.wait()
        world.kill("server")
        await world.boot("client", asks_politely).ended.wait()

    assert hints(scenario) == []


def test_a_host_that_does_not_exist_is_told_from_those_that_do() -> None:
    async def scenario(world: World) -> None:
        world.boot("server", trio.serve_tcp, serve, 7000)
        await trio.open_tcp_stream("sevrer", 7000)

    finding = run(function_in_file(scenario), 0).finding
    assert finding is not None
    assert "no simulated host is called 'sevrer'; those that were booted are server" in finding.text


def test_a_fault_aimed_at_a_host_that_never_was_is_named() -> None:
    async def scenario(world: World, network: Network) -> None:
        world.boot("server", trio.sleep, 5)
        world.after(0.1, world.kill, "sevrer")
        world.after(0.1, network.cut, "client", "server")
        await trio.sleep(1)

    first, second = hints(scenario)
    assert (
        "(kill) was aimed at 'sevrer', and no host of that name was ever booted; there were server"
        in first
    )
    assert "(cut) was aimed at 'client'" in second


def test_a_fault_planned_for_after_the_end_is_named() -> None:
    async def scenario(world: World) -> None:
        world.boot("server", trio.sleep, 5)
        world.after(20, world.kill, "server")
        await trio.sleep(1)

    assert only(hints(scenario)) == (
        "kill('server') never struck: it was planned for 20 s, and the run ended at 1 s"
    )


def test_a_run_that_waits_for_nobody_is_told() -> None:
    async def scenario(world: World) -> None:
        world.boot("server", trio.serve_tcp, serve, 7000)
        world.boot("client", ask)

    assert "the run ended at 0 s, with server, client still at work" in only(hints(scenario))


def test_an_await_that_was_forgotten_is_named_with_its_line() -> None:
    async def scenario(world: World) -> None:
        trio.sleep(1)  # type: ignore[unused-coroutine]  # noqa: ASYNC105
        world.note("slept")
        await trio.sleep(1)

    hint = only(hints(scenario))
    assert "coroutine 'sleep' was never awaited (test_hints.py, line " in hint


@pytest.mark.parametrize("is_boot", [True, False])
def test_a_call_in_the_place_of_a_function_is_a_sentence(is_boot: bool) -> None:
    world = World(SeedChoices(0))

    async def main() -> None:
        world.boot("server", ask(7000))  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="give the function itself and its arguments"):
        world.run(main if is_boot else main())  # type: ignore[arg-type]


def test_a_search_in_which_nothing_can_go_wrong_warns() -> None:
    def still(choices: SeedChoices) -> None:
        world = World(choices)
        network = Network(world, jitter_s=0, tear_one_in=0)

        async def main() -> None:
            world.boot("server", trio.serve_tcp, serve, 7000)
            await trio.sleep(0.1)
            await world.boot("client", ask).ended.wait()

        assert network.world is world
        world.run(main)

    with pytest.warns(Hint, match="nothing can go wrong in this run"):
        search(still, seeds=range(4))


def test_a_search_in_which_only_delays_vary_says_what_to_add() -> None:
    async def only_delays(world: World) -> None:
        world.boot("server", trio.serve_tcp, serve, 7000)
        await trio.sleep(0.1)
        await world.boot("client", ask).ended.wait()

    with pytest.warns(Hint, match="only the delays of messages vary"):
        search(only_delays, seeds=range(4))


UNCHECKED = "async def scenario(world):\n    world.note('done')\n"


@pytest.mark.parametrize(
    "more",
    [
        "assert True",
        "def judge():\n    raise ValueError('stale')",
        "from trinamo.sim import checks",
        "from rules_of_theirs import judge",
    ],
)
def test_a_file_in_which_something_is_checked_is_told_from_one_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rules_of_theirs.py").write_text("def judge(x):\n    assert x\n")
    path = tmp_path / "unchecked_of_theirs.py"
    path.write_text(UNCHECKED)
    assert "nothing is checked in" in only(standing(path))
    path.write_text(textwrap.dedent(UNCHECKED + more + "\n"))
    assert standing(path) == []


WATCHED = """
import trio
from trinamo.sim import Linearizability, SeedChoices, register


async def scenario(world):
    history = world.watch(Linearizability(register))
    world.choices.below(2, "coin")
    history.ends(history.call("a", "read"))
"""
CRASHED = """
import trio


async def scenario(world):
    async def work():
        for _ in range(world.choices.below(5, "work") + 4):
            world.note("granted")
            await trio.sleep(1)

    world.boot("a", work)
    await trio.sleep(3.5)
    world.kill("a")
    {after}
    assert world is not None
"""


def standing(path: Path) -> list[str]:
    scenario = own_scenario(path)
    return standing_hints(scenario, run(scenario, 0))


def test_a_scenario_whose_runs_are_watched_checks_something(tmp_path: Path) -> None:
    """Whatever the checker is called: the run is asked, and its file only if that says no."""
    path = tmp_path / "watched_of_theirs.py"
    path.write_text(WATCHED)
    assert standing(path) == []


def test_a_scenario_that_is_over_with_its_fault_is_told_what_it_does_not_see(
    tmp_path: Path,
) -> None:
    path = tmp_path / "crashed_of_theirs.py"
    path.write_text(CRASHED.format(after=""))
    assert "in no run did a note 'granted' follow a fault" in only(standing(path))
    heard = tmp_path / "heard_of_theirs.py"
    heard.write_text(CRASHED.format(after='world.note("granted")'))
    assert standing(heard) == []


def test_other_warnings_are_shown_once_for_all_runs() -> None:
    async def warns(world: World) -> None:
        world.choices.below(2, "coin")
        warnings.warn("of their own", DeprecationWarning, stacklevel=1)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        assert [hints(warns) for _ in range(3)] == [[], [], []]
    assert [str(each.message) for each in shown] == ["of their own"]
