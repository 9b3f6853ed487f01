"""A pool of two connections, asked by tasks that give up, and then the question whether it still works."""

from contextlib import suppress

import httpcore
import trio

from trinamo.sim import gives_up_and_asks_again, stress

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"


async def answer(stream):
    heard = b""
    async with stream:
        while received := await stream.receive_some():
            heard += received
            while b"\r\n\r\n" in heard:
                heard = heard.partition(b"\r\n\r\n")[2]
                await stream.send_all(ANSWER)


async def httpcore_recovers(world, network):
    async def use():
        async with (
            httpcore.AsyncConnectionPool(max_connections=2) as pool,
            trio.open_nursery() as nursery,
        ):

            async def ask():
                assert (await pool.request("GET", "http://server/")).content == b"hello"

            async def use_it():
                for _ in range(4):
                    with trio.move_on_after(0.3):
                        with suppress(httpcore.NetworkError, httpcore.RemoteProtocolError):
                            await ask()
                await gives_up_and_asks_again(ask, patience_s=0.3, within_s=30)

            for _ in range(5):
                nursery.start_soon(use_it)

    def boot(name):
        work = {"server": (trio.serve_tcp, answer, 80), "client": (use,)}
        world.boot(name, *work[name])

    boot("server")
    boot("client")
    stress(world, network, server="server", boot=boot, faults_max=0)
    await world.host("client").ended.wait()
