"""A process that owns registered memory, for tests that kill or stop it; see `test_transfer_faults`.

Prints its description, then the checksums of its blocks when told to.
"""

from __future__ import annotations

import json
import random
import sys
import zlib

import trio

from trinamo.transports.tcp.transfer import TransferOptions, open_transfer_plane


async def main(block_count: int, block_bytes: int, *, same_host: bool) -> None:
    memory = bytearray(random.Random(7).randbytes(block_count * block_bytes))
    options = TransferOptions(same_host=same_host, slice_bytes=4 * block_bytes)
    async with open_transfer_plane(options) as plane, trio.open_nursery() as nursery:
        region = await plane.register(memory, block_bytes=block_bytes)
        print(json.dumps({"description": region.describe().hex()}), flush=True)

        async def tell() -> None:
            while True:
                told = await plane.receive()
                print(json.dumps({"told": told.message.decode()}), flush=True)

        nursery.start_soon(tell)
        async for _ in trio.wrap_file(sys.stdin):
            sums = [
                zlib.crc32(memory[b * block_bytes : (b + 1) * block_bytes])
                for b in range(block_count)
            ]
            print(json.dumps({"sums": sums}), flush=True)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(lambda: main(int(sys.argv[1]), int(sys.argv[2]), same_host=sys.argv[3] == "copy"))
