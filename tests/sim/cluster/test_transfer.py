"""The tcp transfer plane, unmodified, over simulated sockets that tear reads and shorten writes."""

from __future__ import annotations

import random

import pytest
import trio

from trinamo.runtime.protocol.transfer.description import Direction
from trinamo.sim import Network, SeedChoices, SimEnv, World
from trinamo.sim.cluster.memory import SECRET
from trinamo.transports.tcp import TcpOptions, TransferOptions, open_transfer_plane

BLOCKS, SIZE = 40, 700


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("direction", Direction)
def test_blocks_arrive_over_simulated_sockets(direction: Direction, seed: int) -> None:
    world = World(SeedChoices(seed), virtual_s_max=2000, ambient="raise")
    Network(world, tear_one_in=3, short_one_in=3, window_bytes=4096)
    here = bytearray(random.Random(1).randbytes(BLOCKS * SIZE))
    there = bytearray(random.Random(2).randbytes(BLOCKS * SIZE))
    blocks = random.Random(seed).sample(range(BLOCKS), BLOCKS)
    described: list[bytes] = []

    def options() -> TransferOptions:
        return TransferOptions(
            tcp=TcpOptions(host="0.0.0.0", advertise_host="b", secret=SECRET), slice_bytes=5000
        )

    async def own() -> None:
        async with open_transfer_plane(options(), SimEnv(world, "b")) as plane:
            region = await plane.register(there, block_bytes=SIZE)
            described.append(region.describe())
            await trio.sleep_forever()

    async def initiate() -> None:
        async with open_transfer_plane(options(), SimEnv(world, "a")) as plane:
            local = await plane.register(here, block_bytes=SIZE)
            remote = await plane.connect(described[0])
            order = list(range(BLOCKS))
            report = await plane.start(
                direction, local, order, remote, blocks, deadline_s=100
            ).wait()
            assert (report.path, report.is_verified) == ("stream", True)

    async def main() -> None:
        world.boot("b", own)
        await trio.sleep(0.1)
        await world.boot("a", initiate).ended.wait()

    world.run(main)
    for number, block in enumerate(blocks):
        ours = here[number * SIZE : (number + 1) * SIZE]
        assert ours == there[block * SIZE : (block + 1) * SIZE]
