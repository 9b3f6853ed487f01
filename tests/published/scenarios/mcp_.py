"""mcp on both sides, over streamable HTTP: each call runs once, and gets its own answer."""

from functools import partial

import hypercorn.trio
import trio
from hypercorn.config import Config
from mcp import Client
from mcp.server import MCPServer

from trinamo.sim import stress

CONFIG = Config.from_mapping(bind=["0.0.0.0:80"], accesslog=None, errorlog=None)


async def mcp_tools(world, network):
    tools, called = MCPServer("tools"), []

    @tools.tool()
    async def double(n: int) -> int:
        called.append(n)
        await trio.sleep(0.1)
        return 2 * n

    async def call(client, n):
        result = await client.call_tool("double", {"n": n})
        assert result.structured_content == {"result": 2 * n}

    async def use(first):
        async with Client("http://server/mcp") as client, trio.open_nursery() as nursery:
            for n in range(first, first + 4):
                nursery.start_soon(call, client, n)

    site = tools.streamable_http_app(host="server")
    world.boot("server", hypercorn.trio.serve, site, CONFIG)
    await trio.sleep(0.1)
    clients = [world.boot(f"client{first}", partial(use, first)) for first in (0, 10)]
    stress(world, network, server="server", faults_max=0)
    for each in clients:
        await each.ended.wait()
    assert sorted(called) == [0, 1, 2, 3, 10, 11, 12, 13]
