"""What a worker takes on, what it refuses, and in which words."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import attrs
import msgspec
import pytest
import trio
import trio.lowlevel
import trio.testing

from tests.runtime.endpoints import NAME, Cluster, open_cluster
from tests.runtime.one_process import OneProcess, open_process
from tests.runtime.worker.asking import PAYLOAD, ask, envelope
from tests.transports.tcp.ends import lone_client
from tests.transports.tcp.streams.raw_links import raw_caller
from trinamo.runtime.context import Context
from trinamo.runtime.engines.exact.engine import open_exact_engine
from trinamo.runtime.engines.generation import EngineInfo, EngineStatistics
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import EngineError, OverloadedError, RequestError, UnknownModelError
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason, GenerateRequest
from trinamo.runtime.protocol.streams.request import (
    AckStatus,
    Envelope,
    RequestKind,
    raise_for_nack,
)
from trinamo.runtime.worker.endpoint import Endpoint
from trinamo.runtime.worker.metrics import WorkerMetrics
from trinamo.runtime.worker.reports import check_waiting_tokens
from trinamo.runtime.worker.worker import Worker


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with open_cluster() as cluster:
        yield cluster


async def sleeper(_: int, __: Context) -> AsyncGenerator[int, None]:
    await trio.sleep(3600)
    yield 0


async def test_a_worker_whose_prompts_wait_is_passed_over_until_they_are_computed() -> None:
    """Bounded by the tokens that wait, not by the requests: a long prompt keeps a worker longer."""
    transports = OneProcess()
    prompt = GenerateRequest(model="exact", prompt="x" * 600, max_tokens=1, temperature=0)
    async with (
        open_exact_engine() as engine,
        open_process(transports, serving=True, worker__waiting_tokens_max=500) as process,
    ):
        await process.serve_push(NAME, engine.forward, request_type=GenerateRequest, engine=engine)
        client = await process.client(NAME)
        await client.router.wait_instances()
        answered: list[int] = []

        async def ask() -> None:
            async with client.stream(prompt, Delta) as stream:
                answered.extend([len(delta.token_ids) async for delta in stream])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            while engine.statistics().waiting_tokens < 501:
                await trio.lowlevel.checkpoint()
            with pytest.raises(OverloadedError, match="waiting_tokens_max 500"):
                await ask()
        assert engine.statistics().waiting_tokens == 0
        await ask()
        assert answered == [1, 1]


class Unreadable:
    """An engine of one's own whose statistics raise."""

    info = EngineInfo(engine="own", model="own", context_tokens_max=64)
    kind: type[BaseException] = ZeroDivisionError

    async def generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[Delta, None]:
        while not context.is_stopped:
            yield Delta("a", [1])
            await trio.sleep(0.005)
        yield Delta(finish_reason=FinishReason.STOP)

    def statistics(self) -> EngineStatistics:
        raise self.kind("nothing was counted")


@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit])
async def test_statistics_that_raise_refuse_a_request_and_end_nothing(
    caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    """The process goes on, and so do streams, load reports are skipped, and pages are shown."""
    engine, asked = Unreadable(), GenerateRequest(model="own", prompt="x")
    engine.kind = kind
    wanted: dict[str, Any] = {"router__policy": "least_loaded"}
    async with open_process(OneProcess(), serving=True, **wanted) as process:
        await process.serve(NAME, engine.generate, request_type=GenerateRequest, engine=engine)
        client = await process.client(NAME)
        await client.router.wait_instances()
        assert process.worker is not None
        [endpoint] = process.worker._endpoints.values()
        mine = Context("r")
        async with client.stream(asked, Delta, context=mine) as stream:
            assert (await anext(stream)).text == "a"
            full = attrs.evolve(endpoint, check_room=lambda: check_waiting_tokens(engine, 5))
            process.worker._endpoints[str(NAME)] = full
            with pytest.raises(EngineError, match="nothing was counted") as refused:
                await client.stream(asked, Delta).__aenter__()
            assert refused.value.definite
            skipped = "load_reports_skipped_total"
            with trio.fail_after(120):
                while not process.metrics.value(skipped, endpoint=str(NAME)):
                    await trio.sleep(0.01)
            assert process.metrics.value("engine_steps_total", endpoint=str(NAME)) == 0
            mine.stop()
            rest = [delta async for delta in stream]
    assert rest[-1].finish_reason is FinishReason.STOP
    assert "statistics of engine own cannot be read" in caplog.text


async def test_a_request_type_of_one_s_own_may_call_anything_its_model(cluster: Cluster) -> None:
    worker = Worker(lone_client(), RealEnv(), instance_id="1")
    worker.add(Endpoint(NAME, stream=sleeper, request_type=Numbered, model="own"))
    async with trio.open_nursery() as nursery:
        await nursery.start(worker.run)
        answer = worker.admit(envelope("r"), msgspec.msgpack.encode({"model": 7}))
        nursery.cancel_scope.cancel()
    assert answer.status is AckStatus.UNKNOWN_MODEL
    assert "not '7'" in answer.message


class Numbered(msgspec.Struct):
    model: int


async def test_what_the_worker_does_not_take_on_it_says_in_type_and_words(cluster: Cluster) -> None:
    worker = Worker(lone_client(), RealEnv(), instance_id="1", requests_max=1)
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
    worker = Worker(lone_client(), RealEnv(), instance_id="1", requests_max=0, metrics=metrics)
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


async def test_what_is_a_part_of_others_takes_no_place_of_a_request() -> None:
    worker = Worker(lone_client(), RealEnv(), instance_id="1", requests_max=1)
    part = EndpointName("a", "b", "parts")
    worker.add(Endpoint(NAME, stream=sleeper))
    worker.add(Endpoint(part, stream=sleeper, for_workers=True))
    async with trio.open_nursery() as nursery:
        await nursery.start(worker.run)

        def status(name: EndpointName, request_id: str) -> AckStatus | None:
            return worker.admit(Envelope(id=request_id, endpoint=str(name)), PAYLOAD).status

        assert [status(part, "p0"), status(part, "p1")] == [AckStatus.ACCEPTED] * 2
        assert [status(NAME, "r0"), status(NAME, "r1")] == [
            AckStatus.ACCEPTED,
            AckStatus.OVERLOADED,
        ]
        assert status(part, "p2") is AckStatus.ACCEPTED
        assert (worker.active_count, worker.admitted_count) == (4, 1)
        worker.kill_all()
        await worker.wait_idle()
        assert worker.admitted_count == 0
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
    worker = Worker(lone_client(), RealEnv(), instance_id="1", cancelled_ttl_s=60)
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
    worker = Worker(lone_client(), RealEnv(), instance_id="1", cancelled_ttl_s=60)
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
    worker = Worker(lone_client(), RealEnv(), instance_id="1")
    worker.cancel("ended", has_arrived=True)
    assert worker._cancelled == {}


async def test_cancels_are_remembered_to_a_bound() -> None:
    worker = Worker(lone_client(), RealEnv(), instance_id="1")
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
