"""Push from the step loop: who waits, who is paused, and what is left when one of both goes away."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tests.runtime.engines.loop.hosting import (
    BLOCKS,
    Gathering,
    collect,
    gated_host,
    make_engine,
    open_host,
    request,
    settle,
    token_ids,
)
from trinamo.runtime.context import Context
from trinamo.runtime.engines.echo import open_echo_engine
from trinamo.runtime.engines.generation import forward_of
from trinamo.runtime.engines.loop.host import EngineHost
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason, GenerateRequest


class Breaking(Gathering):
    """A sink that raises at its third delta."""

    def take(self, items: list[Delta]) -> bool:
        if len(self.deltas) == 2:
            raise ZeroDivisionError("the third")
        return super().take(items)


async def forward(
    host: EngineHost, asked: GenerateRequest, sink: Gathering, context: Context | None = None
) -> None:
    await host.forward(asked, context or Context("r"), sink)


async def test_no_task_wakes_between_the_first_delta_and_the_last() -> None:
    async with open_host() as host, trio.open_nursery() as nursery:
        sink, wakes = Gathering(), 0
        asleep = trio.lowlevel.current_task()

        class Count(trio.abc.Instrument):
            def before_task_step(self, task: trio.lowlevel.Task) -> None:
                nonlocal wakes
                wakes += task is asleep

        async def ask() -> None:
            nonlocal asleep
            asleep = trio.lowlevel.current_task()
            trio.lowlevel.add_instrument(counting)
            await forward(host, request(max_tokens=50), sink)
            trio.lowlevel.remove_instrument(counting)

        counting = Count()
        nursery.start_soon(ask)
    assert len(sink.deltas) == 50
    assert wakes == 1, "at its end"
    assert sink.ends_after == [50], "before that"


async def test_what_a_sink_raises_ends_its_own_answer_and_comes_out() -> None:
    async with open_host() as host, trio.open_nursery() as nursery:
        other = Gathering()
        nursery.start_soon(forward, host, request("other", 60), other)
        sink = Breaking()
        with pytest.raises(ZeroDivisionError, match="the third"):
            await forward(host, request(max_tokens=60), sink)
        assert len(sink.deltas) == 2
        assert sink.ends_after == []
        assert (host.statistics().cancellations, host.statistics().failures) == (1, 0)
    assert len(token_ids(other.deltas)) == 60


async def test_a_sink_that_raises_at_the_last_delta_fails_its_answer() -> None:
    async with open_host() as host:
        with pytest.raises(ZeroDivisionError):
            await forward(host, request(max_tokens=3), Breaking())
        await settle(host)


@pytest.mark.parametrize(("running_max", "blocks"), [(8, BLOCKS), (1, BLOCKS), (8, 32)])
async def test_a_sink_without_room_pauses_its_own_answer_only(
    running_max: int, blocks: int
) -> None:
    async with open_host(make_engine(blocks), running_max=running_max) as host:
        alone = token_ids(await collect(host, request("slow", 100)))
        async with trio.open_nursery() as nursery:
            slow = Gathering(room=4)
            nursery.start_soon(forward, host, request("slow", 100), slow)
            await trio.testing.wait_all_tasks_blocked()
            assert host.statistics().paused == 1
            for _ in range(3):
                assert len(token_ids(await collect(host, request("fast", 100)))) == 100
            assert len(slow.deltas) == 4
            slow.room = 8
            slow.room_again()
            await trio.testing.wait_all_tasks_blocked()
            assert len(slow.deltas) == 8
            slow.room = 1000
            slow.room_again()
        assert token_ids(slow.deltas) == alone
        slow.room_again()
        await settle(host)


async def test_stop_ends_a_paused_answer_with_one_more_delta() -> None:
    async with open_host() as host, trio.open_nursery() as nursery:
        context, slow = Context("slow"), Gathering(room=2)
        nursery.start_soon(forward, host, request(max_tokens=60), slow, context)
        await trio.testing.wait_all_tasks_blocked()
        context.stop()
        await trio.testing.wait_all_tasks_blocked()
        assert len(slow.deltas) == 3
        assert slow.deltas[-1].finish_reason is FinishReason.STOP
        assert slow.ends_after == [3]
        await settle(host)


async def test_after_a_kill_the_sink_is_called_no_more() -> None:
    async with gated_host() as (host, gate), trio.open_nursery() as nursery:
        context, sink = Context("r"), Gathering()

        async def ask() -> None:
            with context.scope:
                await forward(host, request(max_tokens=60), sink, context)

        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        await gate.let_steps_happen(2)
        assert gate.inside == 1
        before = len(sink.deltas)
        context.kill()
        await gate.let_steps_happen(1)
        assert len(sink.deltas) == before
        assert sink.ends_after == []
        await settle(host)
        assert host.statistics().cancellations == 1


async def test_tasks_that_are_cancelled_in_the_middle_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_host(running_max=8, waiting_max=64) as host:
        tasks = trio.lowlevel.current_statistics().tasks_living

        async def leave(number: int) -> None:
            sink = Gathering(room=number % 5 or 1000)
            with trio.CancelScope() as scope:

                def take(items: list[Delta]) -> bool:
                    if len(sink.deltas) == number % 7:
                        scope.cancel()
                    return Gathering.take(sink, items)

                monkeypatch.setattr(sink, "take", take)
                await forward(host, request(f"number {number}", 30), sink, Context(str(number)))

        async with trio.open_nursery() as nursery:
            for number in range(64):
                nursery.start_soon(leave, number)
                await trio.lowlevel.checkpoint()
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        await settle(host)
        assert trio.lowlevel.current_statistics().tasks_living == tasks


async def test_an_engine_that_only_generates_is_handed_on_and_waits_while_there_is_no_room() -> (
    None
):
    async with open_echo_engine() as engine, trio.open_nursery() as nursery:
        sink = Gathering(room=2)
        asked = GenerateRequest(model="echo", prompt="one two three four")
        nursery.start_soon(forward_of(engine), asked, Context("r"), sink)
        await trio.testing.wait_all_tasks_blocked()
        assert [delta.text for delta in sink.deltas] == ["one", " two"]
        sink.room = 100
        sink.room_again()
    assert "".join(delta.text for delta in sink.deltas) == "one two three four"
    assert sink.deltas[-1].finish_reason is FinishReason.STOP
    assert engine.statistics().running == 0
