"""`kill -9` of a worker in the middle of an answer: a typed error at once, then the other one.

    python examples/kill_a_worker.py

Needs the extra: pip install 'trinamo[embedded]'. The two workers are processes of this same file.
The stream ends with `DisconnectedError`, because only an end mark proves an answer complete; the
dead worker is avoided from then on, long before its lease runs out.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator

import trio

import trinamo
from trinamo import (
    Client,
    Config,
    Context,
    DisconnectedError,
    EndpointName,
    load_config,
    open_etcd_server,
    open_runtime,
)

ENDPOINT = EndpointName("examples", "mortal", "count")


def configure(etcd: str) -> Config:
    return load_config(
        environ={},
        overrides={"control_plane.etcd.endpoints": etcd, "event_plane.backend": "memory"},
    )


async def count(request: int, context: Context) -> AsyncGenerator[int, None]:
    """First who answers, then numbers."""
    yield os.getpid()
    for number in range(request):
        yield number
        await trio.sleep(0.01)


async def serve(etcd: str) -> None:
    await trinamo.serve_stream(ENDPOINT, count, config=configure(etcd), request_type=int)


async def main() -> None:
    async with open_etcd_server() as etcd:
        command = [sys.executable, __file__, etcd.endpoint]
        workers = [subprocess.Popen(command) for _ in range(2)]  # noqa: ASYNC220 -- milliseconds
        try:
            async with open_runtime(configure(etcd.endpoint)) as runtime:
                await watch_one_die(await runtime.client(ENDPOINT))
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


async def watch_one_die(client: Client) -> None:
    with trio.fail_after(60):
        await client.router.wait_instances(2)
    async with client.stream(1000, int) as stream:
        victim = await anext(stream)
        print("got", await anext(stream), await anext(stream))
        killed_at = trio.current_time()
        os.kill(victim, signal.SIGKILL)
        try:
            async for _ in stream:
                pass
        except DisconnectedError as error:
            milliseconds = 1000 * (trio.current_time() - killed_at)
            print(f"the worker was killed: {type(error).__name__} after {milliseconds:.1f} ms")
    for _ in range(3):
        async with client.stream(3, int) as stream:
            survivor = await anext(stream)
            numbers = [number async for number in stream]
        assert survivor != victim
        print("the other worker answers:", numbers)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        trio.run(serve, sys.argv[1])
    else:
        trio.run(main)
