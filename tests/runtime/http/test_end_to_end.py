"""Clients that leave or do not read, from their socket to the worker's engine, on every server."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio
import trio.lowlevel

from tests.runtime.one_process import OneProcess, open_process
from trinamo import HttpService
from trinamo.runtime.context import Context
from trinamo.runtime.http.models.discovery import watch_models
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.protocol.discovery.model_cards import encode_card, model_key
from trinamo.runtime.protocol.openai.generate import (
    Delta,
    FinishReason,
    GenerateRequest,
    ModelCard,
)

ENDPOINT = EndpointName("ns", "backend", "generate")
TEXT = "x" * 1000


@attrs.define
class Cluster:
    """A frontend, and the worker behind it."""

    service: HttpService
    port: int
    made: dict[int, int] = attrs.field(factory=dict)
    """How many deltas each request has got so far, by its `seed`."""
    running: int = 0

    async def generate(self, request: GenerateRequest, _: Context) -> AsyncGenerator[Delta, None]:
        """So many deltas, and now and then a pause."""
        self.running += 1
        name = request.seed or 0
        try:
            for number in range(request.max_tokens or 1):
                self.made[name] = number + 1
                yield Delta(TEXT, [number])
                if number % 10 == 0:
                    await trio.sleep(0.001)
            yield Delta("", [], FinishReason.LENGTH)
        finally:
            self.running -= 1

    async def ask(self, name: int, tokens: int) -> trio.SocketStream:
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        body = b'{"prompt":"hi","stream":true,"seed":%d,"max_tokens":%d}' % (name, tokens)
        await stream.send_all(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        return stream

    def value(self, name: str, **labels: str) -> float:
        return self.service.metrics.value(name, model="m", endpoint="completions", **labels)

    async def wait_for(self, is_so: Any) -> None:
        with trio.fail_after(120):
            while not is_so():
                await trio.sleep(0.002)

    async def wait_quiet(self) -> None:
        """Nothing of any request is left, on either side."""
        await self.wait_for(
            lambda: (
                not self.service.admission.in_flight
                and not self.running
                and not self.service.metrics.value("connections", kind="http")
            )
        )


@asynccontextmanager
async def open_both(**settings: Any) -> AsyncIterator[Cluster]:
    transports = OneProcess()
    service = HttpService.builder().config(port=0, **settings).build()
    async with (
        open_process(transports) as runtime,
        open_process(transports, serving=True) as worker,
        trio.open_nursery() as nursery,
    ):
        manager = service.model_manager()
        await nursery.start(watch_models, runtime.control, runtime, manager)
        cluster = Cluster(service, await nursery.start(service.run))
        await worker.serve(ENDPOINT, cluster.generate, request_type=GenerateRequest)
        assert worker.instance_id is not None
        card = ModelCard(name="m", endpoint=str(ENDPOINT))
        await worker.publish(model_key("m", worker.instance_id), encode_card(card))
        await cluster.wait_for(lambda: manager.has_instance)
        yield cluster
        await cluster.wait_quiet()
        assert cluster.value("requests_in_flight") == 0
        nursery.cancel_scope.cancel()


async def read_all(stream: trio.SocketStream) -> bytes:
    received = bytearray()
    with trio.fail_after(120):
        while b"[DONE]" not in received[-40:]:
            data = await stream.receive_some()
            assert data, bytes(received[-300:])
            received += data
    return bytes(received)


async def test_a_client_that_does_not_read_holds_up_nobody_and_is_cut_off() -> None:
    """Its worker is paused, the others' go on, and in the end the books say that it left."""
    async with open_both(write_timeout_s=4.0) as cluster:
        deaf = await cluster.ask(1, 1_000_000)
        deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await cluster.wait_for(lambda: 1 in cluster.made)
        for name in range(2, 5):
            other = await cluster.ask(name, 200)
            assert (await read_all(other)).count(b"data: ") == 202
            await other.aclose()
        await cluster.wait_for(lambda: not cluster.running)
        # Windows and backlogs on its way, and the kernel's buffers: some megabytes at most.
        assert cluster.made[1] < 50_000
        await deaf.aclose()
        await cluster.wait_quiet()
        assert cluster.value("requests_total", outcome="success") == 3
        assert cluster.value("requests_total", outcome="client_disconnect") == 1
        assert cluster.value("client_disconnects_total") == 1


async def test_clients_that_leave_at_any_moment_leave_nothing_behind() -> None:
    """Before the head, at the first token, in the middle, at the end; at once or by a reset."""
    count = 60
    async with open_both() as cluster:

        async def leave(name: int) -> None:
            stream = await cluster.ask(name, 100)
            with trio.move_on_after(0.0007 * name):
                while await stream.receive_some():
                    pass
            if name % 2:
                linger = struct.pack("ii", 1, 0)
                stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            await stream.aclose()

        async with trio.open_nursery() as nursery:
            for name in range(count):
                nursery.start_soon(leave, name)
        await cluster.wait_quiet()
        ended = sum(
            cluster.value("requests_total", outcome=outcome)
            for outcome in ("success", "client_disconnect")
        )
        refused = cluster.service.metrics.value(
            "requests_total", model="unknown", endpoint="completions", outcome="client_disconnect"
        )
        assert 0 < ended <= count - refused
        stream = await cluster.ask(count, 5)
        assert (await read_all(stream)).count(b"data: ") == 7
        await stream.aclose()
