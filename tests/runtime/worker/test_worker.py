"""The worker, asked through real planes: how handlers end, and what it takes on."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator

import msgspec
import pytest
import trio
import trio.testing

from tests.runtime.endpoints import NAME, UNARY, Cluster, Handler, open_cluster
from tests.transports.tcp.ends import eventually, raw_caller
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import (
    DeadlineError,
    DisconnectedError,
    EngineError,
    OverloadedError,
    RequestError,
    TrinamoError,
    UnknownModelError,
)
from trinamo.runtime.logs.fields import current_fields
from trinamo.runtime.metrics.worker import WorkerMetrics
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.protocol.openai.generate import GenerateRequest
from trinamo.runtime.protocol.streams.control import Declined, Failed
from trinamo.runtime.protocol.streams.request import (
    AckStatus,
    ConnectionInfo,
    Envelope,
    RequestKind,
    StreamType,
    raise_for_nack,
)
from trinamo.runtime.worker.endpoint import Endpoint
from trinamo.runtime.worker.worker import Worker
from trinamo.transports.tcp import TcpClient, TcpOptions


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with open_cluster() as cluster:
        yield cluster


async def ask(cluster: Cluster, request: object = 3) -> tuple[list[int], TrinamoError | None]:
    """The items of one answer and its terminal."""
    client = await cluster.client()
    items: list[int] = []
    try:
        async with client.stream(request, int) as stream:
            async for item in stream:
                items.append(item)  # noqa: PERF401 -- items before the error count
    except TrinamoError as error:
        return items, error
    return items, None


# --- handlers ------------------------------------------------------------------------------------


async def test_a_handler_s_items_arrive_and_the_answer_is_complete(cluster: Cluster) -> None:
    await cluster.serve("1")
    assert await ask(cluster, 500) == (list(range(500)), None)
    assert await ask(cluster, 0) == ([], None)


@pytest.mark.parametrize("after", [0, 2])
async def test_a_stranger_s_exception_is_an_engine_error_and_is_logged_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, after: int
) -> None:
    async def handler(_: int, __: Context) -> AsyncGenerator[int, None]:
        for number in range(after):
            yield number
        raise ZeroDivisionError("by zero")

    await cluster.serve("1", handler)
    items, error = await ask(cluster)
    assert items == list(range(after))
    assert type(error) is EngineError
    assert "ZeroDivisionError: by zero" in error.message
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
        with pytest.raises(DisconnectedError, match="shut down"):
            await anext(stream)
    await worker.wait_idle()


# --- admission -----------------------------------------------------------------------------------


def envelope(
    request_id: str = "r", *, endpoint: str = str(NAME), instance_id: str = ""
) -> Envelope:
    nobody = ConnectionInfo("127.0.0.1:1", "s", StreamType.RESPONSE)
    return Envelope(id=request_id, endpoint=endpoint, instance_id=instance_id, response=nobody)


PAYLOAD = msgspec.msgpack.encode(1)


async def sleeper(_: int, __: Context) -> AsyncGenerator[int, None]:
    await trio.sleep(3600)
    yield 0


async def test_what_the_worker_does_not_take_on_it_says_in_type_and_words(cluster: Cluster) -> None:
    worker = Worker(TcpClient(TcpOptions()), RealEnv(), instance_id="1", requests_max=1)
    worker.add(Endpoint(NAME, stream=sleeper, request_type=int))
    assert worker.admit(envelope(), PAYLOAD).status is AckStatus.DRAINING
    async with raw_caller() as port, trio.open_nursery() as nursery:
        await nursery.start(worker.run)

        def status(asked: Envelope, payload: bytes = PAYLOAD) -> AckStatus | None:
            ack = worker.admit(asked, payload)
            assert ack.id == asked.id
            assert bool(ack.message) is (ack.status is not AckStatus.ACCEPTED)
            return ack.status

        assert status(envelope(endpoint="a/b/c")) is AckStatus.UNKNOWN_ENDPOINT
        assert status(envelope(instance_id="2")) is AckStatus.UNKNOWN_ENDPOINT
        assert status(envelope(), b"\xc1") is AckStatus.INVALID
        assert status(envelope(), msgspec.msgpack.encode("no number")) is AckStatus.INVALID
        assert (
            status(msgspec.structs.replace(envelope(), kind=RequestKind.UNARY)) is AckStatus.INVALID
        )
        accepted = msgspec.structs.replace(envelope(), response=port.connection())
        assert status(accepted) is AckStatus.ACCEPTED
        assert status(envelope("r2")) is AckStatus.OVERLOADED
        worker.refuse_new()
        assert status(envelope("r3")) is AckStatus.DRAINING
        assert worker.is_draining
        worker.kill_all()
        await worker.wait_idle()
        nursery.cancel_scope.cancel()


async def test_a_probe_is_answered_by_a_full_worker_and_starts_and_counts_nothing() -> None:
    metrics = WorkerMetrics(RealEnv())
    worker = Worker(
        TcpClient(TcpOptions()), RealEnv(), instance_id="1", requests_max=0, metrics=metrics
    )
    worker.add(Endpoint(NAME, stream=sleeper))
    async with trio.open_nursery() as nursery:
        await nursery.start(worker.run)

        def status(**changes: str) -> AckStatus | None:
            probe = Envelope(id="p", endpoint=str(NAME), instance_id="1", kind=RequestKind.PROBE)
            ack = worker.admit(msgspec.structs.replace(probe, **changes), b"")
            # Whoever answers says who it is, and so does somebody else at the address.
            assert (ack.id, ack.instance_id) == ("p", "1")
            return ack.status

        assert [status(), status()] == [AckStatus.ACCEPTED] * 2
        assert status(instance_id="2") is AckStatus.UNKNOWN_ENDPOINT
        assert status(endpoint="a/b/c") is AckStatus.UNKNOWN_ENDPOINT
        worker.refuse_new()
        assert status() is AckStatus.DRAINING
        assert worker.active_count == 0
        assert b"worker_requests_total{" not in metrics.render()
        nursery.cancel_scope.cancel()


async def test_a_request_id_that_is_being_served_is_invalid(cluster: Cluster) -> None:
    worker = await cluster.serve("1", sleeper)
    async with raw_caller() as port:
        asked = msgspec.structs.replace(envelope(), response=port.connection())
        assert worker.admit(asked, PAYLOAD).status is AckStatus.ACCEPTED
        assert worker.admit(asked, PAYLOAD).status is AckStatus.INVALID
        worker.cancel("r")
        await worker.wait_idle()
        assert worker.active_count == 0


async def test_a_cancel_that_overtakes_its_request_wins_for_a_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    worker = Worker(TcpClient(TcpOptions()), RealEnv(), instance_id="1", cancelled_ttl_s=60)
    worker.add(Endpoint(NAME, stream=sleeper))
    async with trio.open_nursery() as nursery:
        await nursery.start(worker.run)
        worker.cancel("r")
        assert worker.admit(envelope(), PAYLOAD).status is AckStatus.INVALID
        await trio.sleep(61)
        assert worker.admit(envelope(), PAYLOAD).status is AckStatus.ACCEPTED
        worker.kill_all()
        nursery.cancel_scope.cancel()


async def test_cancels_whose_time_is_up_are_forgotten_and_no_others(
    autojump_clock: trio.testing.MockClock,
) -> None:
    worker = Worker(TcpClient(TcpOptions()), RealEnv(), instance_id="1", cancelled_ttl_s=60)
    worker.cancel("early")
    await trio.sleep(30)
    worker.cancel("late")
    assert list(worker._cancelled) == ["early", "late"]
    await trio.sleep(30)
    worker.cancel("new")
    assert list(worker._cancelled) == ["late", "new"]
    # Said again, it is young again.
    worker.cancel("late")
    assert list(worker._cancelled) == ["new", "late"]


async def test_a_cancel_for_a_request_that_has_been_here_is_not_remembered() -> None:
    worker = Worker(TcpClient(TcpOptions()), RealEnv(), instance_id="1")
    worker.cancel("ended", has_arrived=True)
    assert worker._cancelled == {}


async def test_cancels_are_remembered_to_a_bound() -> None:
    worker = Worker(TcpClient(TcpOptions()), RealEnv(), instance_id="1")
    for number in range(5000):
        worker.cancel(f"r{number}")
    assert len(worker._cancelled) == 4096
    assert "r4999" in worker._cancelled


async def test_a_caller_that_cannot_be_reached_costs_only_its_request(cluster: Cluster) -> None:
    worker = await cluster.serve("1")
    assert worker.admit(envelope(), PAYLOAD).status is AckStatus.ACCEPTED
    await worker.wait_idle()
    assert await ask(cluster, 2) == ([0, 1], None)


async def test_an_endpoint_is_served_once(cluster: Cluster) -> None:
    worker = await cluster.serve("1")
    with pytest.raises(RequestError, match="served already"):
        worker.add(Endpoint(NAME, stream=sleeper))


async def test_a_worker_refuses_a_model_that_it_does_not_serve(cluster: Cluster) -> None:
    """Whoever asks: an answer of its own model under the other's name would be a wrong one."""
    worker = await cluster.serve("1")
    other = EndpointName("ns", "engine", "models")
    worker.add(Endpoint(other, stream=sleeper, request_type=GenerateRequest, model="own"))
    own, wrong = (
        worker.admit(
            envelope(model, endpoint=str(other)),
            msgspec.msgpack.encode(GenerateRequest(model=model, prompt="hi")),
        )
        for model in ("own", "other")
    )
    assert own.status is AckStatus.ACCEPTED
    with pytest.raises(UnknownModelError, match="'own'") as caught:
        raise_for_nack(wrong)
    assert caught.value.definite
    worker.kill_all()
    await worker.wait_idle()


# --- unary ---------------------------------------------------------------------------------------


async def test_unary_requests_return_raise_and_are_bounded(cluster: Cluster) -> None:
    worker = await cluster.serve("1", requests_max=1)
    release = trio.Event()

    async def echo(request: str, _: Context) -> str:
        if request == "wait":
            await release.wait()
        if request == "raise":
            raise ZeroDivisionError("by zero")
        return request

    worker.add(Endpoint(UNARY, unary=echo, request_type=str))
    client = await cluster.client(UNARY)
    assert await client.call("hello", str) == "hello"
    with pytest.raises(EngineError, match="by zero"):
        await client.call("raise", str)
    with pytest.raises(RequestError):
        await client.call(1, str)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.call, "wait", str)
        await eventually(lambda: worker.active_count == 1)
        with pytest.raises(OverloadedError):
            await client.call("hello", str)
        release.set()
    release = trio.Event()
    with pytest.raises(DeadlineError):
        await client.call("wait", str, timeout_s=0.02)
    await worker.wait_idle()


async def test_a_bidirectional_handler_gets_the_input_and_its_truncation(cluster: Cluster) -> None:
    worker = await cluster.serve("1")
    seen: list[int] = []

    async def handler(_: int, __: Context, items: AsyncIterator[int]) -> AsyncGenerator[int, None]:
        async for item in items:
            seen.append(item)
            yield item * 2

    name = EndpointName("ns", "engine", "sum")
    worker.add(Endpoint(name, bidirectional=handler, input_type=int))
    for is_complete in (True, False):
        mine = Context("r")
        with cluster.home.register(mine) as answer, cluster.home.register_input(mine) as asked:
            request = Envelope(
                id=f"r{is_complete}",
                endpoint=str(name),
                response=answer.connection,
                request=asked.connection,
            )
            assert worker.admit(request, PAYLOAD).status is AckStatus.ACCEPTED
            for number in range(3):
                await asked.send(msgspec.msgpack.encode(number))
            if is_complete:
                await asked.finish()
                items = [msgspec.msgpack.decode(item) async for item in answer.channel]
                assert items == [0, 2, 4]
            else:
                await anext(answer.channel)
                asked.close()
                with pytest.raises(TrinamoError):
                    [item async for item in answer.channel]
        await worker.wait_idle()


async def test_an_early_failure_is_a_declining_prologue_a_late_one_a_failed_frame() -> None:
    async def handler(request: int, _: Context) -> AsyncGenerator[int, None]:
        for number in range(request):
            yield number
        raise EngineError("no")

    worker = Worker(TcpClient(TcpOptions()), RealEnv(), instance_id="1")
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


def ends(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [each for each in caplog.records if each.getMessage() == "request ended"]


async def test_lines_of_a_request_s_task_have_its_id_as_a_field(cluster: Cluster) -> None:
    seen: list[tuple[str, str]] = []

    async def handler(_: int, context: Context) -> AsyncGenerator[int, None]:
        seen.append((current_fields()["request_id"], context.id))
        yield 1

    await cluster.serve("1", handler)
    await ask(cluster)

    [(field, request_id)] = seen
    assert field == request_id
