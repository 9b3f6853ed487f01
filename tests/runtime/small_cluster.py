"""A worker and a frontend as `trinamo worker` and `trinamo frontend` serve them, in one process.

The planes are shared memory, the sockets real, and so are the pages that are read over them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import attrs
import httpx
import trio

from tests.runtime.one_process import OneProcess, config
from trinamo.runtime.engines.exact.engine import open_exact_engine
from trinamo.runtime.env import RealEnv
from trinamo.runtime.http.metrics import FrontendMetrics
from trinamo.runtime.http.service import HttpService
from trinamo.runtime.metrics.metrics import show_process
from trinamo.runtime.process.roles import (
    FrontendReady,
    WorkerReady,
    serve_frontend,
    serve_worker,
)
from trinamo.runtime.process.runtime import Runtime
from trinamo.runtime.process.stopping import StopRequest
from trinamo.runtime.worker.metrics import WorkerMetrics

MODEL = "small"
"""The model's name."""


@attrs.define
class SmallCluster:
    """What is up, and clients of its ports."""

    transports: OneProcess
    http: httpx.AsyncClient
    """Of the frontend's API port."""
    status: list[httpx.AsyncClient]
    """Of the status ports: the frontend's, if it has one, then each worker's."""
    frontend: Runtime
    service: HttpService
    workers: list[Runtime]
    others: list[httpx.AsyncClient] = attrs.field(factory=list)
    """Of the API ports of the other frontends."""

    async def ask(self, **body: Any) -> httpx.Response:
        """One completion."""
        asked = {"model": MODEL, "prompt": "one two three", "max_tokens": 4, **body}
        return await self.http.post("/v1/completions", json=asked)

    async def pages(self) -> dict[str, str]:
        """What `/metrics` says on each port, by the role of its process."""
        roles = ["frontend", *(f"worker {number}" for number in range(len(self.workers)))]
        return {
            role: (await client.get("/metrics")).text
            for role, client in zip(roles, self.status, strict=True)
        }


@asynccontextmanager
async def open_small_cluster(
    *, workers: int = 1, frontends: int = 1, **overrides: Any
) -> AsyncIterator[SmallCluster]:
    """So many frontends and workers of the engine `exact`, ready to answer."""
    ports = {"http__port": 0, "http__status_port": 0, "worker__status_port": 0}
    settings = config(**ports | overrides)
    transports, env = OneProcess(), RealEnv()
    stops: list[StopRequest] = []
    runtimes: list[Runtime] = []
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())

        async def work(*, task_status: trio.TaskStatus[WorkerReady]) -> None:
            metrics = WorkerMetrics(env)
            show_process(metrics, "worker")
            async with open_exact_engine(model=MODEL) as engine:
                await serve_worker(
                    settings,
                    env,
                    transports,
                    engine,
                    _another(stops),
                    ready=task_status.started,
                    opened=runtimes.append,
                    metrics=metrics,
                )

        services: list[HttpService] = []

        async def front(*, task_status: trio.TaskStatus[FrontendReady]) -> None:
            def opened(runtime: Runtime, service: HttpService) -> None:
                runtimes.append(runtime)
                services.append(service)

            metrics = FrontendMetrics(env)
            show_process(metrics, "frontend")
            await serve_frontend(
                settings,
                env,
                transports,
                _another(stops),
                ready=task_status.started,
                opened=opened,
                metrics=metrics,
            )

        urls = [(await nursery.start(work)).status_url for _ in range(workers)]
        others = [(await nursery.start(front)).url for _ in range(frontends - 1)]
        ready = await nursery.start(front)
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=url, trust_env=False, timeout=120)
            )
            for url in (ready.url, ready.status_url or ready.url, *urls, *others)
        ]
        service = services[-1]
        with trio.fail_after(120):
            while not all(MODEL in each.model_manager().models() for each in services):
                await trio.sleep(0.005)
        yield SmallCluster(
            transports,
            clients[0],
            clients[1 : workers + 2],
            runtimes[-1],
            service,
            runtimes[:workers],
            clients[workers + 2 :],
        )
        for stop in reversed(stops):
            stop.request()


def _another(stops: list[StopRequest]) -> StopRequest:
    stops.append(StopRequest())
    return stops[-1]
