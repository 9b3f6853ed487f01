"""A pool of four connections, commands that are given up, and then the question whether it still works."""

import contextlib

import coredis
import trio

from tests.published.redis_server import PORT, Redis
from trinamo.sim import gives_up_and_asks_again, stress


async def coredis_recovers(world, network):
    async def use(name):
        client = coredis.Redis(host="server", port=PORT, max_connections=4)
        async with client:
            for number in range(4):
                with trio.move_on_after(0.3):
                    with contextlib.suppress(OSError, coredis.exceptions.RedisError):
                        await client.set(name, number)

            async def ask():
                await client.set(name, "last")
                assert await client.get(name) == b"last"

            await gives_up_and_asks_again(ask, patience_s=0.3, within_s=10)

    def boot(name):
        world.boot(name, Redis().serve) if name == "server" else world.boot(name, use, name)

    boot("server")
    boot("client1")
    stress(world, network, server="server", boot=boot, faults_max=0)
    await world.host("client1").ended.wait()
