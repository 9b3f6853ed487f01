"""The legs of a request through a frontend and two workers, as their status ports tell them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import httpx
import msgspec
import trio

from tests.runtime.one_process import OneProcess, config
from trinamo.runtime.engines.exact.engine import ExactEngine
from trinamo.runtime.engines.loop.host import open_engine_host
from trinamo.runtime.env import RealEnv
from trinamo.runtime.process.roles import FrontendReady, WorkerReady, serve_frontend, serve_worker
from trinamo.runtime.process.stopping import StopRequest
from trinamo.runtime.traces.ring import LegView, ProcessView

TEXT = "a prompt that nobody may read in a trace"


@attrs.define
class Cluster:
    """Where a frontend answers, and where it and its workers tell what they know."""

    transports: OneProcess
    url: str = ""
    frontend: str = ""
    workers: dict[str, str] = attrs.Factory(dict)

    async def ask(
        self, name: str, headers: dict[str, str] | None = None, *, n: int = 1
    ) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=120) as http:
            return await http.post(
                "/v1/completions",
                json={"prompt": TEXT, "max_tokens": 3, "n": n},
                headers={"x-request-id": name, **(headers or {})},
            )

    async def legs(self, place: str, name: str) -> list[LegView]:
        async with httpx.AsyncClient(base_url=place, trust_env=False, timeout=120) as http:
            body = (await http.get(f"/traces/{name}")).content
        assert b"nobody" not in body
        view = msgspec.json.decode(body, type=ProcessView)
        return [leg for trace in view.traces for leg in trace.legs]

    async def worker_legs(self, name: str) -> list[LegView]:
        return [leg for place in self.workers.values() for leg in await self.legs(place, name)]


@asynccontextmanager
async def open_cluster(**settings: object) -> AsyncIterator[Cluster]:
    transports, env, stop = OneProcess(), RealEnv(), StopRequest()
    cluster = Cluster(transports)
    told = config(http__port=0, http__status_port=0, worker__status_port=0, **settings)
    ready = trio.Semaphore(0)

    async def work() -> None:
        def tell(facts: WorkerReady) -> None:
            cluster.workers[facts.instance_id] = facts.status_url
            ready.release()

        async with open_engine_host(ExactEngine()) as host:
            await serve_worker(told, env, transports, host, stop, ready=tell)

    async def front() -> None:
        def tell(facts: FrontendReady) -> None:
            cluster.url, cluster.frontend = facts.url, facts.status_url
            ready.release()

        await serve_frontend(told, env, transports, stop, ready=tell)

    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            for part in (work, work, front):
                nursery.start_soon(part)
                await ready.acquire()
            yield cluster
            nursery.cancel_scope.cancel()


def outcomes(legs: list[LegView]) -> list[tuple[str, object]]:
    return [(leg.name, leg.facts.get("outcome")) for leg in legs]


async def test_an_answer_s_legs_lie_within_each_other() -> None:
    async with open_cluster() as cluster:
        answer = await cluster.ask("mine")
        front, back = (
            await cluster.legs(cluster.frontend, "mine"),
            await cluster.worker_legs("mine"),
        )
        public = await cluster.legs(cluster.url, "mine")
    assert outcomes(front) == [("http", "success"), ("attempt", "success")]
    assert outcomes(back) == [("worker", "success"), ("engine", "success")]
    assert front[1].facts["instance"] == answer.headers["x-trinamo-worker"]
    assert front[0].facts["output_tokens"] == back[1].facts["output_tokens"] == 3
    assert [name for name, _ in back[1].marks] == ["computing", "first_token"]
    assert outcomes(public) == outcomes(front)
    legs = [*front, *back]
    starts = [leg.start for leg in legs]
    assert starts == sorted(starts)
    for leg in legs:
        assert leg.end is not None
        times = [leg.start, *(at for _, at in leg.marks), leg.end]
        assert times == sorted(times)


async def test_each_choice_of_an_answer_has_its_legs_at_the_workers() -> None:
    async with open_cluster() as cluster:
        assert (await cluster.ask("mine", n=3)).status_code == 200
        front, back = (
            await cluster.legs(cluster.frontend, "mine"),
            await cluster.worker_legs("mine"),
        )
    assert [leg.name for leg in front] == ["http", "attempt", "attempt", "attempt"]
    assert sorted(leg.name for leg in back) == ["engine"] * 3 + ["worker"] * 3


async def test_a_refused_request_has_a_leg_with_the_reason() -> None:
    async with open_cluster() as cluster:
        answer = await cluster.ask("mine", {"x-trinamo-worker": "0" * 16})
        front, back = (
            await cluster.legs(cluster.frontend, "mine"),
            await cluster.worker_legs("mine"),
        )
    assert answer.status_code == 503
    assert outcomes(front) == [("http", "unavailable")]
    assert back == []


async def test_with_no_place_for_traces_none_are_told() -> None:
    async with open_cluster(traces__requests_max=0) as cluster:
        assert (await cluster.ask("mine")).status_code == 200
        assert await cluster.legs(cluster.frontend, "mine") == []
        assert await cluster.worker_legs("mine") == []
