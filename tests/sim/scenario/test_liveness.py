from __future__ import annotations

import pytest
import trio

from trinamo.sim import HostState, Network, Promises, SeedChoices, Violation, World, heal_core


def test_a_core_is_healed_and_the_rest_stays_cut_off() -> None:
    world = World(SeedChoices(1))
    network = Network(world)
    booted: list[str] = []

    def boot(name: str) -> None:
        booted.append(name)
        world.boot(name, trio.sleep_forever)

    async def main() -> None:
        for name in ("store", "worker1", "worker2"):
            world.boot(name, trio.sleep_forever)
        network.cut("store", "worker1")
        world.kill("store")
        world.pause("worker1")
        heal_core(world, network, ["store", "worker1"], boot)
        assert booted == ["store"]
        assert world.host("worker1").state is HostState.UP
        assert network.links.passes("store", "worker1")
        assert not network.links.passes("worker2", "store")
        assert not network.links.passes("worker1", "worker2")
        await trio.sleep(1)

    world.run(main)


def test_promises_settle_when_every_request_has_ended() -> None:
    world = World(SeedChoices(1))
    promises = Promises(world)

    async def main() -> None:
        promises.accept("r1", 5.0)
        promises.accept("r2", 5.0)
        world.after(2, promises.end, "r1", "done")
        world.after(4, promises.end, "r2", "error")
        await promises.settle()
        assert trio.current_time() == 4
        assert promises.open == []

    world.run(main)


def test_a_request_past_its_bound_is_a_violation_with_what_everybody_waits_for() -> None:
    world = World(SeedChoices(1))
    promises = Promises(world)

    async def hang() -> None:
        await trio.Event().wait()

    async def main() -> None:
        world.boot("a", hang)
        promises.accept("r1", 5.0)
        await trio.sleep(100)
        # The bound counts from the healing, which is now.
        await promises.settle()

    with pytest.raises(
        Violation, match=r"I15: 1 requests did not end: r1(.|\n)*a\.1 a:main.* hang"
    ):
        world.run(main)
    assert world.ended_s == 105


def test_a_request_may_end_only_once() -> None:
    world = World(SeedChoices(1))
    promises = Promises(world)

    async def main() -> None:
        promises.accept("r1", 5.0)
        promises.end("r1", "done")
        with pytest.raises(Violation, match="was not open"):
            promises.end("r1", "done")
        promises.accept("r1", 5.0)
        with pytest.raises(ValueError, match="has not ended"):
            promises.accept("r1", 5.0)

    world.run(main)
