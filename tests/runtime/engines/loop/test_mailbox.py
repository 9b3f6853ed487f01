"""The mailbox between the step loop and one consumer."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from trinamo.runtime.engines.loop.mailbox import Mailbox
from trinamo.runtime.errors import EngineError
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason

END = Delta("end", [], FinishReason.STOP)


async def test_deltas_come_out_in_order_and_then_the_error() -> None:
    mailbox = Mailbox(3)
    mailbox.put(Delta("a"))
    mailbox.put(Delta("b"))
    mailbox.fail(EngineError("broken"))
    assert [(await mailbox.take()).text for _ in range(2)] == ["a", "b"]
    with pytest.raises(EngineError, match="broken"):
        await mailbox.take()


async def test_a_full_mailbox_has_room_for_the_last_delta_only() -> None:
    mailbox = Mailbox(1)
    mailbox.put(Delta("a"))
    assert mailbox.is_full
    with pytest.raises(AssertionError, match="full"):
        mailbox.put(Delta("b"))
    mailbox.put(END)
    assert [(await mailbox.take()).text for _ in range(2)] == ["a", "end"]


async def test_it_has_drained_at_half() -> None:
    mailbox = Mailbox(4)
    for _ in range(4):
        mailbox.put(Delta("a"))
    await mailbox.take()
    assert not mailbox.has_drained
    await mailbox.take()
    assert mailbox.has_drained


async def test_a_waiting_consumer_is_woken(autojump_clock: trio.testing.MockClock) -> None:
    mailbox = Mailbox(1)
    async with trio.open_nursery() as nursery:
        taken = []

        async def consume() -> None:
            taken.append(await mailbox.take())

        nursery.start_soon(consume)
        await trio.testing.wait_all_tasks_blocked()
        mailbox.put(END)
    assert taken == [END]


async def test_a_cancelled_take_takes_nothing() -> None:
    mailbox = Mailbox(1)
    mailbox.put(END)
    with trio.CancelScope() as scope:
        scope.cancel()
        await mailbox.take()
    assert await mailbox.take() is END
