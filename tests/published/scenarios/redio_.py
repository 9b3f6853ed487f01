"""Commands with time-outs, a server that is killed and comes back, and an answer once all is whole again."""

import contextlib

import redio
import trio

from tests.published.redis_server import Redis
from trinamo.sim import Network, World, recovers, stress


def redio_recovers(choices):
    world = World(choices, steps_max=5_000)
    network = Network(world)

    async def use():
        redis = redio.Redis("redis://server/")

        async def ask():
            await redis().set("key", "last")
            assert await redis().get("key") == b"last"

        for number in range(8):
            await trio.sleep(0.1)
            with trio.move_on_after(1):
                with contextlib.suppress(OSError, trio.BrokenResourceError, redio.exc.RedisError):
                    await redis().set("key", str(number))
        await recovers(ask, within_s=10)

    async def main():
        world.boot("server", Redis().serve)
        world.boot("client", use)
        stress(world, network, server="server", faults_max=0)
        await trio.sleep(0.02 * choices.below(60, "killed"))
        world.kill("server")
        world.boot("server", Redis().serve)
        await trio.sleep(60)

    world.run(main)
