"""Starlette on hypercorn, asked by httpx, by tasks that give up; a pool with a bound is `pools/httpcore_.py`."""

from functools import partial

import httpx
import hypercorn.trio
import trio
from hypercorn.config import Config
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from trinamo.sim import gives_up_and_asks_again, stress


async def hello(request):
    return PlainTextResponse(request.path_params["name"] * 200)


CONFIG = Config.from_mapping(bind=["0.0.0.0:80"], accesslog=None, errorlog=None)
SITE = Starlette(routes=[Route("/{name}", hello)])


async def hypercorn_answers(world, network):
    async def ask(client, name):
        answer = await client.get(f"http://server/{name}")
        assert answer.text == name * 200

    async def use():
        async with (
            httpx.AsyncClient(limits=httpx.Limits(), trust_env=False) as client,
            trio.open_nursery() as nursery,
        ):
            for number in range(5):
                once = partial(ask, client, f"task{number}")
                patient = partial(gives_up_and_asks_again, once, patience_s=1, within_s=30)
                nursery.start_soon(patient)

    def boot(name):
        work = {"server": (hypercorn.trio.serve, SITE, CONFIG), "client": (use,)}
        world.boot(name, *work[name])

    boot("server")
    boot("client")
    stress(world, network, server="server", boot=boot)
    await trio.sleep(60)
