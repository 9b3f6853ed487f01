"""Mooncake when the other process is killed or stopped, and what it is told before it starts."""

from __future__ import annotations

import signal
from pathlib import Path

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
    StaleMemoryError,
    TransferError,
)
from trinamo.runtime.protocol.transfer import Direction, decode_description, encode_description
from trinamo.transports.mooncake.engine import session_of
from trinamo.transports.mooncake.options import MooncakeOptions, choose_path, engine_environment

SMALL_CHUNKS = MooncakeOptions(chunk_bytes=8 * BLOCK_BYTES, drain_s=0.5)


def needs_mooncake() -> None:
    pytest.importorskip("mooncake.engine", reason="Mooncake is not installed", exc_type=ImportError)


@pytest.mark.slow
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
async def test_a_peer_that_is_killed_ends_the_transfer_with_a_typed_error(
    direction: Direction, share: float
) -> None:
    needs_mooncake()
    from trinamo.transports.mooncake.plane import open_mooncake_plane

    async with open_mooncake_plane(SMALL_CHUNKS) as plane:
        with running_owner("mooncake tcp") as owner:
            mover = await connect(plane, owner)
            transfer = mover.start(direction, deadline_s=10)
            await moved(transfer, share)
            owner.signal(signal.SIGKILL)
            with trio.fail_after(15):
                try:
                    await transfer.wait()
                except (DisconnectedError, TransferError, ConnectError):
                    assert transfer.confirmed_count < COUNT
                else:
                    # Late in a transfer the signal may come after its last block: then every
                    # block must be there.
                    assert share > 0.1
                    assert transfer.confirmed_count == COUNT
                    if direction is Direction.READ:
                        assert mover.memory[: COUNT * BLOCK_BYTES] == noise()
                await transfer.wait_settled()
        with running_owner("mooncake tcp") as owner:
            mover = await connect(plane, owner)
            await mover.start(Direction.READ, deadline_s=10).wait()
            assert mover.memory[: COUNT * BLOCK_BYTES] == noise()


@pytest.mark.slow
async def test_a_peer_that_is_stopped_costs_no_more_than_the_deadline() -> None:
    needs_mooncake()
    from trinamo.transports.mooncake.plane import open_mooncake_plane

    with running_owner("mooncake tcp") as owner:
        async with open_mooncake_plane(SMALL_CHUNKS) as plane:
            mover = await connect(plane, owner)
            transfer = mover.start(Direction.READ, deadline_s=1)
            await moved(transfer, 0.2)
            owner.signal(signal.SIGSTOP)
            with trio.fail_after(4), pytest.raises(DeadlineError):
                await transfer.wait()
            assert not transfer.is_settled
            owner.signal(signal.SIGCONT)
            with trio.fail_after(20):
                await transfer.wait_settled()
            await plane.probe(mover.remote)


@pytest.mark.slow
async def test_memory_that_the_peer_did_not_register_is_refused() -> None:
    needs_mooncake()
    from trinamo.transports.mooncake.plane import open_mooncake_plane

    async with open_mooncake_plane(SMALL_CHUNKS) as plane:
        with running_owner("mooncake tcp") as owner:
            described = decode_description(owner.description)
            mover = await connect(plane, owner)
            wrong = msgspec.structs.replace(described, base=4096)
            remote = await plane.connect(encode_description(wrong))
            with pytest.raises(TransferError):
                await plane.start(
                    Direction.READ, mover.region, [0], remote, [0], deadline_s=10
                ).wait()
            stale = msgspec.structs.replace(described, incarnation="00000000000000aa")
            with pytest.raises(StaleMemoryError):
                await plane.connect(encode_description(stale))
            await mover.start(Direction.READ, deadline_s=10).wait()
        with pytest.raises((ConnectError, StaleMemoryError)):
            await plane.probe(mover.remote)


@pytest.mark.slow
async def test_memory_that_overlaps_is_refused_with_a_reason() -> None:
    needs_mooncake()
    from trinamo.transports.mooncake.plane import open_mooncake_plane

    async with open_mooncake_plane(SMALL_CHUNKS) as plane:
        memory = bytearray(1 << 20)
        await plane.register(memory, block_bytes=4096)
        with pytest.raises(TransferError, match="overlaps"):
            await plane.register(memoryview(memory)[4096:], block_bytes=4096)


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
    "wrong",
    [
        {"device": "mlx5_0"},
        {"threads": 0},
        {"queue_depth": 1},
        {"transfer_timeout_s": 1},
    ],
)
def test_settings_out_of_bounds_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        MooncakeOptions(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "address", [b"", b"host", b"host:0", b"host:70000", b"a b:1", b"\xff:1", b":1", b"h:1\n"]
)
def test_garbage_is_no_session(address: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        session_of(address)
