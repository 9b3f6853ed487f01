"""Two workers, found through a real etcd that this program starts, asked in turn.

    python examples/two_workers.py

Needs the extra: pip install 'trinamo[embedded]'. The third runtime only calls; it learns of the
workers from the control plane's watch, and that one leaves the moment it is closed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

import trio

from trinamo import (
    Client,
    Config,
    Context,
    EndpointName,
    Runtime,
    load_config,
    open_etcd_server,
    open_runtime,
)

ENDPOINT = EndpointName("examples", "pair", "who")


async def open_worker(name: str, config: Config, stack: AsyncExitStack) -> Runtime:
    async def answer(request: str, context: Context) -> AsyncGenerator[str, None]:
        yield f"{name} answers {request!r}"

    runtime = await stack.enter_async_context(open_runtime(config, serving=True))
    await runtime.serve(ENDPOINT, answer, request_type=str)
    return runtime


async def ask(client: Client, question: str) -> None:
    async with client.stream(question, str) as stream:
        async for item in stream:
            print(item)


async def wait_for_instances(client: Client, count: int) -> None:
    with trio.fail_after(60):
        while len(client.router.instances) != count:
            await trio.sleep(0.01)


async def main() -> None:
    async with open_etcd_server() as etcd, AsyncExitStack() as stack:
        config = load_config(
            environ={},
            overrides={
                "control_plane.etcd.endpoints": etcd.endpoint,
                "event_plane.backend": "memory",
                "router.policy": "round_robin",
            },
        )
        caller = await stack.enter_async_context(open_runtime(config))
        client = await caller.client(ENDPOINT)
        await open_worker("first", config, stack)
        async with AsyncExitStack() as short:
            await open_worker("second", config, short)
            await wait_for_instances(client, 2)
            for number in range(4):
                await ask(client, f"question {number}")
        await wait_for_instances(client, 1)
        print("the second worker has left")
        for number in range(4, 6):
            await ask(client, f"question {number}")


if __name__ == "__main__":
    trio.run(main)
