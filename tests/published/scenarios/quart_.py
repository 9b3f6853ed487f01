"""Quart on hypercorn, asked by asks over two connections at most."""

import contextlib

import anyio
import asks
import hypercorn.trio
import trio
from hypercorn.config import Config
from quart import request
from quart_trio import QuartTrio

from trinamo.sim import recovers, stress

CONFIG = Config.from_mapping(bind=["0.0.0.0:80"], accesslog=None, errorlog=None)


async def quart_answers(world, network):
    site = QuartTrio(__name__)

    @site.route("/echo")
    async def echo():
        return request.args["text"] * 200

    async def use(name):
        session = asks.Session("http://server", connections=2)

        async def ask(text):
            answer = await session.get(path="/echo", params={"text": text}, timeout=3, retries=0)
            assert answer.text == text * 200

        async def some(task):
            for number in range(3):
                with contextlib.suppress(
                    OSError, asks.errors.AsksException, anyio.BrokenResourceError
                ):
                    await ask(f"{name}-{task}-{number}")

        async with trio.open_nursery() as nursery:
            for task in range(3):
                nursery.start_soon(some, task)
        await recovers(lambda: ask("last"), within_s=30)

    def boot(name):
        work = (hypercorn.trio.serve, site, CONFIG) if name == "server" else (use, name)
        world.boot(name, *work)

    boot("server")
    boot("client")
    stress(world, network, server="server", boot=boot)
    await trio.sleep(60)
