"""A client on host a that talks to a server on host b."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from trinamo.sim import Network, SeedChoices, World
from trinamo.sim.net.bus import DROP, Message, Rule, Verdict, delay, duplicate

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


def dice(
    world: World,
    *,
    drop_one_in: int = 0,
    duplicate_one_in: int = 0,
    delay_one_in: int = 0,
    delay_s: float = 0.05,
) -> Rule:
    """Each kind of harm once in so many messages (0: never), by the world's choices."""

    def rule(_message: Message) -> Verdict | None:
        choices = world.choices
        if choices.chance(drop_one_in, "bus drop"):
            return DROP
        if choices.chance(duplicate_one_in, "bus duplicate"):
            return duplicate(gap_s=delay_s)
        if choices.chance(delay_one_in, "bus delay"):
            return delay(delay_s, reorder=True)
        return None

    return rule
