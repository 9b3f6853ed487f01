"""Requests that wait for a place, as their clients see it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx
import msgspec
import pytest
import trio

import trinamo
from tests.runtime import small_cluster
from tests.runtime.http.models.test_shedding import BUSY, IDLE
from tests.runtime.http.running import on_every_server
from tests.runtime.small_cluster import MODEL, open_small_cluster
from trinamo.runtime.context import Context
from trinamo.runtime.errors import OverloadedError
from trinamo.runtime.http.admission.admission import Ticket
from trinamo.runtime.http.models.models import ModelKind
from trinamo.runtime.protocol.openai.generate import (
    Delta,
    FinishReason,
    GenerateRequest,
    ModelCard,
)
from trinamo.runtime.sinks import Sink
from trinamo.runtime.worker.reports import Reports


class Silent:
    """An engine that nobody asks."""

    async def forward(self, request: GenerateRequest, _: Context, __: Sink[Delta]) -> None:
        raise AssertionError(request)


HELLO = {"messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


@attrs.define
class Held:
    """A service of one place, and an engine that answers when it is told."""

    running: Any
    nursery: trio.Nursery
    client: httpx.AsyncClient
    may_finish: trio.Event = attrs.Factory(trio.Event)
    responses: dict[str, httpx.Response] = attrs.Factory(dict)
    asked: list[str] = attrs.Factory(list)
    """Prompts, in the order in which the engine was asked."""

    @property
    def waiting(self) -> int:
        length: int = self.running.service.admission.queue.length
        return length

    async def generate(self, request: GenerateRequest, _: Context) -> AsyncGenerator[Delta, None]:
        assert request.messages is not None
        self.asked.append(str(request.messages[-1].content))
        await self.may_finish.wait()
        yield Delta("done", [1], FinishReason.STOP, 1)

    async def ask(self, name: str, headers: dict[str, str], asked: dict[str, Any]) -> None:
        body = {"messages": [{"role": "user", "content": name}], **asked}
        self.responses[name] = await self.client.post(PATH, json=body, headers=headers)

    async def begin(self, *names: str, asked: dict[str, Any] | None = None, **headers: str) -> None:
        """Ask one after the other; all but the first have to wait."""
        for name in names:
            held = len(self.asked), self.waiting
            self.nursery.start_soon(self.ask, name, headers, asked or {})
            await self.running.wait_for(lambda h=held: (len(self.asked), self.waiting) != h)

    async def response(self, name: str) -> httpx.Response:
        await self.running.wait_for(lambda: name in self.responses)
        return self.responses[name]


@pytest.fixture
def hold(serve: Any) -> Any:
    @asynccontextmanager
    async def open_held(**settings: Any) -> AsyncIterator[Held]:
        held: Any = None

        async def generate(request: GenerateRequest, context: Context) -> Any:
            async for delta in held.generate(request, context):
                yield delta

        running = await serve(generate, **{"requests_max": 1, "queue_max": 2, **settings})
        async with running.client() as client, trio.open_nursery() as nursery:
            held = Held(running, nursery, client)
            try:
                yield held
            finally:
                held.may_finish.set()
        assert held.waiting == 0
        assert running.value("requests_waiting") == 0

    return open_held


@on_every_server
async def test_requests_wait_in_the_order_in_which_they_came(hold: Any) -> None:
    async with hold() as held:
        await held.begin("first", "second", "third")
        assert held.waiting == held.running.value("requests_waiting") == 2
        full = await held.client.post(PATH, json=HELLO)
        assert (full.status_code, full.headers["retry-after"]) == (503, "1")
        said = "http.requests_max 1 requests are under way and http.queue_max 2 wait"
        assert full.json()["error"]["message"] == said
        assert held.running.value("requests_refused_total", bound="requests_max") == 1
        view = (await held.client.get("/status")).json()
        assert (view["in_flight"], view["waiting"]) == (1, 2)
        held.may_finish.set()
        for name in ("first", "second", "third"):
            assert (await held.response(name)).status_code == 200
        assert held.asked == ["first", "second", "third"]
        assert held.running.value("request_wait_seconds_count") == 2
        assert 0 < held.running.value("request_wait_seconds_sum") < trio.current_time()


@on_every_server
async def test_a_client_that_leaves_gives_its_place_in_the_queue_away(hold: Any) -> None:
    async with hold() as held:
        await held.begin("first")
        stream = await held.running.connect()
        await stream.send_all(held.running.post())
        await held.running.wait_for(lambda: held.waiting == 1)
        await held.begin("third")
        (getattr(stream, "plain", stream)).socket.close()
        await held.running.wait_for(lambda: held.waiting == 1)
        labels = {"model": "unknown", "endpoint": "chat", "outcome": "client_disconnect"}
        await held.running.wait_for(lambda: held.running.value("requests_total", **labels) == 1)
        held.may_finish.set()
        assert (await held.response("third")).status_code == 200
        assert held.asked == ["first", "third"]


@on_every_server
async def test_waiting_has_an_end(hold: Any) -> None:
    """The time-out is a 503 that says when to come back; a deadline of the client's is a 504."""
    async with hold(queue_timeout_s=0.05) as held:
        await held.begin("first")
        late = await held.client.post(PATH, json=HELLO)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "overloaded")
        assert late.headers["retry-after"] == "1"
        assert held.running.value("requests_refused_total", bound="queue_timeout") == 1
        service = held.running.service
        service.tune(msgspec.structs.replace(service.config, queue_timeout_s=3600))
        limit = {"x-trinamo-timeout": "0.02"}
        late = await held.client.post(PATH, json=HELLO, headers=limit)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline")


@on_every_server
async def test_a_drain_refuses_those_who_wait_and_nobody_else(hold: Any) -> None:
    async with hold() as held:
        await held.begin("first", "second")
        held.running.service.stop()
        refused = await held.response("second")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert refused.headers["retry-after"] == "1"
        held.may_finish.set()
        assert (await held.response("first")).status_code == 200


async def test_more_places_let_in_who_waits(hold: Any) -> None:
    async with hold() as held:
        await held.begin("first", "second")
        section = held.running.service.config
        held.running.service.tune(msgspec.structs.replace(section, requests_max=2))
        await held.running.wait_for(lambda: held.asked == ["first", "second"])


async def test_a_wait_is_a_leg_and_stands_in_the_line_of_the_request() -> None:
    async with open_small_cluster(http__queue_max=1, http__requests_max=1) as cluster:
        admission = cluster.service.admission
        held = admission.begin("a request that holds the only place")
        ticket = Ticket("a", "somebody")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cluster.ask)
            with trio.fail_after(120):
                while not admission.queue.length:
                    await trio.sleep(0.002)
            admission.leave(held, ticket)
        (trace, *_) = cluster.frontend.traces.newest_first()
        http, admitted, *_ = trace.legs
        assert (http.name, admitted.name) == ("http", "admission")
        assert admitted.facts["outcome"] == "success"


async def test_requests_wait_while_all_workers_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [BUSY]
    monkeypatch.setattr(Reports, "_load", lambda *_: said[0])
    statuses: list[int] = []
    async with open_small_cluster(http__busy_waiting_tokens=400, http__queue_max=1) as cluster:

        async def ask() -> None:
            statuses.append((await cluster.ask()).status_code)

        async with trio.open_nursery() as nursery:
            with trio.fail_after(120):
                while 503 not in statuses:
                    nursery.start_soon(ask)
                    await trio.sleep(0.05)
            # One waits, for which there is room; its answer is the last.
            said[0] = IDLE
        assert (statuses[-1], statuses.count(503) > 0) == (200, True)


async def test_what_a_worker_s_own_bound_refuses_waits_at_the_front_door() -> None:
    """Far more at once than the worker takes: nobody is refused, and nobody is asked in vain for long."""
    statuses: list[int] = []
    async with open_small_cluster(worker__requests_max=4) as cluster:

        async def ask() -> None:
            statuses.append((await cluster.ask()).status_code)

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for _ in range(30):
                    nursery.start_soon(ask)
        refused = cluster.service.metrics.value("requests_refused_total", bound="requests_max")
    assert (statuses, refused) == ([200] * 30, 0)


async def test_how_many_fell_silent_over_a_request_is_known_when_it_has_waited(serve: Any) -> None:
    """After two no third one is asked, though others refused it in between: it may be what blocks them."""
    counts: list[int] = []

    async def full_but_one(_: GenerateRequest, context: Context) -> AsyncGenerator[Delta, None]:
        counts.append(context.silence_count)
        if len(counts) < 3:
            context.silence_count += 1
            raise OverloadedError("the others are full")
        yield Delta("done", [1], FinishReason.STOP, 1)

    running = await serve(full_but_one, queue_max=2)
    async with running.client() as client:
        assert (await client.post(PATH, json=HELLO)).status_code == 200
    assert counts == [0, 1, 2]


async def test_who_waits_is_let_in_as_workers_take_and_not_as_they_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With long prompts the first token is seconds away: places that are free must not wait for it."""
    places, rounds, running = 4, [trio.Event(), trio.Event()], 0

    async def answers(_: GenerateRequest, __: Context) -> AsyncGenerator[str, None]:
        nonlocal running
        number, running = running // places, running + 1
        await rounds[number].wait()
        yield "x"

    engine = trinamo.engine(name=MODEL)(answers)
    monkeypatch.setattr(small_cluster, "open_exact_engine", engine.open)
    async with open_small_cluster(worker__requests_max=places) as cluster:
        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                for _ in range(2 * places):
                    nursery.start_soon(cluster.ask)
                while (running, cluster.service.admission.queue.length) != (places, places):
                    await trio.sleep(0.002)
                rounds[0].set()
                while running < 2 * places:
                    await trio.sleep(0.002)
                rounds[1].set()


async def test_who_names_a_full_worker_keeps_nobody_from_another() -> None:
    async with open_small_cluster(workers=2, worker__requests_max=1) as cluster:
        full, idle = (each.instance_id or "" for each in cluster.workers)
        asked = {"model": MODEL, "prompt": "one two three", "max_tokens": 1900, "stream": True}
        named = {"x-trinamo-worker": full}
        path = "/v1/completions"
        async with cluster.http.stream("POST", path, json=asked, headers=named) as long:
            assert long.headers["x-trinamo-worker"] == full
            answers: list[httpx.Response] = []

            async def ask(headers: dict[str, str]) -> None:
                short = {**asked, "max_tokens": 1, "stream": False}
                answers.append(await cluster.http.post(path, json=short, headers=headers))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, named)
                nursery.start_soon(ask, {})
        told = {each.status_code: each.headers.get("x-trinamo-worker") for each in answers}
        assert told == {503: None, 200: idle}


async def test_a_model_whose_workers_are_gone_is_waited_for_and_an_unknown_one_is_not() -> None:
    async with open_small_cluster(http__queue_timeout_s=0.3) as cluster:
        service = cluster.service
        manager = service.model_manager()
        manager.add_chat_completions_model("other", Silent())  # pyright: ignore[reportArgumentType]
        [name] = [each for each in manager.models() if each != "other"]
        _, engine = manager.find(name, ModelKind.CHAT)
        card = manager._models[name].card
        assert card is not None
        manager.retire_model(name, 60)
        late = await cluster.ask(model=name)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "unavailable")
        assert late.headers["retry-after"] == "1"
        assert (await cluster.ask(model="never seen")).status_code == 404
        service.tune(msgspec.structs.replace(service.config, queue_timeout_s=3600))
        answers: list[int] = []

        async def ask() -> None:
            answers.append((await cluster.ask(model=name)).status_code)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            with trio.fail_after(120):
                while not service.admission.queue.length:
                    await trio.sleep(0.002)
            manager.add_model(card, engine)
        assert answers == [200]


async def test_who_waited_is_answered_as_the_model_is_by_then(hold: Any) -> None:
    """Others may serve it by then, who cannot do the same, or take bodies as they are."""
    async with hold(queue_max=8) as held:
        manager = held.running.service.model_manager()
        await held.begin("first", "plain")
        await held.begin("logprobs", asked={"logprobs": True})
        manager.update_model(ModelCard(name="local", endpoint="a/b/d"), held.running.engine)
        held.may_finish.set()
        assert (await held.response("plain")).status_code == 200
        refused = await held.response("logprobs")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
        assert held.asked == ["first", "plain"]

        held.may_finish = trio.Event()
        await held.begin("second", "read")
        passing = ModelCard(name="local", endpoint="a/b/e", passes_through=True)
        manager.update_model(passing, held.running.engine)
        held.may_finish.set()
        replaced = await held.response("read")
        assert (replaced.status_code, replaced.headers["x-should-retry"]) == (503, "true")
        assert held.asked == ["first", "plain", "second"]


async def test_one_tenant_cannot_take_the_places_of_another(serve: Any, tmp_path: Path) -> None:
    """Forty connections of one key, and one of another, which has its share and is never refused."""
    keys = tmp_path / "keys"
    keys.write_text("greedy: sk-greedy-0123456789\nlight: sk-light-0123456789\n", "utf-8")

    async def generate(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        await trio.sleep(0.05)
        yield Delta("done", [1], FinishReason.STOP, 1)

    running = await serve(
        generate, api_keys_file=str(keys), requests_max=2, queue_max=8, rate_per_s=100_000
    )
    answers: dict[str, list[int]] = {"greedy": [], "light": []}
    is_over = trio.Event()

    async def ask(client: httpx.AsyncClient, name: str) -> None:
        headers = {"authorization": f"Bearer sk-{name}-0123456789"}
        response = await client.post(PATH, json=HELLO, headers=headers)
        answers[name].append(response.status_code)

    async def be_greedy(client: httpx.AsyncClient) -> None:
        while not is_over.is_set():
            await ask(client, "greedy")

    limits = httpx.Limits(max_connections=200)
    async with (
        running.client() as light,
        httpx.AsyncClient(
            base_url=running.url, verify=running.trust or False, limits=limits, timeout=60
        ) as greedy,
        trio.open_nursery() as nursery,
    ):
        for _ in range(40):
            nursery.start_soon(be_greedy, greedy)
        await running.wait_for(lambda: 503 in answers["greedy"])
        for _ in range(10):
            await ask(light, "light")
        is_over.set()
    assert answers["light"] == [200] * 10
    await running.wait_quiet()
