"""Mooncake and memory that is not registered, and what it is told before it starts; all rows of
faults are in `tests/transports/test_transfer_faults.py`.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
import pytest

from tests import needs
from tests.transports.owner_process import BLOCK_BYTES, connect, running_owner
from trinamo.runtime.config.planes import TransferConfig
from trinamo.runtime.errors import (
    ConfigError,
    ConnectError,
    RemoteProtocolError,
    StaleMemoryError,
    TransferError,
)
from trinamo.runtime.kv.transfer.metrics import TransferMetrics
from trinamo.runtime.kv.transfer.router import TransferRouter, open_transfer_router
from trinamo.runtime.metrics.tallies import Registry
from trinamo.runtime.planes import TransferPlane
from trinamo.runtime.protocol.transfer.description import (
    Direction,
    decode_description,
    decode_descriptions,
    encode_description,
)
from trinamo.transports.mooncake.engine import (
    MooncakeOptions,
    choose_path,
    engine_environment,
    session_of,
)
from trinamo.transports.tcp.transfer.plane import open_transfer_plane

SMALL_CHUNKS = MooncakeOptions(chunk_bytes=8 * BLOCK_BYTES, drain_s=0.5)


async def test_memory_that_the_peer_did_not_register_is_refused_and_spoils_nothing() -> None:
    needs.MOONCAKE.imported()
    from trinamo.transports.mooncake.plane import open_mooncake_plane

    async with open_mooncake_plane(SMALL_CHUNKS) as plane:
        with running_owner("mooncake tcp") as owner:
            described = decode_description(owner.description)
            mover = await connect(plane, owner)
            wrong = msgspec.structs.replace(described, bases=(4096,))
            remote = await plane.connect(encode_description(wrong))
            for _ in range(8):
                with pytest.raises(TransferError):
                    await plane.start(
                        Direction.READ, mover.region, [0], remote, [0], deadline_s=10
                    ).wait()
                # A connection that such a call went over is spoiled; nobody else notices.
                await plane.probe(mover.remote)
            stale = msgspec.structs.replace(described, incarnation="00000000000000aa")
            with pytest.raises(StaleMemoryError):
                await plane.connect(encode_description(stale))
            await mover.start(Direction.READ, deadline_s=10).wait()
        with pytest.raises((ConnectError, StaleMemoryError)):
            await plane.probe(mover.remote)


async def test_memory_that_overlaps_is_refused_with_a_reason() -> None:
    needs.MOONCAKE.imported()
    from trinamo.transports.mooncake.plane import open_mooncake_plane

    async with open_mooncake_plane(SMALL_CHUNKS) as plane:
        memory = bytearray(1 << 20)
        await plane.register(memory, block_bytes=4096)
        with pytest.raises(TransferError, match="overlaps"):
            await plane.register(memoryview(memory)[4096:], block_bytes=4096)


async def test_memory_that_the_engine_refuses_is_offered_by_the_next_backend() -> None:
    """As where no more memory may be locked: here it overlaps, which this engine refuses for real."""
    needs.MOONCAKE.imported()
    from trinamo.transports.mooncake.plane import open_mooncake_plane

    memory, taken = bytearray(range(256)) * 64, bytearray(16_384)
    async with (
        open_mooncake_plane(SMALL_CHUNKS) as mooncake,
        open_transfer_plane() as tcp,
        open_transfer_plane() as theirs,
        open_router([mooncake, tcp]) as router,
        open_router([theirs]) as other,
    ):
        await mooncake.register(memory, block_bytes=4096)
        region = await router.register(memory, block_bytes=4096)
        assert list(decode_descriptions(region.describe())) == ["tcp"]

        peer = await other.connect(region.describe())
        target = await other.register(taken, block_bytes=4096)
        blocks = [0, 1, 2, 3]
        await other.move(Direction.READ, target, blocks, peer, blocks, deadline_s=10)

    assert taken == memory


def open_router(chain: list[TransferPlane]) -> AbstractAsyncContextManager[TransferRouter]:
    return open_transfer_router(
        chain,
        metrics=TransferMetrics(Registry()),
        section=TransferConfig(probe_timeout_s=60),
    )


# --- options ---------------------------------------------------------------------------------------


def test_tcp_is_forced_by_the_only_value_that_cannot_be_misread() -> None:
    assert choose_path(MooncakeOptions(), {}) == "tcp"
    assert engine_environment(MooncakeOptions(), "tcp")["MC_FORCE_TCP"] == "1"
    assert "MC_FORCE_TCP" not in engine_environment(MooncakeOptions(protocol="rdma"), "rdma")
    assert choose_path(MooncakeOptions(protocol="rdma"), {"MC_FORCE_TCP": "1"}) == "tcp"


def test_a_variable_that_means_the_opposite_of_what_it_says_is_refused() -> None:
    with pytest.raises(ConfigError, match="MC_FORCE_TCP=0"):
        choose_path(MooncakeOptions(protocol="rdma"), {"MC_FORCE_TCP": "0"})


def test_rdma_without_a_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no RDMA device"):
        choose_path(MooncakeOptions(protocol="rdma"), {}, tmp_path / "none")
    (tmp_path / "mlx5_0").mkdir()
    assert choose_path(MooncakeOptions(protocol="rdma"), {}, tmp_path) == "rdma"
    with pytest.raises(ConfigError, match="there are: mlx5_0"):
        choose_path(MooncakeOptions(protocol="rdma", device="ib0"), {}, tmp_path)


@pytest.mark.parametrize(
    "address", [b"", b"host", b"host:0", b"host:70000", b"a b:1", b"\xff:1", b":1", b"h:1\n"]
)
def test_garbage_is_no_session(address: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        session_of(address)
