"""aiohttp on both sides, on asyncio: requests with time-outs through a pool of two."""

import asyncio
import contextlib

import aiohttp
import trio
import trio_asyncio
from aiohttp import web

from trinamo.sim import recovers, stress


async def hello(request):
    return web.Response(text=request.match_info["name"] * 200)


async def serve():
    site = web.Application()
    site.router.add_get("/{name}", hello)
    runner = web.AppRunner(site, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 80).start()
    await asyncio.Event().wait()


async def aiohttp_answers(world, network):
    async def use():
        limits = aiohttp.TCPConnector(limit=2)
        patience = aiohttp.ClientTimeout(total=2)
        async with aiohttp.ClientSession(connector=limits, timeout=patience) as session:

            async def ask(name):
                async with session.get(f"http://server/{name}") as answer:
                    assert await answer.text() == name * 200

            async def some(task):
                for number in range(3):
                    with contextlib.suppress(OSError, aiohttp.ClientError, TimeoutError):
                        await ask(f"{task}-{number}")

            await asyncio.gather(*(some(f"task{number}") for number in range(4)))
            await trio_asyncio.trio_as_aio(last)(lambda: ask("last"))

    async def last(ask):
        await recovers(trio_asyncio.aio_as_trio(ask), within_s=30)

    async def on_asyncio(main):
        async with trio_asyncio.open_loop():
            await trio_asyncio.aio_as_trio(main)()

    def boot(name):
        world.boot(name, on_asyncio, serve if name == "server" else use)

    boot("server")
    boot("client")
    stress(world, network, server="server", boot=boot)
    await trio.sleep(60)
