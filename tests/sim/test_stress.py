"""One call for bad links and faults, and the questions that find what does not come back."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from trinamo.sim import (
    Hint,
    Linearizability,
    Network,
    ReplayChoices,
    SeedChoices,
    Violation,
    World,
    arm,
    gives_up_and_asks_again,
    recovers,
    search,
    stress,
)
from trinamo.sim.explore import run

PORT = 7000


async def echo(stream: trio.SocketStream) -> None:
    with contextlib.suppress(trio.BrokenResourceError):
        async for chunk in stream:
            await stream.send_all(bytes(chunk))


class Pool:
    """A client that has two places for connections. `is_careful` gives a place back however it ends."""

    def __init__(self, *, is_careful: bool) -> None:
        self.is_careful = is_careful
        self.free = trio.Semaphore(2)

    async def ask(self) -> bytes:
        await self.free.acquire()
        try:
            stream = await trio.open_tcp_stream("server", PORT)
        except BaseException as error:
            if self.is_careful or isinstance(error, OSError):
                self.free.release()
            raise
        try:
            async with stream:
                await stream.send_all(b"x")
                answer = bytes(await stream.receive_some())
        finally:
            self.free.release()
        if not answer:
            raise OSError("the server went away")
        return answer


def scenario(client: Callable[[], Any], **options: Any) -> Callable[[World, Network], Any]:
    """A server and a client under stress; the client is `client()`."""

    async def main(world: World, network: Network) -> None:
        def boot(name: str) -> None:
            world.boot(name, *([client] if name == "client" else [trio.serve_tcp, echo, PORT]))

        boot("server")
        boot("client")
        stress(world, network, server="server", boot=boot, **options)
        await trio.sleep(60)

    return main


async def patient(pool: Pool) -> None:
    for _ in range(5):
        with contextlib.suppress(OSError, trio.BrokenResourceError), trio.move_on_after(1):
            await pool.ask()
    assert await recovers(pool.ask, within_s=5) == b"x"


def test_a_client_that_keeps_its_places_recovers_from_all_that_stress_does() -> None:
    assert search(scenario(lambda: patient(Pool(is_careful=True))), seeds=range(60)) is None


def test_a_place_that_is_lost_by_giving_up_is_found_in_few_decisions() -> None:
    found = search(scenario(lambda: patient(Pool(is_careful=False))), seeds=range(60))
    assert found is not None
    assert found.rule == "recovers"
    assert "it waited in test_stress.py" in found.violation.text
    assert 1 <= len(found.decisions) <= 6, str(found)
    assert found.runs <= 40


def test_giving_up_a_few_times_finds_it_without_a_fault() -> None:
    async def client() -> None:
        pool = Pool(is_careful=False)
        await gives_up_and_asks_again(pool.ask, patience_s=0.02, within_s=5)

    found = search(scenario(client, faults_max=0), seeds=range(40))
    assert found is not None
    assert found.rule == "recovers"
    labels = {choice.label for choice in found.decisions}
    labels = {label.partition(" from ")[0] for label in labels}
    assert labels <= {"gives up after", "stress: delays", "jitter"}


def test_the_dull_run_has_no_fault_and_leaves_the_links_as_they_are() -> None:
    world = World(ReplayChoices([]))
    network = Network(world)
    plans = []

    async def main() -> None:
        world.boot("server", trio.sleep_forever)
        world.boot("client", trio.sleep_forever)
        plans.append(stress(world, network, server="server", boot=print))

    world.run(main)
    assert plans == [[]]
    assert (
        network.link("client", "server").jitter_s
        == Network(World(SeedChoices(0))).link("a", "b").jitter_s
    )
    assert all(choice.label.startswith(("stress: ", "fault ")) for choice in world.choices.record)


def test_everything_that_stress_draws_strikes_and_is_over_in_time() -> None:
    """All kinds occur in some seeds, at notes too, and afterwards every host runs on whole links."""
    struck: set[str] = set()
    for seed in range(60):
        world = World(SeedChoices(seed))
        network = Network(world)

        async def host(name: str, world: World = world) -> None:
            while True:
                await trio.sleep(0.1)
                world.note(f"beat of {name}")

        def boot(name: str, world: World = world, host: Callable[..., Any] = host) -> None:
            world.boot(name, host, name)

        async def main(
            world: World = world, network: Network = network, boot: Callable[..., Any] = boot
        ) -> None:
            for name in ("s1", "s2", "c1"):
                boot(name)
            stress(world, network, server=["s1", "s2"], boot=boot, notes=["beat of c1"])
            await trio.sleep(20)
            assert world.calm_at_s <= 12
            assert all(world.host(name).state.value == "up" for name in world.host_names)
            for one in world.host_names:
                for other in world.host_names:
                    assert not network.link(one, other).is_cut
                    assert not network.link(one, other).bytes_per_s

        world.run(main)
        struck |= {row.field("do") for row in world.trace.of_kind("fault")}
    assert struck == {
        *("kill", "power_off", "pause", "cut", "cut_one_way", "reset", "finish", "thin")
    }


def test_a_host_dies_only_if_somebody_boots_it_again() -> None:
    kinds: set[str] = set()
    for seed in range(60):
        world = World(SeedChoices(seed))
        network = Network(world)

        async def main(world: World = world, network: Network = network) -> None:
            plan = stress(world, network, server="a", clients=["b"], faults_max=4)
            kinds.update(fault["do"] for fault in plan)

        world.run(main)
    assert not kinds & {"kill", "power_off"}
    assert {"pause", "cut"} <= kinds


def test_stress_wants_somebody_to_strike() -> None:
    world = World(SeedChoices(0))
    network = Network(world)

    async def main() -> None:
        world.boot("server", trio.sleep_forever)
        stress(world, network, server="server")

    with pytest.raises(ValueError, match="boot them before"):
        world.run(main)


def test_recovers_waits_for_the_last_fault_and_says_what_went_wrong() -> None:
    world = World(SeedChoices(0))
    network = Network(world)
    asked: list[float] = []

    async def ask() -> None:
        asked.append(trio.current_time())
        raise OSError("no answer")

    async def main() -> None:
        world.boot("a", trio.sleep_forever)
        arm(world, network, [{"do": "pause", "host": "a", "at_s": 1, "for_s": 2}])
        await recovers(ask, within_s=1)

    with pytest.raises(
        Violation,
        match="no answer within 1 s after all was whole again, at 3 s\nat last OSError: no answer",
    ):
        world.run(main)
    assert asked[0] == 3
    assert len(asked) == 10


def test_recovers_names_the_lines_in_which_a_request_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "waiting_library.py").write_text(
        "import trio\nasync def request():\n    await trio.sleep_forever()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    request = importlib.import_module("waiting_library").request

    async def main() -> None:
        await recovers(request, within_s=1)

    with pytest.raises(Violation, match=r"it waited in waiting_library\.py:3 request$"):
        World(SeedChoices(0)).run(main)


def test_recovers_passes_on_what_the_request_asserts_and_refuses_a_fault_for_ever() -> None:
    async def ask(number: int) -> None:
        assert number == 2, "another answer"

    async def asserts() -> None:
        await recovers(partial(ask, 1), within_s=1)

    with pytest.raises(AssertionError, match="another answer"):
        World(SeedChoices(0)).run(asserts)
    world = World(SeedChoices(0))
    network = Network(world)

    async def never() -> None:
        arm(world, network, [{"do": "cut", "host": "a", "to": "b", "at_s": 0}])
        await recovers(partial(ask, 2), within_s=1)

    with pytest.raises(ValueError, match="never over"):
        world.run(never)


async def test_outside_a_run_there_is_nothing_to_recover_from() -> None:
    with pytest.raises(RuntimeError, match="for the inside"):
        await recovers(trio.lowlevel.checkpoint, within_s=1)
    with pytest.raises(RuntimeError, match="for the inside"):
        await gives_up_and_asks_again(trio.lowlevel.checkpoint, patience_s=1, within_s=1)


def test_twenty_seeds_with_not_one_answer_say_so() -> None:
    async def gives_in() -> None:
        with contextlib.suppress(AttributeError):
            async with await trio.open_tcp_stream("server", PORT) as stream:
                stream.a_name_that_no_stream_has  # type: ignore[attr-defined]  # noqa: B018

    with pytest.warns(Hint, match="not one byte came back on any connection"):
        assert search(scenario(gives_in), seeds=range(20)) is None


def test_a_history_in_which_nothing_returned_says_so() -> None:
    async def main(world: World) -> None:
        history = world.watch(Linearizability())
        history.call("a", "read")
        await trio.sleep(1)

    def play(choices: Any) -> None:
        world = World(choices)
        world.run(lambda: main(world))

    assert any("not one operation returned" in hint for hint in run(play, 0).hints)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (
            {"do": "cut", "host": "a", "to": "b", "at_s": 1, "for": 2},
            "a fault has no for; it has do",
        ),
        ({"do": "kill", "host": "a"}, "a fault needs at_s"),
        ({"do": "kill", "host": "a", "at_s": 0, "after_note": "vote#first"}, "'vote#first'"),
    ],
)
def test_a_plan_with_a_misspelt_or_missing_part_is_refused_by_name(fault: Any, says: str) -> None:
    world = World(SeedChoices(1))
    network = Network(world)
    with pytest.raises(ValueError, match=says):
        arm(world, network, [fault])
