"""A worker and a client over real tcp planes in one process, found through a memory control plane."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from tests.transports.tcp.ends import PATIENCE_S, eventually, options
from trinamo.runtime.caller.client import Client
from trinamo.runtime.caller.router import Router
from trinamo.runtime.context import Context
from trinamo.runtime.env import RealEnv
from trinamo.runtime.planes import RequestPlane
from trinamo.runtime.protocol.discovery.instances import EndpointName, Instance, encode_instance
from trinamo.runtime.worker.endpoint import Endpoint, PushHandler
from trinamo.runtime.worker.worker import Worker
from trinamo.transports.memory.control import MemoryControlPlane
from trinamo.transports.tcp import (
    TcpClient,
    TcpOptions,
    TcpRequestServer,
    TcpStreamServer,
    open_request_plane,
    open_request_server,
    open_stream_server,
)

NAME = EndpointName("ns", "engine", "generate")
UNARY = EndpointName("ns", "engine", "echo")
Handler = Callable[[Any, Context], AsyncGenerator[Any, None]]


async def count(request: int, context: Context) -> AsyncGenerator[int, None]:
    """A handler: so many numbers, or fewer once stopped."""
    for number in range(request):
        if context.is_stopped:
            return
        yield number


@attrs.define(eq=False)
class Cluster:
    """One caller and as many workers as a test asks for."""

    nursery: trio.Nursery
    control: MemoryControlPlane
    home: TcpStreamServer
    planes: dict[str, RequestPlane]
    workers: dict[str, Worker] = attrs.Factory(dict)
    calls: dict[str, TcpClient] = attrs.Factory(dict)
    routers: list[Router] = attrs.Factory(list)
    addresses: dict[str, str] = attrs.Factory(dict)
    using: TcpOptions = attrs.Factory(options)
    """Of all its ports."""

    async def serve(
        self,
        instance_id: str,
        handler: Handler = count,
        *,
        push: PushHandler | None = None,
        request_type: Any = Any,
        **settings: Any,
    ) -> Worker:
        """Start a worker with `handler`, or the one that pushes, under `NAME` and register it."""
        call = self.calls[instance_id] = TcpClient(self.using, RealEnv(), self.nursery)
        worker = Worker(call, RealEnv(), instance_id=instance_id, **settings)
        pulled = None if push else handler
        worker.add(Endpoint(NAME, request_type, stream=pulled, push=push))
        self.workers[instance_id] = worker
        await self.nursery.start(worker.run)
        server = await self.nursery.start(self._listen, worker)
        self.addresses[instance_id] = server.address
        await self.put(instance_id, {"tcp": server.address})
        return worker

    async def _listen(
        self, worker: Worker, *, task_status: trio.TaskStatus[TcpRequestServer]
    ) -> None:
        opened = open_request_server(self.using, RealEnv(), instance_id=worker.instance_id)
        async with opened as server:
            task_status.started(server)
            await server.serve(worker)

    async def put(
        self,
        instance_id: str,
        transports: Mapping[str, str],
        *,
        draining: bool = False,
        incarnation: int = 1,
    ) -> None:
        """Register an instance under both endpoints."""
        for name in (NAME, UNARY):
            instance = Instance(
                endpoint=str(name),
                id=instance_id,
                transports=dict(transports),
                draining=draining,
                incarnation=incarnation,
            )
            await self.control.put(instance.key, encode_instance(instance))

    async def remove(self, instance_id: str) -> None:
        for name in (NAME, UNARY):
            await self.control.delete(f"{name.key_prefix}{instance_id}")

    async def client(
        self, name: EndpointName = NAME, *, silence_grace_s: float = 10.0, **settings: Any
    ) -> Client:
        router = Router(
            self.control,
            name,
            RealEnv(),
            request_planes=self.planes,
            silence_grace_s=silence_grace_s,
        )
        self.routers.append(router)
        await self.nursery.start(router.run)
        # A busy machine may stall a worker for some seconds before it calls home.
        settings.setdefault("opening_timeout_s", 60.0)
        client = Client(router, self.home, RealEnv(), **settings)
        self.nursery.start_soon(client.run)
        return client


@asynccontextmanager
async def open_cluster(**changes: Any) -> AsyncIterator[Cluster]:
    """Everything is idle again when the body is done: requests, streams, subjects, flights."""
    using = options(**changes)
    with trio.fail_after(PATIENCE_S):
        async with (
            open_stream_server(using, RealEnv()) as home,
            open_request_plane(using, RealEnv(), home) as plane,
            trio.open_nursery() as nursery,
        ):
            cluster = Cluster(nursery, MemoryControlPlane(), home, {"tcp": plane}, using=using)
            yield cluster
            await eventually(lambda: not any(w.active_count for w in cluster.workers.values()))
            await eventually(lambda: not any(c.open_count for c in cluster.calls.values()))
            await eventually(lambda: not any(r.in_flight for r in cluster.routers))
            assert home.registered_count == 0
            assert not any(w._listeners or w._placeless for w in cluster.workers.values())
            nursery.cancel_scope.cancel()
