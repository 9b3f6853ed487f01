"""A process that closes its backend while bytes of it are stuck on their way to a stopped peer.

`python -m tests.transports.leaver BACKEND`. It prints its transfer port's address and incarnation, and the
process id of the peer, as a line of JSON, and lives on, with everything closed, until both are killed.
"""

from __future__ import annotations

import json
import signal
import sys
from contextlib import suppress

import trio

from tests.transports.memory_owner import open_backend
from tests.transports.owner_process import connect, running_owner, strike_at
from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.protocol.transfer.description import Direction
from trinamo.transports.one_sided.mover import OneSidedMover
from trinamo.transports.tcp import open_transfer_plane


async def _leave(backend: str) -> None:
    with running_owner(backend) as owner:
        async with open_transfer_plane() as tcp:
            async with open_backend(backend, drain_s=0.2) as plane:
                mover = await connect(plane, owner)
                struck = await strike_at(
                    mover, owner, Direction.WRITE, 0.5, signal.SIGSTOP, deadline_s=0.5
                )
                with suppress(TrinamoError):
                    await struck.transfer.wait()
            assert isinstance(plane.mover, OneSidedMover)
            tcp.mover.outlives_us = plane.mover.is_left_moving
        said = {
            "address": tcp.mover.address,
            "incarnation": tcp.incarnation,
            "peer": owner.process.pid,
        }
        print(json.dumps(said), flush=True)
        await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(_leave, sys.argv[1])
