"""Adapters that stall or break: late landings, losses, and the rest of the network as it was."""

from __future__ import annotations

import pytest
import trio

from trinamo.sim import Network, SeedChoices, World
from trinamo.sim.services.memory import MemoryFabric

LATENCY_S = 0.001


class Wire:
    """A fabric between hosts `a` and `b`, and when what it carried arrived or was given up."""

    def __init__(self, *, is_copied: bool = False) -> None:
        self.world = World(SeedChoices(1), ambient="raise")
        network = Network(self.world, latency_s=LATENCY_S, jitter_s=0)
        self.fabric = MemoryFabric(self.world, network, give_up_s=1.0, is_copied=is_copied)
        self.arrived_s: list[float] = []
        self.lost_s: list[float] = []

    def carry(self) -> None:
        now = self.world.current_time
        self.fabric.carry(
            "a",
            "b",
            10,
            lambda: self.arrived_s.append(now()),
            lambda: self.lost_s.append(now()),
            by="a",
        )


@pytest.mark.parametrize("host", ["a", "b"])
def test_what_a_stalled_adapter_holds_back_lands_when_it_goes_on(host: str) -> None:
    wire = Wire()

    async def main() -> None:
        began_s = trio.current_time()
        wire.fabric.stalled.add(host)
        wire.carry()
        await trio.sleep(30)
        assert wire.arrived_s == []
        wire.fabric.go_on(host)
        assert wire.arrived_s == [pytest.approx(began_s + 30)]
        await trio.sleep(5)
        assert (len(wire.arrived_s), wire.lost_s) == (1, [])

    wire.world.run(main)


def test_a_stall_that_begins_on_the_way_counts() -> None:
    wire = Wire()

    async def main() -> None:
        wire.carry()
        wire.fabric.stalled.add("b")
        await trio.sleep(1)
        assert wire.arrived_s == []
        wire.fabric.go_on("b")
        assert len(wire.arrived_s) == 1

    wire.world.run(main)


def test_what_a_broken_adapter_carries_is_given_up_in_time_and_never_arrives() -> None:
    wire = Wire()

    async def main() -> None:
        began_s = trio.current_time()
        wire.fabric.broken.add("b")
        wire.carry()
        await trio.sleep(0.5)
        wire.fabric.broken.discard("b")
        await trio.sleep(5)
        assert wire.arrived_s == []
        assert wire.lost_s == [pytest.approx(began_s + 1.0)]
        wire.carry()
        await trio.sleep(1)
        assert len(wire.arrived_s) == 1

    wire.world.run(main)


@pytest.mark.parametrize("host", ["a", "b"])
def test_what_is_held_back_dies_with_the_process_that_started_it(host: str) -> None:
    wire = Wire()

    async def main() -> None:
        wire.world.boot("a", trio.sleep_forever)
        wire.fabric.stalled.add(host)
        wire.carry()
        await trio.sleep(2)
        wire.world.kill("a")
        wire.fabric.go_on(host)
        await trio.sleep(5)
        assert wire.arrived_s == []
        assert len(wire.lost_s) == 1

    wire.world.run(main)


def test_what_is_on_the_wire_lands_though_the_process_has_died() -> None:
    wire = Wire()

    async def main() -> None:
        wire.world.boot("a", trio.sleep_forever)
        wire.carry()
        wire.world.kill("a")
        await trio.sleep(5)
        assert len(wire.arrived_s) == 1

    wire.world.run(main)


@pytest.mark.parametrize("is_copied", [True, False])
def test_a_stopped_process_copies_nothing_until_it_goes_on(is_copied: bool) -> None:
    wire = Wire(is_copied=is_copied)

    async def main() -> None:
        wire.world.boot("a", trio.sleep_forever)
        wire.world.pause("a")
        wire.carry()
        await trio.sleep(5)
        assert len(wire.arrived_s) == (0 if is_copied else 1)
        wire.world.resume("a")
        await trio.sleep(0.1)
        assert len(wire.arrived_s) == 1

    wire.world.run(main)


def test_what_a_stopped_process_would_copy_is_gone_when_it_is_killed() -> None:
    wire = Wire(is_copied=True)

    async def main() -> None:
        wire.world.boot("a", trio.sleep_forever)
        wire.world.pause("a")
        wire.carry()
        await trio.sleep(5)
        wire.world.kill("a")
        await trio.sleep(5)
        assert wire.arrived_s == []
        assert len(wire.lost_s) == 1

    wire.world.run(main)
