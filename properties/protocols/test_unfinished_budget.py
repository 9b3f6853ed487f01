"""Many frames that grow at once, within one budget: all become whole, and it holds as far as it can."""

from __future__ import annotations

import trio
import trio.testing
from hypothesis import given, strategies as st

from trinamo.transports.tcp.unfinished import ByteBudget

STEP = 10
frames = st.lists(
    st.tuples(st.integers(1, 120), st.integers(0, 5), st.booleans()), min_size=1, max_size=12
)


@given(st.integers(1, 200), frames)
def test_every_frame_becomes_whole_or_gives_its_bytes_back(
    bytes_max: int, planned: list[tuple[int, int, bool]]
) -> None:
    """Whatever the sizes and the pauses, and though some give up while they wait: nobody waits for
    ever, no more is held than the budget, the largest frame and one step of everybody, and nothing
    is held at the end."""
    budget = ByteBudget(bytes_max)
    most = bytes_max + max(size for size, _, _ in planned) + STEP * len(planned)
    whole: list[int] = []

    async def grow(number: int, size: int, pauses: int, gives_up: bool) -> None:
        owner, held = object(), 0
        with trio.CancelScope() as scope:
            while held < size:
                step = min(STEP, size - held)
                held += step
                if gives_up and held > size // 2:
                    scope.deadline = trio.current_time() + 1
                await budget.grow(owner, step)
                assert budget.used_bytes <= most
                for _ in range(pauses):
                    await trio.lowlevel.checkpoint()
            whole.append(number)
        budget.give_back(owner, held)

    async def main() -> None:
        with trio.fail_after(1000):
            async with trio.open_nursery() as nursery:
                for number, plan in enumerate(planned):
                    nursery.start_soon(grow, number, *plan)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert {number for number, (_, _, gives_up) in enumerate(planned) if not gives_up} <= set(whole)
    assert (budget.used_bytes, len(budget._waiting)) == (0, 0)
    assert budget.take_nowait(bytes_max)
