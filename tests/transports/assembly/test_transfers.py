"""The chain of transfer backends that a configuration asks for, and what it becomes here."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tests import needs
from trinamo.runtime.config.config import Config, load_config
from trinamo.runtime.config.planes import (
    DataPlaneConfig,
    MooncakeConfig,
    NixlConfig,
    TransferConfig,
)
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import BackendMissingError, ConfigError
from trinamo.runtime.kv.transfer.metrics import TransferMetrics
from trinamo.runtime.kv.transfer.router import open_transfer_router
from trinamo.runtime.protocol.transfer.description import Direction
from trinamo.runtime.protocol.transfer.settlement import InquiryResult
from trinamo.runtime.worker.metrics import WorkerMetrics
from trinamo.transports.assembly import transfers
from trinamo.transports.assembly.transfers import open_transfer_chain
from trinamo.transports.mooncake.engine import MooncakeOptions
from trinamo.transports.nixl.options import NixlOptions
from trinamo.transports.one_sided.mover import OneSidedMover
from trinamo.transports.tcp import TcpMover, open_transfer_plane


def section(**overrides: Any) -> DataPlaneConfig:
    """`data_plane` with dotted keys written as `a__b`."""
    keys = {f"data_plane.{key.replace('__', '.')}": value for key, value in overrides.items()}
    return load_config(environ={}, overrides=keys).data_plane


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    yield
    # Set by the chain itself, so it is not the fixture's to restore.
    os.environ.pop("MC_FORCE_TCP", None)


@pytest.fixture
def without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if neither NIXL nor Mooncake were installed."""
    for name in ("nixl_cu12._bindings", "nixl_cu13._bindings", "mooncake.engine"):
        monkeypatch.setitem(sys.modules, name, None)


async def test_without_a_word_in_the_configuration_it_is_tcp() -> None:
    async with open_transfer_chain(Config().data_plane, RealEnv()) as chain:
        assert [plane.backend for plane in chain.planes] == ["tcp"]
        assert chain.order == ["tcp"]
        assert not chain.missing
    assert "MC_FORCE_TCP" not in os.environ


async def test_peers_are_asked_over_the_port_that_is_opened_first_and_closed_last() -> None:
    async with open_transfer_chain(Config().data_plane, RealEnv()) as chain:
        assert isinstance(chain.settlement, TcpMover)
        assert [plane.mover for plane in chain.planes] == [chain.settlement]


@pytest.mark.parametrize("is_left_moving", [False, True])
async def test_the_port_is_not_refused_while_a_backend_still_moves_bytes(
    is_left_moving: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else peers would take this process for dead, and use blocks that it writes."""
    mover = object.__new__(OneSidedMover)
    plane = SimpleNamespace(backend="nixl", mover=mover)

    @asynccontextmanager
    async def leaving(*_: Any) -> AsyncIterator[Any]:
        yield plane
        mover.is_left_moving = is_left_moving

    monkeypatch.setattr(transfers, "_open_nixl", leaving)
    async with open_transfer_chain(section(nixl__enabled=True), RealEnv()) as chain:
        tcp = chain.settlement
        assert isinstance(tcp, TcpMover)
    timeout_s = 3 if is_left_moving else 60
    async with open_transfer_plane() as asker:
        found = await asker.mover.inquire(tcp.address, tcp.incarnation, 1, timeout_s=timeout_s)
    assert found.result is (InquiryResult.SILENT if is_left_moving else InquiryResult.REFUSED)


@pytest.mark.usefixtures("without_libraries")
async def test_a_library_that_is_missing_costs_its_backend_and_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = section(nixl__enabled=True, mooncake__enabled=True)
    async with open_transfer_chain(wanted, RealEnv()) as chain:
        assert [plane.backend for plane in chain.planes] == ["tcp"]
        assert chain.order == ["nixl", "mooncake", "tcp"]
        assert set(chain.missing) == {"nixl", "mooncake"}
    assert "transfers do without nixl: NIXL cannot be loaded" in caplog.text
    assert os.environ["MC_FORCE_TCP"] == "1", "set before Mooncake is loaded, for children too"


@pytest.mark.usefixtures("without_libraries")
@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"nixl__enabled": True, "nixl__mtu": 4096}, "mtu 4096 is a property of RDMA"),
        ({"transfer__host": "203.0.113.7"}, "no such address"),
    ],
)
async def test_what_cannot_work_as_configured_stops_the_start(
    overrides: dict[str, Any], sentence: str
) -> None:
    """Whether or not the library is there: a fallback would hide the mistake."""

    with pytest.raises(ConfigError, match=sentence) as caught:
        async with open_transfer_chain(section(**overrides), RealEnv()):
            raise AssertionError("it opened")
    assert not isinstance(caught.value, BackendMissingError), "it is no fallback"


@pytest.mark.parametrize(
    ("overrides", "backend", "sentence"),
    [
        (
            {"nixl__enabled": True, "nixl__rdma_interface": "ib77"},
            "nixl",
            "data_plane.nixl.rdma_interface: there is no device 'ib77'",
        ),
        (
            {"mooncake__enabled": True, "mooncake__protocol": "rdma"},
            "mooncake",
            "has no RDMA device",
        ),
    ],
)
async def test_a_device_that_is_missing_costs_its_backend_and_no_more(
    overrides: dict[str, Any], backend: str, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker whose adapter has died still serves, by the fallback, and says so."""
    async with open_transfer_chain(section(**overrides), RealEnv()) as chain:
        assert [plane.backend for plane in chain.planes] == ["tcp"]
        assert sentence in chain.missing[backend]
    assert f"transfers do without {backend}: " in caplog.text
    assert sentence in caplog.text


async def test_every_key_arrives_at_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[NixlOptions | MooncakeOptions] = []

    def remember(options: NixlOptions | MooncakeOptions, env: object, **_: object) -> None:
        seen.append(options)
        raise BackendMissingError("only its options were of interest")

    monkeypatch.setattr("trinamo.transports.nixl.plane.open_nixl_plane", remember)
    monkeypatch.setattr("trinamo.transports.mooncake.plane.open_mooncake_plane", remember)
    wanted = section(
        tcp__connect_timeout_s=3,
        tcp__keepalive_idle_s=9,
        nixl__enabled=True,
        nixl__rdma_interface="lo",
        nixl__same_host=False,
        nixl__queue_depth=17,
        nixl__completion_mode="polling",
        nixl__progress_delay_s=0.002,
        nixl__notification_poll_s=0.03,
        mooncake__enabled=True,
        mooncake__device="mlx5_0",
        mooncake__threads=2,
        mooncake__queue_depth=7,
        mooncake__transfer_timeout_s=6,
        mooncake__notification_poll_s=0.04,
        transfer__host="127.0.0.2",
        transfer__advertise_host="kv.example",
        transfer__slice_bytes=1 << 20,
        transfer__checksum="crc32",
        transfer__settle_timeout_s=4,
    )
    async with open_transfer_chain(wanted, RealEnv()) as chain:
        (tcp,) = chain.planes
        assert isinstance(tcp.mover, TcpMover)
        options = tcp.mover.options
        host, _, _ = tcp.mover.address.rpartition(":")
    assert (options.slice_bytes, options.checksum) == (1 << 20, "crc32")
    assert (options.tcp.host, options.tcp.keepalive_idle_s, host) == ("127.0.0.2", 9, "kv.example")
    assert seen == [
        NixlOptions(
            enabled=True,
            rdma_interface="lo",
            same_host=False,
            queue_depth=17,
            completion_mode="polling",
            progress_delay_s=0.002,
            notification_poll_s=0.03,
            connect_timeout_s=3,
            drain_s=4,
        ),
        # The alias has dropped the RDMA device.
        MooncakeOptions(
            enabled=True,
            protocol="tcp",
            device=None,
            host="kv.example",
            threads=2,
            queue_depth=7,
            transfer_timeout_s=6,
            notification_poll_s=0.04,
            connect_timeout_s=3,
            drain_s=4,
        ),
    ]


async def test_memory_is_registered_with_every_backend_that_is_there() -> None:
    needs.NIXL.imported()
    wanted = section(nixl__enabled=True)
    metrics = WorkerMetrics(RealEnv())
    here, there = bytearray(b"a" * 4096), bytearray(b"b" * 4096)
    async with (
        open_transfer_chain(wanted, RealEnv()) as ours,
        open_transfer_chain(wanted, RealEnv()) as theirs,
        open_transfer_router(
            ours.planes,
            metrics=TransferMetrics(metrics),
            section=TransferConfig(probe_timeout_s=80),
        ) as router,
        open_transfer_router(
            theirs.planes, metrics=TransferMetrics(WorkerMetrics(RealEnv()))
        ) as other,
    ):
        local = await router.register(here, block_bytes=1024)
        owned = await other.register(there, block_bytes=1024)
        assert list(owned.regions) == ["nixl", "tcp"]
        peer = await router.connect(owned.describe())
        assert peer.usable[0] == "nixl"
        reports = await router.move(Direction.READ, local, [0, 3], peer, [1, 2], deadline_s=10)
        assert [report.backend for report in reports] == ["nixl"]
    assert bytes(here) == b"b" * 1024 + b"a" * 2048 + b"b" * 1024


def chosen(*backends: Any) -> DataPlaneConfig:
    """These, though the older keys say otherwise."""
    transfer = TransferConfig(backends=backends)
    return DataPlaneConfig(transfer=transfer, nixl=NixlConfig(enabled="nixl" not in backends))


def test_one_process_has_mooncake_by_rdma_or_by_tcp() -> None:
    with pytest.raises(ValueError, match=r"transfer\.backends has mooncake and mooncake_tcp"):
        chosen("mooncake", "mooncake_tcp")


@pytest.mark.parametrize(
    ("config", "chain"),
    [
        (DataPlaneConfig(), ["tcp"]),
        (DataPlaneConfig(nixl=NixlConfig(enabled=True)), ["nixl", "tcp"]),
        (chosen("mooncake_tcp"), ["mooncake_tcp", "tcp"]),
        (chosen("nixl", "mooncake_tcp", "tcp"), ["nixl", "mooncake_tcp", "tcp"]),
        (chosen("tcp"), ["tcp"]),
        (
            DataPlaneConfig(nixl=NixlConfig(enabled=True, fallback="mooncake")),
            ["nixl", "mooncake", "tcp"],
        ),
        (DataPlaneConfig(mooncake=MooncakeConfig(enabled=True)), ["mooncake_tcp", "tcp"]),
        (
            DataPlaneConfig(mooncake=MooncakeConfig(enabled=True, protocol="rdma")),
            ["mooncake", "tcp"],
        ),
    ],
)
def test_the_chain_is_what_the_configuration_says(
    config: DataPlaneConfig, chain: list[str]
) -> None:
    assert config.backends == chain
