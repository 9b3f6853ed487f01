"""A client on host a that talks to a server on host b."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from trinamo.sim import Network, SeedChoices, World

PORT = 7000


def talk(
    client: Callable[[World, Network], Awaitable[None]],
    serve: Callable[[trio.SocketStream], Awaitable[None]],
    **options: float,
) -> Network:
    """Run `client` on host a against `serve` on host b."""
    world = World(SeedChoices(1), virtual_s_max=20_000)
    network = Network(world, jitter_s=0, **options)  # type: ignore[arg-type]

    async def main() -> None:
        world.boot("b", trio.serve_tcp, serve, PORT)
        await trio.sleep(0.1)
        await world.boot("a", client, world, network).ended.wait()

    world.run(main)
    return network


async def echo(stream: trio.SocketStream) -> None:
    async for chunk in stream:
        await stream.send_all(chunk)


async def swallow(stream: trio.SocketStream) -> None:
    try:
        async for _ in stream:
            pass
    except trio.BrokenResourceError:
        pass
