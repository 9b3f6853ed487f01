"""aiomcache: a command is given up, then others ask. A little memcached, as a newcomer would write it."""

import aiomcache
import trio
import trio_asyncio

from trinamo.sim import gives_up_and_asks_again, stress


async def memcached(stream, kept):
    data = b""
    try:
        async for chunk in stream:
            data += chunk
            while b"\r\n" in data:
                line, _, rest = data.partition(b"\r\n")
                verb, *words = line.split()
                if verb == b"set":
                    size = int(words[3])
                    if len(rest) < size + 2:
                        break
                    kept[words[0]], data = rest[:size], rest[size + 2 :]
                    await stream.send_all(b"STORED\r\n")
                else:
                    data = rest
                    found = [(k, kept[k]) for k in words if k in kept]
                    lines = [b"VALUE %s 0 %d 1\r\n%s\r\n" % (k, len(v), v) for k, v in found]
                    await stream.send_all(b"".join(lines) + b"END\r\n")
    except trio.BrokenResourceError:
        pass


async def use():
    async with trio_asyncio.open_loop():
        client = aiomcache.Client("server", 11211, pool_size=2)

        async def round_trip(number):
            key, value = b"k%d" % number, b"v%d" % number
            await trio_asyncio.aio_as_trio(client.set)(key, value)
            got = await trio_asyncio.aio_as_trio(client.get)(key)
            assert got == value, f"{key} is {got}"

        numbers = iter(range(100))
        await gives_up_and_asks_again(
            lambda: round_trip(next(numbers)), patience_s=0.5, within_s=30
        )


async def asks_again(world, network):
    kept = {}

    def boot(name):
        work = {"server": (trio.serve_tcp, lambda s: memcached(s, kept), 11211), "client": (use,)}
        world.boot(name, *work[name])

    boot("server")
    boot("client")
    stress(world, network, server="server", boot=boot, faults_max=0)
    await trio.sleep(60)
