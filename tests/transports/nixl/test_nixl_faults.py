"""NIXL when the other process is gone, or was lost; all rows are in
`tests/transports/test_transfer_faults.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio

from tests import needs
from tests.transports.owner_process import connect, noise, running_owner
from trinamo.runtime.errors import ConnectError, DisconnectedError, TransferError
from trinamo.runtime.planes import TransferPlane
from trinamo.runtime.protocol.transfer.description import Direction
from trinamo.transports.nixl.options import NixlOptions
from trinamo.transports.nixl.plane import open_nixl_plane

needs.NIXL.imported()


@pytest.fixture(params=["nixl tcp", "nixl cma"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def plane(backend: str) -> AsyncIterator[TransferPlane]:
    options = NixlOptions(same_host=backend == "nixl cma", drain_s=1.0, connect_timeout_s=10)
    async with open_nixl_plane(options) as plane:
        yield plane


async def test_a_peer_that_is_gone_cannot_be_connected(plane: TransferPlane, backend: str) -> None:
    with running_owner(backend) as owner:
        description = owner.description
    with trio.fail_after(120), pytest.raises((ConnectError, TransferError)):
        await plane.connect(description)


async def test_a_peer_that_was_lost_and_lives_is_reached_by_a_probe(
    plane: TransferPlane, backend: str
) -> None:
    with running_owner(backend) as owner:
        mover = await connect(plane, owner)
        await plane.forget(mover.remote.description.incarnation)
        with pytest.raises(DisconnectedError):
            await mover.start(Direction.READ, deadline_s=5).wait()
        await plane.probe(mover.remote)
        await mover.start(Direction.READ, deadline_s=10).wait()
        assert mover.memory == noise()
