"""aiorpcx: requests that are given up, a session that is lost, and new requests."""

import asyncio

import aiorpcx
import trio
import trio_asyncio

from trinamo.sim import gives_up_and_asks_again, stress


class Server(aiorpcx.RPCSession):
    async def handle_request(self, request):
        async def echo(value):
            await asyncio.sleep(0.05)
            return value

        return await aiorpcx.handler_invocation({"echo": echo}.get(request.method), request)()


async def serve():
    async with trio_asyncio.open_loop():

        async def forever():
            await aiorpcx.serve_rs(Server, "0.0.0.0", 7000)
            await asyncio.sleep(1e6)

        await trio_asyncio.aio_as_trio(forever)()


async def use():
    async with trio_asyncio.open_loop():
        session = None
        numbers = iter(range(1000))

        async def ask():
            nonlocal session
            number = next(numbers)
            if session is None or session.is_closing():
                session = None
                connector = aiorpcx.connect_rs("server", 7000)
                session = await connector.__aenter__()
            got = await session.send_request("echo", [number])
            assert got == number, f"{number} is {got}"
            return got

        await gives_up_and_asks_again(trio_asyncio.aio_as_trio(ask), patience_s=0.5, within_s=120)


async def asks_again(world, network):
    def boot(name):
        world.boot(name, {"server": serve, "client": use}[name])

    boot("server")
    boot("client")
    stress(world, network, server="server", boot=boot)
    await trio.sleep(200)
