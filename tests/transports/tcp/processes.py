"""One process of a two-process test: `worker [HOST]`, or `caller ADDRESS PAUSE [STREAMS]`. Says what it does on stdout.

Every line is a JSON object. A worker prints its address, then a line for each handler that starts
or ends. A caller asks for endless streams and prints a line for each once items arrive.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator

import msgspec
import trio

from trinamo.runtime.caller.client import Client
from trinamo.runtime.caller.router import Router
from trinamo.runtime.context import Context
from trinamo.runtime.env import RealEnv
from trinamo.runtime.planes import Entry, Snapshot
from trinamo.runtime.protocol.discovery.instances import EndpointName, Instance, encode_instance
from trinamo.runtime.worker.endpoint import Endpoint
from trinamo.runtime.worker.worker import Worker
from trinamo.transports.memory.control import MemoryControlPlane
from trinamo.transports.tcp import (
    TcpOptions,
    open_client,
    open_request_plane,
    open_request_server,
    open_stream_server,
)

NAME = EndpointName("ns", "engine", "endless")


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


async def endless(pause_s: float, context: Context) -> AsyncGenerator[int, None]:
    """Numbers for ever, `pause_s` apart; 0 is as fast as they go, below 0 is one and then none."""
    say(event="started")
    try:
        number = 0
        while True:
            yield number
            number += 1
            if pause_s < 0:
                await trio.sleep_forever()
            if pause_s:
                await trio.sleep(pause_s)
    finally:
        say(event="ended", reason=context.reason)


# A dead link is noticed after idle + interval x count: 3 s.
OPTIONS = TcpOptions(
    keepalive_idle_s=1,
    keepalive_interval_s=1,
    keepalive_count=2,
    user_timeout_s=2.0,
    connect_timeout_s=60,
    ack_timeout_s=60,
    handshake_timeout_s=60,
    secret=bytes(16),
)


async def worker(host: str = "127.0.0.1") -> None:
    options = msgspec.structs.replace(OPTIONS, host=host)
    env = RealEnv()
    async with (
        open_request_server(options, env, instance_id="1") as server,
        open_client(options, env) as client,
        trio.open_nursery() as nursery,
    ):
        serving = Worker(client, env, instance_id="1")
        serving.add(Endpoint(NAME, stream=endless, request_type=float))
        await nursery.start(serving.run)
        await nursery.start(server.serve, serving)
        say(address=server.address)


async def caller(address: str, pause_s: str, streams: str = "1") -> None:
    options, env = OPTIONS, RealEnv()
    async with (
        open_stream_server(options, env) as home,
        open_request_plane(options, env, home) as plane,
    ):
        router = Router(MemoryControlPlane(), NAME, env, request_planes={"tcp": plane})
        instance = Instance(endpoint=str(NAME), id="1", transports={"tcp": address})
        router.apply(Snapshot(1, [Entry(instance.key, encode_instance(instance), 1, 1)]))
        client = Client(router, home, env)

        async def consume() -> None:
            async with client.stream(float(pause_s), int) as stream:
                async for item in stream:
                    if item == 0:
                        say(event="streaming")

        async with trio.open_nursery() as nursery:
            for _ in range(int(streams)):
                nursery.start_soon(consume)


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        trio.run(worker, (sys.argv[2:] or ["127.0.0.1"])[0])
    else:
        trio.run(caller, sys.argv[2], sys.argv[3], (sys.argv[4:] or ["1"])[0])
