from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.sim.net.talk import dice
from trinamo.sim import Bus, Network, ReplayChoices, SeedChoices, World
from trinamo.sim.net.bus import DROP, HOLD, Rule, delay, duplicate, nth


def _deliver(
    *rules: Rule,
    messages: int = 4,
    ordered: bool = False,
    cut_at: float | None = None,
    **link: float,
) -> list[tuple[Any, float]]:
    """What host b got of the numbered messages host a sent a millisecond apart, and when."""
    world = World(SeedChoices(1))
    network = Network(world, latency_s=0.01, jitter_s=0)
    network.links.shape("a", "b", **link)
    bus = Bus(world, network, ordered=ordered)
    bus.rules += rules
    got: list[tuple[Any, float]] = []

    async def send() -> None:
        for number in range(messages):
            bus.send("a", "b", "c", number, size=100)
            await trio.sleep(0.001)

    async def receive() -> None:
        while True:
            message = await bus.receive("c")
            got.append((message.payload, round(trio.current_time(), 6)))

    async def main() -> None:
        world.boot("b", receive)
        world.boot("a", send)
        if cut_at is not None:
            world.at(cut_at, network.cut, "a", "b")
        await trio.sleep(1)
        bus.release()
        await trio.sleep(1)

    world.run(main)
    return got


def test_a_message_takes_the_latency_of_its_link() -> None:
    assert _deliver() == [(0, 0.01), (1, 0.011), (2, 0.012), (3, 0.013)]


def test_the_first_verdict_wins() -> None:
    assert [m for m, _ in _deliver(lambda _m: None, nth(2, DROP), lambda _m: duplicate())] == [
        0, 0, 2, 2, 3, 3,
    ]  # fmt: skip


def test_a_delayed_message_is_overtaken_only_where_order_is_not_kept() -> None:
    late = nth(1, delay(0.1))
    assert [m for m, _ in _deliver(late)] == [1, 2, 3, 0]
    assert [m for m, _ in _deliver(nth(1, delay(0.1)), ordered=True)] == [0, 1, 2, 3]
    reordering = nth(1, delay(0.1, reorder=True))
    assert [m for m, _ in _deliver(reordering, ordered=True)] == [1, 2, 3, 0]


def test_a_held_message_waits_for_its_release() -> None:
    assert _deliver(nth(2, HOLD))[-1] == (1, 1.01)


def test_bandwidth_spaces_messages() -> None:
    times = [at for _, at in _deliver(bytes_per_s=10_000)]
    assert times == [0.02, 0.03, 0.04, 0.05]


def test_what_meets_a_cut_is_lost() -> None:
    # Sent at 0 and 1 ms, both were on their way; those at 2 and 3 ms find the cut.
    assert _deliver(cut_at=0.0105) == [(0, 0.01)]


def test_messages_to_a_host_that_does_not_run_are_lost_and_to_a_paused_one_wait() -> None:
    world = World(SeedChoices(1))
    bus = Bus(world, Network(world, latency_s=0.01, jitter_s=0))
    got: list[Any] = []

    async def receive() -> None:
        while True:
            got.append((await bus.receive("c")).payload)

    async def main() -> None:
        bus.send("a", "b", "c", "too early")
        await trio.sleep(1)
        world.boot("b", receive)
        world.pause("b")
        bus.send("a", "b", "c", "paused")
        await trio.sleep(1)
        assert got == []
        world.resume("b")
        await trio.sleep(1)
        world.kill("b")
        bus.send("a", "b", "c", "dead")
        await trio.sleep(1)
        world.boot("b", receive)
        bus.send("a", "b", "c", "alive")
        await trio.sleep(1)

    world.run(main)
    assert got == ["paused", "alive"]
    assert len(world.trace.of_kind("lost")) == 2


def test_an_inbox_is_bounded() -> None:
    world = World(SeedChoices(1))
    bus = Bus(world, Network(world), inbox_max=2)

    async def main() -> None:
        world.boot("b", trio.sleep_forever)
        for number in range(5):
            bus.send("a", "b", "c", number)
        await trio.sleep(1)
        assert bus.unread("b", "c") == 2

    world.run(main)
    assert len(world.trace.of_kind("overflow")) == 3


def test_a_cancelled_receive_loses_no_message() -> None:
    world = World(SeedChoices(1))
    bus = Bus(world, Network(world, latency_s=0.01, jitter_s=0))

    async def main() -> None:
        bus.send("a", "driver", "c", 1)
        with trio.move_on_after(0.005):
            await bus.receive("c")
        await trio.sleep(0.1)
        with trio.CancelScope() as scope:
            scope.cancel()
            await bus.receive("c")
        assert bus.receive_nowait("c").payload == 1
        with pytest.raises(trio.WouldBlock):
            bus.receive_nowait("c")

    world.run(main)


def test_the_dice_harm_as_the_choices_say() -> None:
    def played(values: list[int]) -> list[int]:
        world = World(ReplayChoices(values), policy="fifo")
        bus = Bus(world, Network(world, jitter_s=0))
        bus.rules.append(dice(world, drop_one_in=2, duplicate_one_in=2, delay_one_in=2))
        got: list[int] = []

        async def main() -> None:
            for number in range(3):
                bus.send("a", "driver", "c", number)
            await trio.sleep(1)
            while bus.unread("driver", "c"):
                got.append(bus.receive_nowait("c").payload)

        world.run(main)
        return got

    assert played([]) == [0, 1, 2]
    assert played([1]) == [1, 2]
    assert played([0, 1]) == [0, 1, 2, 0]
    assert played([0, 0, 1]) == [1, 2, 0]
