"""A program that serves one endpoint of each kind until it is asked to stop, with a real etcd."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from typing import Any

import trio

import trinamo
from trinamo import Context, EndpointName, StopRequest, open_etcd_server

ENDPOINTS = [EndpointName("ns", "words", name) for name in ("stream", "unary", "exchange")]


async def letters(word: str, _: Context) -> AsyncGenerator[str, None]:
    for letter in word:
        yield letter


async def length(word: str, _: Context) -> int:
    return len(word)


async def joined(first: str, _: Context, words: AsyncIterator[str]) -> AsyncGenerator[str, None]:
    async for word in words:
        yield first + word


async def test_one_call_serves_an_endpoint_of_each_kind_until_it_is_asked_to_stop() -> None:
    async with open_etcd_server() as etcd:
        config = trinamo.load_config(
            environ={},
            overrides={
                "control_plane.etcd.endpoints": etcd.endpoint,
                "event_plane.backend": "memory",
            },
        )
        stops = [StopRequest() for _ in ENDPOINTS]
        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                for serve, endpoint, handler, stop in zip(
                    (trinamo.serve_stream, trinamo.serve_unary, trinamo.serve_bidirectional),
                    ENDPOINTS,
                    (letters, length, joined),
                    stops,
                    strict=True,
                ):
                    serving: Any = serve
                    nursery.start_soon(
                        partial(
                            serving, endpoint, handler, config=config, stop=stop, request_type=str
                        )
                    )
                async with trinamo.open_runtime(config) as runtime:
                    clients = [await runtime.client(endpoint) for endpoint in ENDPOINTS]
                    for client in clients:
                        await client.router.wait_instances()
                    async with clients[0].stream("abc", str, timeout_s=120) as stream:
                        assert [item async for item in stream] == ["a", "b", "c"]
                    assert await clients[1].call("abc", int, timeout_s=50) == 3
                    async with clients[2].exchange("x", str, timeout_s=50) as exchange:
                        await exchange.send("y")
                        await exchange.finish()
                        assert [item async for item in exchange] == ["xy"]
                for stop in stops:
                    stop.request()
