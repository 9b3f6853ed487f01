"""anyio's listener and its client, which also asks for the addresses of both ends."""

import contextlib

import anyio
from anyio.abc import SocketAttribute

from trinamo.sim import recovers, stress


async def anyio_echoes(world, network):
    async def answer(stream):
        async with stream:
            try:
                async for chunk in stream:
                    await stream.send(chunk)
            except anyio.BrokenResourceError:
                pass

    async def serve():
        await (await anyio.create_tcp_listener(local_port=7000)).serve(answer)

    async def ask():
        async with await anyio.connect_tcp("server", 7000) as stream:
            assert stream.extra(SocketAttribute.remote_port) == 7000
            for number in range(4):
                said, heard = b"%d" % number * 300, b""
                await stream.send(said)
                while len(heard) < len(said):
                    heard += await stream.receive()
                assert heard == said

    async def use():
        for _ in range(3):
            with anyio.move_on_after(2):
                with contextlib.suppress(OSError, anyio.BrokenResourceError, anyio.EndOfStream):
                    await ask()
        await recovers(ask, within_s=30)

    def boot(name):
        world.boot(name, serve if name == "server" else use)

    for name in ("server", "client1", "client2"):
        boot(name)
    stress(world, network, server="server", boot=boot)
    await anyio.sleep(60)
