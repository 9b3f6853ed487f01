"""Whoever takes the tokens, however slowly, and whoever else leaves: an answer is the one due."""

from __future__ import annotations

from contextlib import aclosing

import attrs
import trio
import trio.testing
from hypothesis import given, strategies as st

from tests.runtime.engines.loop.hosting import Gathering, settle
from trinamo.runtime.context import Context
from trinamo.runtime.engines.loop.host import EngineHost
from trinamo.runtime.engines.mocker.engine import MockerOptions, expected_text, open_mocker_engine
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason, GenerateRequest

FEW = MockerOptions(
    num_gpu_blocks=12,
    block_size=4,
    max_num_seqs=3,
    max_num_batched_tokens=16,
    enable_prefix_caching=False,
)
"""Too few blocks for three sequences: they are preempted, paused ones first."""
TOKENS = 12
ROOM_EVERY_S = 0.1


@attrs.frozen
class Plan:
    """One request: how it is asked for, and what happens at which of its deltas."""

    is_pushed: bool
    end: str
    at: int
    rooms: list[int]
    """For how many deltas there is room at first, and each time there is some again."""


plans = st.builds(
    Plan,
    st.booleans(),
    st.sampled_from(["complete", "stop", "kill", "raise"]),
    st.integers(1, TOKENS - 1),
    st.lists(st.integers(1, TOKENS), max_size=4),
)


class Taker(Gathering):
    """A sink that ends its request as planned."""

    def __init__(self, plan: Plan, context: Context) -> None:
        self.plan, self.context, self.rooms = plan, context, [*plan.rooms]
        super().__init__(room=self.rooms.pop(0) if self.rooms else TOKENS + 1)

    def take(self, items: list[Delta]) -> bool:
        has_room = super().take(items)
        if len(self.deltas) == self.plan.at:
            match self.plan.end:
                case "stop":
                    self.context.stop()
                case "kill":
                    self.context.kill()
                case "raise":
                    raise ZeroDivisionError
                case _:
                    pass
        return has_room

    async def make_room(self) -> None:
        while True:
            await trio.sleep(ROOM_EVERY_S)
            self.room += self.rooms.pop(0) if self.rooms else TOKENS
            self.room_again()


async def ask(host: EngineHost, number: int, plan: Plan) -> None:
    context = Context(str(number))
    taker = Taker(plan, context)
    request = GenerateRequest(model="m", prompt=f"prompt {number}", max_tokens=TOKENS)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(taker.make_room)
        try:
            with context.scope:
                if plan.is_pushed:
                    await host.forward(request, context, taker)
                else:
                    async with aclosing(host.generate(request, context)) as deltas:
                        async for delta in deltas:
                            taker.take([delta])
        except ZeroDivisionError:
            assert plan.end == "raise"
        nursery.cancel_scope.cancel()
    reasons = [delta.finish_reason for delta in taker.deltas]
    text = "".join(delta.text for delta in taker.deltas)
    assert expected_text(request, TOKENS).startswith(text)
    assert not any(reasons[:-1])
    match plan.end:
        case "complete":
            assert len(text) == TOKENS
            assert reasons[-1] is FinishReason.LENGTH
        case "stop":
            # Whoever is pulled may be so far behind that it had ended before.
            assert reasons[-1] in (FinishReason.STOP, FinishReason.LENGTH)
        case _:
            assert len(taker.deltas) == plan.at
            assert reasons[-1] is None


@given(st.lists(plans, min_size=1, max_size=6))
def test_an_answer_is_a_prefix_of_the_one_due_and_nothing_is_left(plans: list[Plan]) -> None:
    """A complete one is all of it, a killed one ends there, and every block is free in the end."""

    async def play() -> None:
        async with open_mocker_engine(FEW, context_tokens_max=40, queued_deltas_max=3) as host:
            async with trio.open_nursery() as nursery:
                for number, plan in enumerate(plans):
                    nursery.start_soon(ask, host, number, plan)
            await trio.sleep(1)  # The step that was running frees what it wrote.
            await settle(host)

    trio.run(play, clock=trio.testing.MockClock(autojump_threshold=0))
