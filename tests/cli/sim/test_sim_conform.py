"""The same scenario on the kernel's sockets in real time, note by note as in the simulation."""

from __future__ import annotations

from functools import partial

import attrs
import pytest

from trinamo.sim import SeedChoices
from trinamo.sim.catalogue import FOLDER, scenario_paths
from trinamo.sim.conformance.compare import (
    FAULTS,
    conform,
    play_for_real,
    possible_shapes,
    refusals,
    shapes_of,
)
from trinamo.sim.conformance.world import LoopbackNetwork, LoopbackWorld
from trinamo.sim.core.trace import Row
from trinamo.sim.scenario.file import load_scenario
from trinamo.sim.scenario.run import run_scenario


def note(kind: str, host: str = "worker0.1", **fields: object) -> Row:
    return Row(0.0, host, kind, (("request", "r"), *fields.items()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    ["handler_finishes", "worker_reset", "client_disconnects", "kill", "worker_dies", "stop"],
)
def test_fault_free_reset_fin_and_kill_are_as_simulated(name: str) -> None:
    # More seeds cost nothing unless a busy machine shows what few runs do.
    found = conform(load_scenario(FOLDER / f"{name}.toml"), seeds=range(200))
    assert found.strange == []
    assert found.missing == []
    assert found.requests > 0


def test_what_is_done_to_a_host_of_real_sockets_meets_its_links() -> None:
    """Links take the sockets of connections over; a reset of none, and a kill that leaves them, showed nothing."""
    rows = play_for_real(load_scenario(FOLDER / "worker_reset.toml"), 3, 60.0)
    assert [row.field("connection") for row in rows if row.kind == "reset"]


def test_a_worker_may_end_its_answer_before_it_hears_that_the_connection_is_reset() -> None:
    """As on a busy machine, where it waited for a core between the reset and its last token."""
    attempt = ("worker.begin", "engine.begin", "engine.token", "engine.end", "worker.end")
    wanted = (*attempt, *(kind for kind in attempt if kind != "engine.token"))
    scenario = load_scenario(FOLDER / "worker_reset.toml")
    assert any(
        tuple(kind for kind, _ in shape) == wanted
        for seed in range(200)
        for role, shape in possible_shapes(scenario, seed)
        if role == "worker"
    )


def test_a_cluster_that_answers_otherwise_does_not_conform(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: the simulated run is given other requests than the real one."""
    scenario = load_scenario(FOLDER / "handler_finishes.toml")
    from trinamo.sim.conformance import compare as module

    monkeypatch.setattr(
        "trinamo.sim.conformance.compare.simulated_rows",
        lambda scenario, seed: run_scenario(scenario, SeedChoices(seed + 1)).world.trace.rows,
    )
    found = module.conform(scenario)
    assert found.is_exact
    assert not found.conforms


def test_a_real_run_that_takes_too_long_is_given_up() -> None:
    import trio

    with pytest.raises(trio.TooSlowError):
        conform(load_scenario(FOLDER / "kill.toml"), timeout_s=0.05)


def test_every_shipped_scenario_is_playable_or_says_why_not() -> None:
    playable = []
    for path in scenario_paths():
        scenario = load_scenario(path)
        why = refusals(scenario)
        if not why:
            playable.append(scenario.name)
            assert {fault.do for fault in scenario.faults} <= {*FAULTS}
    assert {"kill", "worker_dies", "worker_reset", "handler_finishes"} <= {*playable}


def test_what_was_asked_of_loopback_and_cannot_be_is_an_error() -> None:
    world = LoopbackWorld(SeedChoices(0), timeout_s=1.0)
    with pytest.raises(ValueError, match="paused"):
        world.pause("a")
    with pytest.raises(ValueError, match="power"):
        world.power_off("a")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("storm", "loopback"),
        ("remote_prefill_decode_first", "move KV blocks"),
        ("broker_restarts", "strike the broker"),
        ("choices", "takes turns with by chance"),
    ],
)
def test_refused_scenarios_are_not_played(name: str, why: str) -> None:
    scenario = load_scenario(FOLDER / f"{name}.toml")
    with pytest.raises(ValueError, match=why):
        conform(attrs.evolve(scenario, name="x"))


def test_without_chance_every_note_counts() -> None:
    rows = [note("engine.token", index=0), note("engine.token", index=1), note("engine.end")]
    assert len(shapes_of(rows, is_exact=True)["r"]["worker"]) == 3
    assert len(shapes_of(rows, is_exact=False)["r"]["worker"]) == 2


def test_a_token_made_while_the_kill_came_in_is_no_difference() -> None:
    plain = [note("engine.token"), note("engine.killed", reason="x"), note("engine.end")]
    late = [*plain[:2], note("engine.token"), plain[2]]
    assert shapes_of(plain, is_exact=False) == shapes_of(late, is_exact=False)


def test_a_token_after_the_end_at_the_client_is_a_difference() -> None:
    plain = [
        note("stream.token", "client0.1"),
        note("request.end", "client0.1", outcome="complete"),
    ]
    late = [*plain, note("stream.token", "client0.1")]
    assert shapes_of(plain, is_exact=False) != shapes_of(late, is_exact=False)


def test_a_reset_is_heard_at_both_ends_and_a_kill_reads_as_eof() -> None:
    """What the two faults of loopback do to a connection, at the kernel's word."""
    import trio

    heard: dict[str, str] = {}
    world = LoopbackWorld(SeedChoices(0), timeout_s=20.0)
    network = LoopbackNetwork(world)
    listening = trio.Event()
    connected = {"reset": trio.Event(), "kill": trio.Event()}

    async def listen(name: str, stream: trio.abc.Stream) -> None:
        try:
            heard[name] = "eof" if not await stream.receive_some() else "data"
        except trio.BrokenResourceError as error:
            heard[name] = type(error.__cause__).__name__

    async def serve() -> None:
        listeners = await trio.open_tcp_listeners(8000, host="0.0.0.0")
        listening.set()
        await trio.serve_listeners(partial(listen, "server"), listeners)

    async def call(what: str) -> None:
        await listening.wait()
        async with await trio.open_tcp_stream("server", 8000) as stream:
            connected[what].set()
            await listen(what, stream)

    async def main() -> None:
        world.boot("server", serve)
        for what, event in connected.items():
            with trio.fail_after(120):
                world.boot(f"client-{what}", call, what)
                await event.wait()
                await trio.sleep(0.05)
            if what == "reset":
                assert network.reset(f"client-{what}", "server") == 1
            else:
                world.kill("server")
            with trio.fail_after(120):
                await world.host(f"client-{what}").ended.wait()

    world.run(main)
    assert heard == {
        "server": "ConnectionResetError",
        "reset": "ConnectionResetError",
        "kill": "eof",
    }
