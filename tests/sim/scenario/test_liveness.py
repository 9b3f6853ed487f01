from __future__ import annotations

import trio

from trinamo.sim import HostState, Network, SeedChoices, World, heal_core


def test_a_core_is_healed_and_the_rest_stays_cut_off() -> None:
    world = World(SeedChoices(1), ambient="raise")
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
