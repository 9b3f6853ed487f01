"""The worker, asked through real planes: how handlers end, and what it takes on."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from tests.runtime.endpoints import NAME, UNARY, Cluster, Handler, open_cluster
from tests.runtime.worker.asking import ask, envelope
from tests.transports.tcp.ends import eventually, lone_client
from tests.transports.tcp.streams.raw_links import raw_caller
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import (
    DeadlineError,
    EngineError,
    KilledError,
    RequestError,
    TrinamoError,
    UnavailableError,
)
from trinamo.runtime.logs.fields import current_fields
from trinamo.runtime.protocol.streams.control import Declined, Failed
from trinamo.runtime.worker.endpoint import Endpoint
from trinamo.runtime.worker.worker import Worker


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with open_cluster() as cluster:
        yield cluster


# --- handlers ------------------------------------------------------------------------------------


async def test_a_handler_s_items_arrive_and_the_answer_is_complete(cluster: Cluster) -> None:
    await cluster.serve("1")
    assert await ask(cluster, 500) == (list(range(500)), None)
    assert await ask(cluster, 0) == ([], None)


class Panic(BaseException):
    """As extensions in Rust raise it."""


@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit, Panic])
@pytest.mark.parametrize("after", [0, 2])
async def test_a_stranger_s_exception_is_an_engine_error_and_is_logged_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, after: int, kind: type[BaseException]
) -> None:
    """Whatever it is: one request would end each worker that is asked in its turn."""

    async def handler(_: int, __: Context) -> AsyncGenerator[int, None]:
        for number in range(after):
            yield number
        raise kind("by zero")

    await cluster.serve("1", handler)
    items, error = await ask(cluster)
    assert items == list(range(after))
    assert type(error) is EngineError
    assert f"{kind.__name__}: by zero" in error.message
    assert len([r for r in caplog.records if r.levelno >= logging.ERROR]) == 1


async def test_an_error_of_the_tree_arrives_as_itself_and_is_not_logged(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(_: int, __: Context) -> AsyncGenerator[int, None]:
        yield 1
        raise RequestError("no such LoRA")

    await cluster.serve("1", handler)
    items, error = await ask(cluster)
    assert (items, type(error)) == ([1], RequestError)
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


async def test_an_item_that_cannot_be_encoded_fails_its_own_stream(cluster: Cluster) -> None:
    async def handler(request: int, _: Context) -> AsyncGenerator[object, None]:
        yield 1
        yield object() if request else 2

    await cluster.serve("1", handler)
    items, error = await ask(cluster, 1)
    assert (items, type(error)) == ([1], EngineError)
    assert await ask(cluster, 0) == ([1, 2], None)


async def raise_in_both_tasks(context: Context) -> None:
    """A nursery one of whose tasks turns its cancellation into an error of its own."""

    async def breaks() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("while being cancelled")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(breaks)
        nursery.start_soon(trio.sleep_forever)


async def test_a_handler_that_raises_while_it_is_killed_harms_only_itself(cluster: Cluster) -> None:
    """A group of a Cancelled and an error is no `Exception` until the scope has taken its part."""

    async def handler(request: int, context: Context) -> AsyncGenerator[int, None]:
        yield 1
        if request:
            await raise_in_both_tasks(context)

    worker = await cluster.serve("1", handler)
    client = await cluster.client()
    async with client.stream(1, int) as stream:
        assert await anext(stream) == 1
    await worker.wait_idle()
    assert await ask(cluster, 0) == ([1], None)


# --- stop, kill and deadlines --------------------------------------------------------------------


async def test_a_handler_asleep_in_a_long_prefill_is_cancelled_when_its_consumer_leaves(
    cluster: Cluster,
) -> None:
    entered, left = trio.Event(), trio.Event()

    async def handler(_: int, __: Context) -> AsyncGenerator[int, None]:
        entered.set()
        try:
            await trio.sleep(3600)
        finally:
            left.set()
        yield 1

    await cluster.serve("1", handler)
    client = await cluster.client()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def consumer() -> None:
            async with client.stream(1, int):
                raise AssertionError("there was no item")

        await entered.wait()
        nursery.cancel_scope.cancel()
    await left.wait()


async def test_a_handler_that_never_waits_lets_others_run_and_can_be_killed(
    cluster: Cluster,
) -> None:
    """Its items are always ready, its consumer takes them all, and the socket always has room."""
    is_left = False

    async def handler(request: int, _: Context) -> AsyncGenerator[int, None]:
        nonlocal is_left
        try:
            while request == 0:
                yield 0
        finally:
            is_left = is_left or request == 0
        yield request

    await cluster.serve("1", handler)
    client = await cluster.client()
    count = 0
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def consumer() -> None:
            nonlocal count
            async with client.stream(0, int) as stream:
                async for _ in stream:
                    count += 1

        await eventually(lambda: count > 1000)
        assert await ask(cluster, 5) == ([5], None)
        assert not is_left
        nursery.cancel_scope.cancel()
    await eventually(lambda: is_left)


async def test_stop_lets_the_handler_finish_within_the_grace(cluster: Cluster) -> None:
    async def handler(_: int, context: Context) -> AsyncGenerator[int, None]:
        yield 1
        await context.wait_stopped()
        yield 2

    worker = await cluster.serve("1", handler)
    client, mine = await cluster.client(), Context("r")
    async with client.stream(1, int, context=mine) as stream:
        assert await anext(stream) == 1
        mine.stop()
        assert [item async for item in stream] == [2]
    await worker.wait_idle()


async def test_a_handler_that_ignores_stop_is_killed_after_the_grace_and_its_items_arrive(
    cluster: Cluster,
) -> None:
    async def handler(_: int, context: Context) -> AsyncGenerator[int, None]:
        yield 1
        await context.wait_stopped()
        yield 2
        await trio.sleep_forever()

    await cluster.serve("1", handler, stop_grace_s=0.02)
    client, mine = await cluster.client(), Context("r")
    async with client.stream(1, int, context=mine) as stream:
        assert await anext(stream) == 1
        mine.stop()
        assert await anext(stream) == 2
        with pytest.raises(DeadlineError):
            await anext(stream)


async def test_shutdown_stops_then_kills_and_the_caller_is_told_why(cluster: Cluster) -> None:
    async def handler(_: int, __: Context) -> AsyncGenerator[int, None]:
        yield 1
        await trio.sleep_forever()

    worker = await cluster.serve("1", handler)
    client = await cluster.client()
    async with client.stream(1, int) as stream:
        assert await anext(stream) == 1
        worker.refuse_new()
        worker.stop_all()
        assert worker.active_count == 1
        worker.kill_all()
        with pytest.raises(UnavailableError, match="the worker shut down") as told:
            await anext(stream)
        assert not told.value.definite
    await worker.wait_idle()


@pytest.mark.parametrize("who", ["worker", "frontend"])
@pytest.mark.parametrize("heeds", [True, False])
async def test_what_a_shutdown_stopped_is_not_complete_however_its_handler_ends(
    cluster: Cluster, who: str, heeds: bool
) -> None:
    """Nor does anything arrive that the handler makes of the Stop, such as an end that looks whole."""

    async def handler(_: int, context: Context) -> AsyncGenerator[int, None]:
        yield 1
        await context.wait_stopped()
        yield 2
        if not heeds:
            await trio.sleep_forever()

    worker = await cluster.serve("1", handler, stop_grace_s=0.02)
    client, mine = await cluster.client(), Context("r")
    async with client.stream(1, int, context=mine) as stream:
        assert await anext(stream) == 1
        if who == "worker":
            worker.stop_all()
        else:
            mine.stop(Reason.FRONTEND_SHUTDOWN)
        with pytest.raises(UnavailableError, match=f"the {who} shut down") as told:
            await anext(stream)
        assert not told.value.definite
    await worker.wait_idle()


async def test_an_early_failure_is_a_declining_prologue_a_late_one_a_failed_frame() -> None:
    async def handler(request: int, _: Context) -> AsyncGenerator[int, None]:
        for number in range(request):
            yield number
        raise EngineError("no")

    worker = Worker(lone_client(), RealEnv(), instance_id="1")
    worker.add(Endpoint(NAME, stream=handler))
    async with raw_caller() as port, trio.open_nursery() as nursery:
        await nursery.start(worker.run)
        for number, last in ((0, Declined), (1, Failed)):
            asked = msgspec.structs.replace(envelope(f"r{number}"), response=port.connection())
            worker.admit(asked, msgspec.msgpack.encode(number))
            end = await port.accept()
            async with end.stream:
                assert type((await end.hear_all())[-1]) is last
        await worker.wait_idle()
        nursery.cancel_scope.cancel()


async def test_a_killed_request_is_recorded_with_its_reason(cluster: Cluster) -> None:
    reasons: list[Reason | None] = []

    async def handler(_: int, context: Context) -> AsyncGenerator[int, None]:
        try:
            yield 1
            await trio.sleep_forever()
        finally:
            reasons.append(context.reason)

    handlers: Handler = handler
    worker = await cluster.serve("1", handlers)
    client = await cluster.client()
    async with client.stream(1, int) as stream:
        await anext(stream)
    await worker.wait_idle()
    assert reasons == [Reason.CONSUMER_DROPPED]


async def test_items_are_counted_while_their_answer_goes_on(cluster: Cluster) -> None:
    """Who looks at a worker in the middle of long answers must not see an idle one."""
    held = trio.Event()

    async def handler(_: int, __: Context) -> AsyncGenerator[int, None]:
        yield 1
        yield 2
        await held.wait()

    worker = await cluster.serve("1", handler)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, cluster)
        metrics = worker._metrics
        await eventually(lambda: metrics.value("worker_items_total", endpoint=str(NAME)) == 2)
        held.set()


# --- what the log says ---------------------------------------------------------------------------


async def test_each_request_has_one_line_when_it_has_ended_at_info_only_if_it_failed(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(request: int, _: Context) -> AsyncGenerator[int, None]:
        yield 1
        if request:
            raise RequestError("no such LoRA")

    await cluster.serve("1", handler)
    with caplog.at_level(logging.DEBUG, "trinamo.worker"):
        await ask(cluster, 0)
        await ask(cluster, 1)
        await eventually(lambda: len(ends(caplog)) == 2)

    good, bad = ends(caplog)
    assert (good.levelno, bad.levelno) == (logging.DEBUG, logging.INFO)
    assert (vars(good)["outcome"], vars(bad)["outcome"]) == ("success", RequestError.code)
    assert vars(bad)["error"] == "no such LoRA"


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("raises", [False, True])
async def test_who_ended_a_request_is_what_it_is_counted_as_whatever_its_handler_made_of_it(
    cluster: Cluster, is_stream: bool, raises: bool
) -> None:
    async def work() -> int:
        try:
            await trio.sleep_forever()
        finally:
            if raises:
                raise ValueError("in its own end")

    async def stream(_: int, __: Context) -> AsyncGenerator[int, None]:
        yield await work()

    async def unary(_: int, __: Context) -> int:
        return await work()

    worker = await cluster.serve("1", stream)
    worker.add(Endpoint(UNARY, unary=unary))
    name = NAME if is_stream else UNARY
    client = await cluster.client(name)

    async def asked() -> None:
        if is_stream:
            async with client.stream(1, int):
                raise AssertionError("there was no item")
        await client.call(1, int)

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(raised_by, asked)
        await eventually(lambda: worker.active_count == 3)
        late, killed, shut = worker._active.values()
        late.limit(trio.current_time())
        killed.kill()
        shut.kill(Reason.WORKER_SHUTDOWN)
        await worker.wait_idle()
        nursery.cancel_scope.cancel()

    metrics = worker._metrics
    counted = {code: metrics.requests.tally(str(name), code).value for code in ENDS}
    assert counted == dict.fromkeys(ENDS, 1)
    reasons = (Reason.DEADLINE, Reason.CONSUMER_DROPPED, Reason.WORKER_SHUTDOWN)
    counted = {each: metrics.cancellations.tally(str(name), each).value for each in reasons}
    assert counted == dict.fromkeys(reasons, 1)


ENDS = (DeadlineError.code, KilledError.code, UnavailableError.code)


async def raised_by(ask: Callable[[], Awaitable[None]]) -> None:
    with suppress(TrinamoError):
        await ask()


def ends(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [each for each in caplog.records if each.getMessage() == "request ended"]


async def test_lines_of_a_request_s_task_have_its_id_as_a_field(cluster: Cluster) -> None:
    seen: list[tuple[dict[str, Any], str]] = []

    async def handler(_: int, context: Context) -> AsyncGenerator[int, None]:
        seen.append((current_fields(), context.id))
        yield 1

    await cluster.serve("1", handler)
    await ask(cluster)

    [(fields, request_id)] = seen
    assert (fields["request_id"], fields["instance_id"]) == (request_id, "1")
