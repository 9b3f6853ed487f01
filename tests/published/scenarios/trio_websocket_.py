"""Echoes over WebSockets, by clients that come back when a connection ends."""

import contextlib

import trio
import trio_websocket

from trinamo.sim import recovers, stress

GONE = (OSError, trio_websocket.HandshakeError, trio_websocket.ConnectionClosed)


async def trio_websocket_echoes(world, network):
    async def answer(request):
        try:
            connection = await request.accept()
            while True:
                await connection.send_message(await connection.get_message())
        except trio_websocket.ConnectionClosed:
            pass

    async def ask(text):
        async with trio_websocket.open_websocket_url("ws://server:80/") as connection:
            for number in range(4):
                said = f"{text} {number}" * 20
                await connection.send_message(said)
                assert await connection.get_message() == said

    async def use(name):
        for number in range(3):
            with trio.move_on_after(3):
                with contextlib.suppress(GONE):
                    await ask(f"{name} {number}")
        await recovers(lambda: ask("last"), within_s=30)

    def boot(name):
        if name == "server":
            world.boot(name, trio_websocket.serve_websocket, answer, None, 80, None)
        else:
            world.boot(name, use, name)

    for name in ("server", "client1", "client2"):
        boot(name)
    stress(world, network, server="server", boot=boot)
    await trio.sleep(60)
