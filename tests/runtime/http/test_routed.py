"""Real HTTP, real TCP, workers of every kind behind it: who answers, and whom a stranger disturbs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import httpx
import pytest
import trio
import trio.lowlevel

from tests.runtime.one_process import OneProcess, open_process
from trinamo import HttpService
from trinamo.runtime.context import Context
from trinamo.runtime.http.models.discovery import watch_models
from trinamo.runtime.http.models.models import ModelKind
from trinamo.runtime.process.runtime import Runtime
from trinamo.runtime.protocol.discovery.instances import EndpointName, Instance, encode_instance
from trinamo.runtime.protocol.discovery.model_cards import encode_card, model_key
from trinamo.runtime.protocol.openai.generate import (
    Delta,
    FinishReason,
    GenerateRequest,
    ModelCard,
)

ENDPOINT = EndpointName("ns", "backend", "generate")


async def answer(request: GenerateRequest, _: Context) -> AsyncGenerator[Delta, None]:
    yield Delta(request.model, [1], FinishReason.STOP, 1)


@attrs.define
class Frontend:
    """A frontend that is up, and the store that it watches."""

    runtime: Runtime
    service: HttpService
    client: httpx.AsyncClient

    async def ask(self, model: str | None = None, **headers: str) -> httpx.Response:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
        if model is not None:
            body["model"] = model
        path = "/v1/chat/completions"
        return await self.client.post(path, json=body, headers=headers)

    async def publish(self, model: str, instance_id: str, **changes: Any) -> str:
        key = model_key(model, instance_id)
        card = ModelCard(name=model, endpoint=str(ENDPOINT), **changes)
        await self.runtime.control.put(key, encode_card(card))
        return key

    async def register(self, instance_id: str, **transports: str) -> str:
        each = Instance(endpoint=str(ENDPOINT), id=instance_id, transports=transports)
        await self.runtime.control.put(each.key, encode_instance(each))
        return each.key

    async def health(self) -> tuple[int, str]:
        response = await self.client.get("/health")
        return response.status_code, response.json()["status"]

    async def until(self, is_so: Any) -> None:
        """A real socket sets the pace."""
        with trio.fail_after(120):
            while not is_so():
                await trio.sleep(0.002)

    async def wait_models(self, *names: str) -> None:
        manager = self.service.model_manager()
        await self.until(lambda: set(manager.models(ModelKind.CHAT)) == set(names))


@asynccontextmanager
async def open_frontend(transports: OneProcess) -> AsyncIterator[Frontend]:
    async with open_process(transports) as runtime, trio.open_nursery() as nursery:
        service = HttpService.builder().host("127.0.0.1").port(0).build()
        await nursery.start(watch_models, runtime.control, runtime, service.model_manager())
        port = await nursery.start(service.run)
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120) as client:
            yield Frontend(runtime, service, client)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_worker(transports: OneProcess, model: str = "m") -> AsyncIterator[Runtime]:
    async with open_process(transports, serving=True) as runtime:
        await runtime.serve(ENDPOINT, answer, request_type=GenerateRequest)
        assert runtime.instance_id is not None
        card = ModelCard(name=model, endpoint=str(ENDPOINT))
        await runtime.publish(model_key(model, runtime.instance_id), encode_card(card))
        yield runtime


async def test_long_request_ids_disturb_nobody() -> None:
    """An id is bounded where it enters, with room for what is appended to it on the way."""
    transports = OneProcess()
    async with open_frontend(transports) as frontend, open_worker(transports):
        await frontend.wait_models("m")
        told: list[int] = []

        async def ask(given: str) -> None:
            response = await frontend.ask(**{"x-request-id": given})
            told.append(response.status_code)
            assert response.headers["x-request-id"] == given[:98]

        async with trio.open_nursery() as nursery:
            for number in range(60):
                length = (1, 98, 99, 107, 128, 4000)[number % 6]
                nursery.start_soon(ask, f"{number:x}".ljust(length, "x"))
        assert told == [200] * 60


async def speak_http(stream: trio.SocketStream) -> None:
    """A server of another kind that has got a worker's port."""
    async with stream:
        await stream.receive_some(65_536)
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")


async def test_a_port_that_speaks_something_else_costs_no_request() -> None:
    transports = OneProcess()
    async with (
        open_frontend(transports) as frontend,
        open_worker(transports),
        trio.open_nursery() as nursery,
    ):
        await frontend.wait_models("m")
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, speak_http, listeners)
        port = listeners[0].socket.getsockname()[1]
        await frontend.publish("m", "bad")
        await frontend.register("bad", tcp=f"127.0.0.1:{port}")
        (client,) = frontend.runtime.clients
        await client.router.wait_instances(2)
        told = [(await frontend.ask()).status_code for _ in range(40)]
        assert told == [200] * 40
        nursery.cancel_scope.cancel()


async def test_instances_that_speak_nothing_that_is_spoken_here_are_passed_over() -> None:
    transports = OneProcess()
    async with open_frontend(transports) as frontend, open_worker(transports):
        await frontend.wait_models("m")
        for number in range(8):
            await frontend.publish("m", f"{number:x}")
            await frontend.register(f"{number:x}", nats=f"requests.{number}")
        (client,) = frontend.runtime.clients
        await client.router.wait_instances(9)
        assert [(await frontend.ask()).status_code for _ in range(30)] == [200] * 30
        states = [str(status) for _, status, _ in client.router.statuses()]
        assert sorted(states) == ["live"] + ["no common transport"] * 8


async def test_health_is_ready_only_while_an_instance_is_live() -> None:
    transports = OneProcess()
    async with open_frontend(transports) as frontend:
        assert await frontend.health() == (503, "unavailable")
        card = await frontend.publish("m", "dead")
        await frontend.wait_models("m")
        assert await frontend.health() == (503, "unavailable")
        # It is listed, and nobody is there.
        await frontend.register("dead", tcp="127.0.0.1:1")
        (client,) = frontend.runtime.clients
        await client.router.wait_instances()
        await frontend.until(lambda: not client.router.has_live())
        assert await frontend.health() == (503, "unavailable")
        async with open_worker(transports):
            await client.router.wait_instances(2)
            await frontend.until(client.router.has_live)
            assert await frontend.health() == (200, "ready")
            await frontend.runtime.control.delete(card)


async def test_a_frontend_whose_workers_are_away_is_in_for_as_long_as_requests_wait() -> None:
    """Else balancers take out all frontends at once, and nobody is left with whom to wait."""
    transports = OneProcess()
    async with open_frontend(transports) as frontend:
        queue = frontend.service.admission.queue
        for length_max, timeout_s, told in (
            (1000, 60.0, (200, "waiting")),
            (1000, 0.0, (503, "unavailable")),
            (0, 60.0, (503, "unavailable")),
        ):
            queue.length_max, queue.timeout_s = length_max, timeout_s
            async with open_worker(transports):
                await frontend.wait_models("m")
                await frontend.until(lambda: frontend.service.status == "ready")
            await frontend.until(lambda: frontend.service.status != "ready")
            assert await frontend.health() == told
        queue.length_max = 1000
        assert await frontend.health() == (503, "unavailable")


async def test_a_card_that_changes_leaves_the_default_and_opens_no_gap() -> None:
    """Of the worker that serves the default model, again and again, while requests are made."""
    transports = OneProcess()
    async with (
        open_frontend(transports) as frontend,
        open_worker(transports, "first") as first,
        trio.open_nursery() as nursery,
    ):
        await frontend.wait_models("first")
        async with open_worker(transports, "second"):
            await frontend.wait_models("first", "second")
            assert first.instance_id is not None

            async def change() -> None:
                for number in range(1000):
                    await frontend.publish(
                        "first", str(first.instance_id), context_tokens_max=number % 7
                    )
                    await trio.lowlevel.checkpoint()

            nursery.start_soon(change)
            for name in [None, "first"] * 20:
                response = await frontend.ask(name)
                assert (response.status_code, response.json().get("model")) == (200, "first")
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("is_chat", [True, False])
async def test_a_card_may_take_back_one_of_the_two_endpoints(is_chat: bool) -> None:
    transports = OneProcess()
    async with open_frontend(transports) as frontend, open_worker(transports) as worker:
        await frontend.wait_models("m")
        assert worker.instance_id is not None
        await frontend.publish("m", worker.instance_id, chat=is_chat, completions=not is_chat)
        manager = frontend.service.model_manager()
        gone, kept = ModelKind.CHAT, ModelKind.COMPLETIONS
        if is_chat:
            gone, kept = kept, gone
        await frontend.until(lambda: not manager.models(gone))
        assert manager.models(kept) == manager.models() == ["m"]
