"""redis-py on asyncio: a pool of two, tasks that give up, an answer once all is whole again."""

import asyncio

import redis.asyncio
import trio
import trio_asyncio
from redis.exceptions import RedisError

from tests.published.redis_server import Redis
from trinamo.sim import recovers, stress


async def redis_answers(world, network):
    async def tasks(client):
        async def some(name):
            for number in range(4):
                try:
                    await asyncio.wait_for(client.set(name, name * 99 + str(number)), 1)
                    said = await asyncio.wait_for(client.get(name), 1)
                    assert said is None or said.startswith(name.encode() * 99)
                except (OSError, RedisError, TimeoutError):
                    pass

        await asyncio.gather(*(some(name) for name in "abc"))

    async def use():
        async with trio_asyncio.open_loop():
            pool = redis.asyncio.BlockingConnectionPool(
                host="server", max_connections=2, timeout=2, socket_timeout=3
            )
            client = redis.asyncio.Redis(connection_pool=pool)

            @trio_asyncio.aio_as_trio
            async def ask():
                await client.set("last", "1")
                assert await client.get("last") == b"1"

            await trio_asyncio.aio_as_trio(tasks)(client)
            await recovers(ask, within_s=30)

    def boot(name):
        world.boot(name, Redis().serve if name == "server" else use)

    boot("server")
    boot("client")
    stress(world, network, server="server", boot=boot)
    await trio.sleep(60)
