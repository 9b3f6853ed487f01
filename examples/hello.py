"""An endpoint and its caller in one process, on memory planes: nothing to install or start.

    python examples/hello.py

A worker is one async generator. Its items travel over a real TCP stream, also here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec
import trio

from trinamo import Context, EndpointName, load_config, open_runtime

ENDPOINT = EndpointName("examples", "greeter", "hello")
MEMORY = {"control_plane.backend": "memory", "event_plane.backend": "memory"}


class Greeting(msgspec.Struct):
    """What the caller asks; a request that does not fit is refused before the handler runs."""

    names: list[str]


async def greet(request: Greeting, context: Context) -> AsyncGenerator[str, None]:
    for name in request.names:
        yield f"Hello, {name}."


async def main() -> None:
    config = load_config(environ={}, overrides=MEMORY)
    async with open_runtime(config, serving=True) as runtime:
        await runtime.serve(ENDPOINT, greet, request_type=Greeting)
        client = await runtime.client(ENDPOINT)
        async with client.stream(Greeting(["Ada", "Grace"]), str) as stream:
            async for item in stream:
                print(item)


if __name__ == "__main__":
    trio.run(main)
