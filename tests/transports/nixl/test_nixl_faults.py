"""NIXL when the other process is killed, stopped, or never was there."""

from __future__ import annotations

import random
import signal
from collections.abc import AsyncIterator

import msgspec
import pytest
import trio

from tests.transports.owner_process import BLOCK_BYTES, COUNT, connect, moved, noise, running_owner
from trinamo.runtime.errors import (
    ConfigError,
    ConnectError,
    DeadlineError,
    DisconnectedError,
    RemoteProtocolError,
    TransferError,
    TrinamoError,
)
from trinamo.runtime.planes.one_sided_plane import OneSidedPlane
from trinamo.runtime.protocol.transfer import Direction, decode_description, encode_description

pytest.importorskip("nixl_cu12", reason="NIXL is not installed", exc_type=ImportError)

from trinamo.transports.nixl.options import NixlOptions
from trinamo.transports.nixl.plane import open_nixl_plane

pytestmark = pytest.mark.slow
SMALL_CHUNKS = 8 * BLOCK_BYTES


@pytest.fixture(params=["nixl tcp", "nixl cma"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def plane(backend: str) -> AsyncIterator[OneSidedPlane]:
    options = NixlOptions(
        same_host=backend == "nixl cma", chunk_bytes=SMALL_CHUNKS, drain_s=1.0, connect_timeout_s=2
    )
    async with open_nixl_plane(options) as plane:
        yield plane


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
async def test_a_peer_that_is_killed_ends_the_transfer_with_a_typed_error(
    plane: OneSidedPlane, backend: str, direction: Direction, share: float
) -> None:
    with running_owner(backend) as owner:
        mover = await connect(plane, owner)
        transfer = mover.start(direction, deadline_s=10)
        await moved(transfer, share)
        owner.signal(signal.SIGKILL)
        with trio.fail_after(15):
            try:
                await transfer.wait()
            except (DisconnectedError, TransferError):
                assert transfer.confirmed_count < COUNT
            else:
                # The copy was quicker than the signal; then every byte must be there.
                if direction is Direction.READ:
                    assert mover.memory[: COUNT * BLOCK_BYTES] == noise()
            await transfer.wait_settled()
    with running_owner(backend) as owner:
        # The plane lives, and moves whole and right from the next peer.
        mover = await connect(plane, owner)
        await mover.start(Direction.READ, deadline_s=10).wait()
        assert mover.memory[: COUNT * BLOCK_BYTES] == noise()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
async def test_a_peer_that_is_stopped_costs_no_more_than_the_deadline(
    share: float, backend: str
) -> None:
    if backend == "nixl cma":
        pytest.skip("the kernel copies from a stopped process as well: nothing stops")
    options = NixlOptions(same_host=False, chunk_bytes=SMALL_CHUNKS, drain_s=3.0)
    with running_owner(backend) as owner:
        async with open_nixl_plane(options) as plane:
            mover = await connect(plane, owner)
            transfer = mover.start(Direction.READ, deadline_s=0.5 + share)
            await moved(transfer, share)
            owner.signal(signal.SIGSTOP)
            with trio.fail_after(5), pytest.raises(DeadlineError):
                await transfer.wait()
            # Bytes may still land, so it does not say that it is settled.
            assert not transfer.is_settled
            owner.signal(signal.SIGCONT)
            with trio.fail_after(10):
                await transfer.wait_settled()
            await plane.probe(mover.remote)


async def test_a_peer_that_is_gone_cannot_be_connected(plane: OneSidedPlane, backend: str) -> None:
    with running_owner(backend) as owner:
        description = owner.description
    with trio.fail_after(10), pytest.raises((ConnectError, TransferError)):
        await plane.connect(description)


async def test_a_peer_that_was_lost_and_lives_is_reached_by_a_probe(
    plane: OneSidedPlane, backend: str
) -> None:
    with running_owner(backend) as owner:
        mover = await connect(plane, owner)
        await plane.forget(mover.remote.description.incarnation)
        with pytest.raises(DisconnectedError):
            await mover.start(Direction.READ, deadline_s=5).wait()
        await plane.probe(mover.remote)
        await mover.start(Direction.READ, deadline_s=10).wait()
        assert mover.memory[: COUNT * BLOCK_BYTES] == noise()


async def test_damaged_metadata_is_refused_and_the_process_lives(
    plane: OneSidedPlane, backend: str
) -> None:
    with running_owner(backend) as owner:
        described = decode_description(owner.description)
        dice = random.Random(4)
        for _ in range(100):
            damaged = bytearray(described.address)
            damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
            with pytest.raises(TrinamoError):
                await plane.connect(
                    encode_description(msgspec.structs.replace(described, address=bytes(damaged)))
                )
        await connect(plane, owner)


async def test_memory_that_the_peer_did_not_register_is_refused(
    plane: OneSidedPlane, backend: str
) -> None:
    with running_owner(backend) as owner:
        described = decode_description(owner.description)
        for wrong in ({"base": 4096}, {"base": described.base + described.length}):
            with pytest.raises(RemoteProtocolError):
                await plane.connect(encode_description(msgspec.structs.replace(described, **wrong)))
        await connect(plane, owner)


async def test_a_device_that_is_not_there_is_named_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="rdma_interface: there is no device 'mlx5_9'"):
        async with open_nixl_plane(NixlOptions(rdma_interface="mlx5_9")):
            pass
