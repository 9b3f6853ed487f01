"""The message bus loses, keeps in order and multiplies exactly what its rules and links say."""

from __future__ import annotations

from collections import Counter

import pytest
import trio
from hypothesis import given, settings, strategies as st

from trinamo.sim import Bus, Message, Network, ReplayChoices, Verdict, World
from trinamo.sim.net.bus import DROP

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


LATENCY_S, JITTER_S = 0.0005, 0.004


def _misses(cut: tuple[int, int], sent_s: float, arrived_s: float) -> bool:
    """Whether a message under way from then until then never meets the cut."""
    begins_s, ends_s = cut[0] / 1000, sum(cut) / 1000
    return arrived_s < begins_s - 1e-9 or sent_s > ends_s + 1e-9


@settings(max_examples=50, deadline=None)
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
    play(verdicts, values, ordered=ordered, loss_one_in=loss_one_in, cut=cut)


def play(
    verdicts: list[Verdict | None],
    values: list[int],
    *,
    ordered: bool,
    loss_one_in: int,
    cut: tuple[int, int],
) -> None:
    world = World(ReplayChoices(values), policy="fifo")
    network = Network(world, latency_s=LATENCY_S, jitter_s=JITTER_S)
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
    latest_s = 0.0
    for number, verdict in enumerate(verdicts, 1):
        told = verdict or Verdict()
        assert 1 <= ended[number] <= max(1, told.copies)
        assert delivered[number] <= told.copies
        sent_s = (number - 1) / 1000
        first_s = sent_s + LATENCY_S + told.delay_s
        # On an ordered channel it may have to wait for those before it.
        latest_s = max(first_s + JITTER_S, latest_s if ordered else 0.0)
        last_s = latest_s + told.gap_s * max(0, told.copies - 1)
        if not loss_one_in and _misses(cut, sent_s, last_s):
            assert delivered[number] == told.copies, f"message {number} was lost on a whole link"
    assert Counter(message.number for message in got) == delivered
    if ordered:
        firsts = list(dict.fromkeys(message.number for message in got))
        if all(verdict is None or not verdict.gap_s for verdict in verdicts):
            assert firsts == sorted(firsts)


def test_a_bus_that_loses_everything_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bus, "_arrive", lambda self, message: self._tell("lost", message))
    with pytest.raises(AssertionError, match="message 1 was lost on a whole link"):
        play([None], [], ordered=False, loss_one_in=0, cut=(8, 8))
