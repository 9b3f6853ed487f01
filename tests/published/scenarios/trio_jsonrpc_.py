"""Requests that are given up, and then one that is not."""

import trio
import trio_websocket
from trio_jsonrpc import JsonRpcConnection, JsonRpcConnectionType, open_jsonrpc_ws
from trio_jsonrpc.transport.ws import WebSocketTransport

from trinamo.sim import gives_up_and_asks_again, stress


async def trio_jsonrpc_answers(world, network):
    async def serve(request):
        transport = WebSocketTransport(await request.accept())
        connection = JsonRpcConnection(transport, JsonRpcConnectionType.SERVER)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection._background_task)
            async for each in connection.iter_requests():
                await connection.respond_with_result(each, each.params["n"] + 1)

    async def use():
        async with open_jsonrpc_ws("ws://server:80/") as client:

            async def ask():
                assert await client.request("add", {"n": 1}) == 2

            await gives_up_and_asks_again(ask, patience_s=0.3, within_s=10)

    world.boot("server", trio_websocket.serve_websocket, serve, None, 80, None)
    await trio.sleep(0.1)
    world.boot("client", use)
    stress(world, network, server="server", faults_max=0)
    await world.host("client").ended.wait()
