"""One worker lends KV blocks to another: found by engine id, moved with a ticket.

    python examples/read_blocks.py

Needs the extra: pip install 'trinamo[embedded]'. The ticket travels as a request's answer; the
blocks do not: the second worker takes them out of the first one's memory, and says when it has.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec
import trio

from trinamo import (
    Context,
    EndpointName,
    KvCache,
    Runtime,
    load_config,
    open_etcd_server,
    open_exact_engine,
    open_runtime,
)

LEND = EndpointName("examples", "owner", "lend")


class Loan(msgspec.Struct):
    """What a peer must know to read blocks."""

    engine_id: str
    blocks: list[int]
    ticket: int


async def lend_blocks(runtime: Runtime, kv: KvCache) -> None:
    """Serve an endpoint that lends as many blocks as it is asked for."""
    transfers = runtime.transfers
    assert transfers is not None

    async def lend(count: int, context: Context) -> AsyncGenerator[Loan, None]:
        blocks = kv.pool.take(count)
        assert blocks is not None
        kv.memory.view[:, :, blocks] = 42
        try:
            async with transfers.grant(blocks, ttl_s=10) as grant:
                yield Loan(transfers.engine_id, blocks, grant.ticket)
                print(f"the owner was told: {(await grant.completed()).decode()}")
        finally:
            kv.pool.give_back(blocks)

    await runtime.serve(LEND, lend, request_type=int)


async def read_blocks(runtime: Runtime, kv: KvCache) -> None:
    """Borrow three blocks and look at them."""
    client, transfers = await runtime.client(LEND), runtime.transfers
    assert transfers is not None
    await client.router.wait_instances()
    ours = kv.pool.take(3)
    assert ours is not None
    async with client.stream(3, Loan) as loans:
        async for loan in loans:
            reports = await transfers.read(
                loan.engine_id, ours, loan.blocks, ticket=loan.ticket, notify=b"three blocks read"
            )
            print(f"{reports[0].block_count} blocks by {reports[0].backend}")
    print(f"their bytes are right: {bool((kv.memory.view[:, :, ours] == 42).all())}")


async def main() -> None:
    async with open_etcd_server() as etcd, open_exact_engine() as one, open_exact_engine() as two:
        overrides = {
            "control_plane.etcd.endpoints": etcd.endpoint,
            "event_plane.backend": "memory",
        }
        config = load_config(environ={}, overrides=overrides)
        assert one.kv is not None
        assert two.kv is not None
        async with (
            open_runtime(config, serving=True, kv=one.kv) as owner,
            open_runtime(config, serving=True, kv=two.kv) as reader,
        ):
            await lend_blocks(owner, one.kv)
            await read_blocks(reader, two.kv)


if __name__ == "__main__":
    trio.run(main)
