"""Two processes, one of them shot: what the other one makes of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from tests.runtime.endpoints import Cluster, open_cluster
from tests.transports.tcp.children import Child, child
from tests.transports.tcp.processes import NAME, OPTIONS
from trinamo.runtime.caller.client import Client
from trinamo.runtime.context import Context
from trinamo.runtime.errors import DisconnectedError
from trinamo.runtime.protocol.discovery.instances import Instance, encode_instance
from trinamo.runtime.worker.endpoint import Endpoint


@asynccontextmanager
async def worker(cluster: Cluster, instance_id: str) -> AsyncIterator[Child]:
    """A worker process, registered in the cluster as `instance_id`."""
    async with child("worker") as process:
        address = (await process.hear())["address"]
        instance = Instance(endpoint=str(NAME), id=instance_id, transports={"tcp": address})
        await cluster.control.put(instance.key, encode_instance(instance))
        yield process


async def client_of(cluster: Cluster, count: int) -> Client:
    client = await cluster.client(NAME)
    await client.router.wait_instances(count)
    return client


@pytest.mark.parametrize("pause_s", [0.0, 0.002, -1.0], ids=["busy", "paced", "silent"])
async def test_a_worker_shot_mid_stream_is_a_typed_error_at_its_caller(pause_s: float) -> None:
    async with open_cluster(secret=OPTIONS.secret) as cluster, worker(cluster, "1") as shot:
        client = await client_of(cluster, 1)
        async with client.stream(pause_s, int) as stream:
            assert await anext(stream) == 0
            shot.shoot()
            with pytest.raises(DisconnectedError) as caught:
                [item async for item in stream]
        assert not caught.value.definite


async def endless(_: float, __: Context) -> AsyncGenerator[int, None]:
    yield 0


async def test_after_a_worker_is_shot_requests_go_to_another_and_none_to_the_dead() -> None:
    """Discovery still names the dead one: its lease has not expired."""
    async with open_cluster(secret=OPTIONS.secret) as cluster, worker(cluster, "1") as shot:
        client = await client_of(cluster, 1)
        async with client.stream(0.001, int) as stream:
            assert await anext(stream) == 0
            shot.shoot()
            with pytest.raises(DisconnectedError):
                [item async for item in stream]
        (await cluster.serve("2")).add(Endpoint(NAME, stream=endless))
        other = Instance(endpoint=str(NAME), id="2", transports={"tcp": cluster.addresses["2"]})
        await cluster.control.put(other.key, encode_instance(other))
        await client.router.wait_instances(2)
        for _ in range(6):
            assert client.router.choose().id == "2"
            async with client.stream(0.0, int) as stream:
                assert [item async for item in stream] == [0]
                assert stream.instance.id == "2"


@pytest.mark.parametrize("pause_s", ["0.0", "0.002", "-1.0"], ids=["busy", "paced", "silent"])
async def test_a_caller_that_is_shot_cancels_its_handler(pause_s: str) -> None:
    async with child("worker") as serving:
        address = (await serving.hear())["address"]
        async with child("caller", address, pause_s) as shot:
            await shot.hear(event="streaming")
            await serving.hear(event="started")
            shot.shoot()
            assert (await serving.hear(event="ended"))["reason"] == "consumer_dropped"
        # The worker lives and serves the next one.
        async with child("caller", address, pause_s) as another:
            await another.hear(event="streaming")


STREAMS = 256


async def test_a_caller_shot_under_many_streams_cancels_each_of_its_handlers() -> None:
    async with child("worker") as serving:
        address = (await serving.hear())["address"]
        async with child("caller", address, "0.02", str(STREAMS)) as shot:
            for _ in range(STREAMS):
                await shot.hear(event="streaming")
            shot.shoot()
            ended = [await serving.hear(event="ended") for _ in range(STREAMS)]
    assert {each["reason"] for each in ended} == {"consumer_dropped"}


async def test_a_worker_shot_under_many_streams_is_a_typed_error_of_each() -> None:
    errors: list[DisconnectedError] = []
    started = trio.Event()
    async with open_cluster(secret=OPTIONS.secret) as cluster, worker(cluster, "1") as shot:
        client = await client_of(cluster, 1)

        async def consume() -> None:
            async with client.stream(0.02, int) as stream:
                assert await anext(stream) == 0
                running.append(stream)
                if len(running) == STREAMS:
                    started.set()
                with pytest.raises(DisconnectedError) as caught:
                    [item async for item in stream]
                errors.append(caught.value)

        running: list[object] = []
        async with trio.open_nursery() as nursery:
            for _ in range(STREAMS):
                nursery.start_soon(consume)
            await started.wait()
            shot.shoot()
    assert len(errors) == STREAMS
    assert not any(error.definite for error in errors)
