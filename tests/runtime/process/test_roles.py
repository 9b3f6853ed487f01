"""What a role does before it says that it is ready."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
import trio.testing

from tests.runtime.one_process import config
from tests.runtime.small_cluster import MODEL, open_small_cluster
from trinamo.runtime.env import RealEnv
from trinamo.runtime.http.service import HttpService
from trinamo.runtime.planes import WatchEvent
from trinamo.runtime.process.roles import FrontendReady, serve_frontend
from trinamo.runtime.process.runtime import Runtime
from trinamo.runtime.process.stopping import StopRequest


async def test_a_frontend_listens_once_it_knows_the_models_that_are_there() -> None:
    """So does each of `--processes`: whoever reaches one at once is told of no model less."""
    services: list[HttpService] = []
    known: list[str] = []
    stop = StopRequest()

    def opened(runtime: Runtime, service: HttpService) -> None:
        services.append(service)
        watch = runtime.control.watch

        @asynccontextmanager
        async def late(prefix: str) -> AsyncIterator[AsyncIterator[WatchEvent]]:
            # Whatever does not wait for the models has been done by then.
            await trio.testing.wait_all_tasks_blocked()
            async with watch(prefix) as events:
                yield events

        runtime.control.watch = late  # type: ignore[method-assign]

    def ready(_: FrontendReady) -> None:
        known.extend(services[0].model_manager().models())
        stop.request()

    async with open_small_cluster() as cluster:
        settings = config(http__port=0, http__status_port=0)
        with trio.fail_after(120):
            await serve_frontend(
                settings, RealEnv(), cluster.transports, stop, ready=ready, opened=opened
            )

    assert known == [MODEL]
