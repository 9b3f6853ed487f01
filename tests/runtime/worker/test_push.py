"""Handlers that push, and engines on the step loop, asked through real planes."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from tests.runtime.endpoints import NAME, Cluster, open_cluster
from tests.runtime.engines.loop.hosting import inline_hop, make_engine, open_host
from tests.runtime.worker.asking import ask
from tests.transports.tcp.ends import eventually
from trinamo.runtime.caller.client import Client
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.engines.loop.host import EngineHost
from trinamo.runtime.errors import DeadlineError, EngineError, RequestError, UnavailableError
from trinamo.runtime.metrics.metrics import SUCCESS
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason, GenerateRequest
from trinamo.runtime.sinks import Sink, Sleeper
from trinamo.runtime.worker.worker import Worker

Push = Callable[[Any, Context, Sink[Any]], Awaitable[None]]


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with open_cluster() as cluster:
        yield cluster


async def serve(cluster: Cluster, push: Push, **settings: Any) -> Worker:
    return await cluster.serve("1", push=push, **settings)


# --- handlers ------------------------------------------------------------------------------------


async def test_what_is_handed_over_arrives_in_order_and_the_end_is_complete(
    cluster: Cluster,
) -> None:
    async def handler(request: int, _: Context, sink: Sink[int]) -> None:
        sink.on_room(lambda: None)
        for number in range(0, request, 2):
            sink.take([number, number + 1])

    await serve(cluster, handler)
    assert await ask(cluster, 500) == (list(range(500)), None)
    assert await ask(cluster, 0) == ([], None)


async def test_an_end_that_is_said_with_the_last_item_is_the_end(cluster: Cluster) -> None:
    """The caller has it before the handler returns, whatever becomes of that."""

    async def handler(request: int, _: Context, sink: Sink[int]) -> None:
        if request:
            sink.take([1])
        sink.end()
        raise RequestError("too late")

    await serve(cluster, handler)
    assert await ask(cluster, 1) == ([1], None)
    assert await ask(cluster, 0) == ([], None)


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_an_answer_that_is_whole_counts_as_one_whatever_ends_its_handler(
    cluster: Cluster, how: str
) -> None:
    is_said = trio.Event()

    async def handler(_: int, context: Context, sink: Sink[int]) -> None:
        sink.take([1])
        sink.end()
        is_said.set()
        await context.wait_stopped()

    worker = await serve(cluster, handler)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, cluster, 1)
        await is_said.wait()
        if how == "stop":
            worker.stop_all()
        else:
            worker.kill_all()
        await worker.wait_idle()
    assert worker._metrics.requests.tally(str(NAME), SUCCESS).value == 1


@pytest.mark.parametrize("reason", [Reason.WORKER_SHUTDOWN, Reason.FRONTEND_SHUTDOWN])
async def test_an_end_that_is_said_of_an_answer_that_was_cut_is_none(
    cluster: Cluster, reason: Reason
) -> None:
    async def handler(_: int, context: Context, sink: Sink[int]) -> None:
        sink.take([1])
        context.stop(reason)
        sink.end()

    await serve(cluster, handler)
    items, error = await ask(cluster, 1)
    assert items == [1]
    assert type(error) is UnavailableError


async def test_an_end_that_is_said_after_the_deadline_is_none(cluster: Cluster) -> None:
    async def handler(_: int, context: Context, sink: Sink[int]) -> None:
        sink.take([1])
        context.scope.cancel()
        sink.end()
        await trio.sleep_forever()

    await serve(cluster, handler)
    items, error = await ask(cluster, 1)
    assert items == [1]
    assert type(error) is DeadlineError


@pytest.mark.parametrize("after", [0, 2])
async def test_what_a_handler_raises_arrives_behind_its_items(cluster: Cluster, after: int) -> None:
    async def handler(_: int, __: Context, sink: Sink[int]) -> None:
        for number in range(after):
            sink.take([number])
        raise RequestError("no such LoRA")

    await serve(cluster, handler)
    items, error = await ask(cluster)
    assert (items, type(error)) == (list(range(after)), RequestError)


async def test_an_item_that_cannot_be_encoded_fails_its_own_answer(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(request: int, _: Context, sink: Sink[object]) -> None:
        sink.take([1])
        sink.take([object() if request else 2])

    await serve(cluster, handler)
    items, error = await ask(cluster, 1)
    assert (items, type(error)) == ([1], EngineError)
    assert await ask(cluster, 0) == ([1, 2], None)
    assert len([r for r in caplog.records if r.levelno >= logging.ERROR]) == 1


async def test_a_handler_that_ignores_stop_is_killed_after_the_grace(cluster: Cluster) -> None:
    async def handler(_: int, context: Context, sink: Sink[int]) -> None:
        sink.take([1])
        await context.wait_stopped()
        sink.take([2])
        await trio.sleep_forever()

    await serve(cluster, handler, stop_grace_s=0.02)
    client, mine = await cluster.client(), Context("r")
    async with client.stream(1, int, context=mine) as stream:
        assert await anext(stream) == 1
        mine.stop()
        assert await anext(stream) == 2
        with pytest.raises(DeadlineError):
            await anext(stream)


async def test_shutdown_kills_and_the_caller_is_told_why(cluster: Cluster) -> None:
    async def handler(_: int, __: Context, sink: Sink[int]) -> None:
        sink.take([1])
        await trio.sleep_forever()

    worker = await serve(cluster, handler)
    client = await cluster.client()
    async with client.stream(1, int) as stream:
        assert await anext(stream) == 1
        worker.refuse_new()
        worker.kill_all()
        with pytest.raises(UnavailableError, match="shut down"):
            await anext(stream)
    await worker.wait_idle()


async def test_a_source_without_room_waits_for_its_own_consumer_and_no_other(
    cluster: Cluster,
) -> None:
    """It hands over until there is no room, and goes on when it is told."""
    taken = dict[int, int]()
    item = "x" * 4096

    async def handler(request: int, _: Context, sink: Sink[str]) -> None:
        room = Sleeper()
        sink.on_room(room.wake)
        taken[request] = 0
        while taken[request] < 2000:
            taken[request] += 1
            if not sink.take([item]):
                await room.sleep()

    await serve(cluster, handler)
    client = await cluster.client()
    async with client.stream(1, str) as slow:
        assert await anext(slow) == item
        async with client.stream(2, str) as other:
            assert len([each async for each in other]) == 2000
        assert taken[1] < 2000
        assert len([each async for each in slow]) == 1999


async def test_a_source_that_does_not_heed_its_sink_is_ended_before_it_fills_the_memory(
    cluster: Cluster,
) -> None:
    taken, ended = 0, trio.Event()

    async def handler(_: int, __: Context, sink: Sink[str]) -> None:
        nonlocal taken
        try:
            while taken < 100_000:
                taken += 1
                if not sink.take(["x" * 4096]):
                    await trio.lowlevel.checkpoint()
        finally:
            ended.set()

    await serve(cluster, handler)
    client = await cluster.client()
    async with client.stream(1, str) as stream:
        await anext(stream)
        await ended.wait()
        with pytest.raises(EngineError, match="no room"):
            async for _ in stream:
                pass
    assert taken < 100_000


# --- engines -------------------------------------------------------------------------------------


@asynccontextmanager
async def serving_engine(cluster: Cluster) -> AsyncIterator[tuple[EngineHost, Client]]:
    engine = make_engine()
    async with open_host(engine, hop=inline_hop, queued_deltas_max=4) as host:
        await cluster.serve("1", push=host.forward, request_type=GenerateRequest)
        yield host, await cluster.client()


def asked(prompt: str = "hello", tokens: int = 60) -> GenerateRequest:
    return GenerateRequest(model="exact", prompt=prompt, max_tokens=tokens, temperature=0)


async def test_an_engine_s_answer_is_the_one_it_generates(cluster: Cluster) -> None:
    async with serving_engine(cluster) as (host, client):
        _ = [delta async for delta in host.generate(asked(), Context("warm"))]
        expected = [delta async for delta in host.generate(asked(), Context("r"))]
        assert expected[0].cached_tokens
        async with client.stream(asked(), Delta) as stream:
            assert [delta async for delta in stream] == expected


async def test_engine_streams_that_are_left_stopped_or_broken_leave_nothing_behind(
    cluster: Cluster,
) -> None:
    async with serving_engine(cluster) as (host, client):

        async def one(number: int) -> None:
            context = Context(f"r{number}")
            async with client.stream(asked(f"prompt {number}"), Delta, context=context) as stream:
                seen, reason = 0, None
                async for delta in stream:
                    seen, reason = seen + 1, delta.finish_reason
                    if number % 4 == 1 and seen == number % 7:
                        return
                    if number % 4 == 2 and seen == number % 5:
                        context.stop()
                is_stopped = number % 4 == 2 and number % 5
                assert reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)

        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(one, number)
        await eventually(lambda: host.statistics().blocks_used == 0)
        found = host.statistics()
        assert (found.running, found.waiting, found.paused) == (0, 0, 0)
        assert found.cancellations > 0
