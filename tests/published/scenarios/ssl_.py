"""Echoes over TLS, trio's own on both sides, with a certificate of trustme's."""

import contextlib
import ssl

import trio
import trustme

from trinamo.sim import recovers, stress

AUTHORITY = trustme.CA()
SERVER = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
AUTHORITY.issue_cert("server").configure_cert(SERVER)
CLIENT = ssl.create_default_context()
AUTHORITY.configure_trust(CLIENT)


async def ssl_echoes(world, network):
    async def answer(stream):
        try:
            async for chunk in stream:
                await stream.send_all(chunk)
        except trio.BrokenResourceError:
            pass

    async def ask():
        stream = await trio.open_ssl_over_tcp_stream("server", 443, ssl_context=CLIENT)
        async with stream:
            for number in range(4):
                said, heard = b"%d" % number * 300, b""
                await stream.send_all(said)
                while len(heard) < len(said):
                    if not (chunk := await stream.receive_some()):
                        raise ConnectionError("the server has gone")
                    heard += chunk
                assert heard == said

    async def use():
        for _ in range(3):
            with trio.move_on_after(2):
                with contextlib.suppress(OSError, trio.BrokenResourceError):
                    await ask()
        await recovers(ask, within_s=30)

    def boot(name):
        serve = (trio.serve_ssl_over_tcp, answer, 443, SERVER)
        world.boot(name, *(serve if name == "server" else (use,)))

    boot("server")
    boot("client")
    stress(world, network, server="server", boot=boot)
    await trio.sleep(60)
