"""The message bus loses, keeps in order and multiplies exactly what its rules and links say."""

from __future__ import annotations

from collections import Counter

import pytest
import trio
from hypothesis import given, settings, strategies as st

from trinamo.sim import Bus, Message, Network, ReplayChoices, Verdict, World
from trinamo.sim.bus import DROP

VERDICTS = (
    st.none()
    | st.just(DROP)
    | st.builds(
        Verdict,
        copies=st.integers(1, 3),
        delay_s=st.sampled_from((0.0, 0.01, 1.0)),
        gap_s=st.sampled_from((0.0, 0.5)),
    )
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    verdicts=st.lists(VERDICTS, min_size=1, max_size=12),
    values=st.lists(st.integers(0, 15), max_size=40),
    ordered=st.booleans(),
    loss_one_in=st.sampled_from((0, 2)),
    cut=st.tuples(st.integers(0, 8), st.integers(0, 8)),
)
def test_every_message_is_delivered_lost_or_dropped_and_order_is_kept(
    verdicts: list[Verdict | None],
    values: list[int],
    ordered: bool,
    loss_one_in: int,
    cut: tuple[int, int],
) -> None:
    """Each copy of each message ends in exactly one row; on an ordered channel first copies,
    and so all copies without a gap, arrive in the order in which they were sent."""
    world = World(ReplayChoices(values), policy="fifo")
    network = Network(world, jitter_s=0.004)
    network.links.shape(loss_one_in=loss_one_in)
    bus = Bus(world, network, ordered=ordered)
    bus.rules.append(lambda message: verdicts[message.payload])
    got: list[Message] = []

    async def receive() -> None:
        while True:
            got.append(await bus.receive("c"))

    async def main() -> None:
        world.boot("b", receive)
        world.after(cut[0] / 1000, network.cut, "a", "b")
        world.after((cut[0] + cut[1]) / 1000, network.heal, "a", "b")
        for number in range(len(verdicts)):
            bus.send("a", "b", "c", number)
            await trio.sleep(0.001)
        await trio.sleep(10)

    world.run(main)
    delivered = Counter(row.field("number") for row in world.trace.of_kind("deliver"))
    ended = Counter(
        row.field("number") for row in world.trace.rows if row.kind in ("deliver", "lost", "drop")
    )
    for number, verdict in enumerate(verdicts, 1):
        copies = 1 if verdict is None else verdict.copies
        assert 1 <= ended[number] <= max(1, copies)
        assert delivered[number] <= copies
    assert Counter(message.number for message in got) == delivered
    if ordered:
        firsts = list(dict.fromkeys(message.number for message in got))
        if all(verdict is None or not verdict.gap_s for verdict in verdicts):
            assert firsts == sorted(firsts)
