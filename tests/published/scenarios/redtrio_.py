"""Three tasks share a client; each has a key of its own, and no fault is drawn but delays."""

import trio
from redtrio.lowlevel import RedisClient

from tests.published.redis_server import Redis
from trinamo.sim import stress


async def redtrio_answers_are_ones_own(world, network):
    async def use():
        client = RedisClient("server")

        async def one(key):
            value = key * 600
            await client.call(b"SET", key, value)
            for _ in range(3):
                assert await client.call(b"GET", key) == value, "another's answer"

        async with trio.open_nursery() as nursery:
            for key in (b"a", b"b", b"c"):
                nursery.start_soon(one, key)

    world.boot("server", Redis().serve)
    await trio.sleep(0.1)
    client = world.boot("client", use)
    stress(world, network, server="server", faults_max=0)
    with trio.move_on_after(60):
        await client.ended.wait()
