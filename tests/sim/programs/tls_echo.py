"""An echo over TLS: a server, two clients that connect twice, delays. Certificates are files."""

from __future__ import annotations

import ssl
from functools import cache

import trio

from trinamo.sim import Choices, Network, World

PORT = 7000


def run(choices: Choices, *, authority: str, server: str, is_kept: bool = False) -> World:
    """Play it; with `is_kept`, contexts are those of the process, as a test's fixtures have them."""
    world = World(choices, virtual_s_max=300)
    Network(world, jitter_s=0.01)
    ours, theirs = (_contexts if is_kept else _contexts.__wrapped__)(authority, server)

    async def echo(stream: trio.SSLStream[trio.SocketStream]) -> None:
        try:
            async for chunk in stream:
                await stream.send_all(chunk)
        except (OSError, trio.BrokenResourceError):
            pass

    async def ask() -> None:
        for _ in range(2):
            stream = await trio.open_ssl_over_tcp_stream("server", PORT, ssl_context=theirs)
            async with stream:
                await stream.send_all(b"hello" * 50)
                got = b""
                while len(got) < 250:
                    got += await stream.receive_some()
                assert got == b"hello" * 50

    async def main() -> None:
        world.boot("server", trio.serve_ssl_over_tcp, echo, PORT, ours)
        await trio.sleep(0.1)
        clients = [world.boot(name, ask) for name in ("client1", "client2")]
        for client in clients:
            await client.ended.wait()

    world.run(main)
    return world


@cache
def _contexts(authority: str, server: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(server)
    return ours, ssl.create_default_context(cafile=authority)
