"""Settings become the knobs they mean, or a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinamo.runtime.errors import ConfigError
from trinamo.transports.nixl.options import Devices, NixlOptions, find_devices, ucx_environment

RDMA = Devices(("mlx5_0:1", "ib0"), has_rdma=True)
PLAIN = Devices(("lo",), has_rdma=False)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A `/sys/class` with an InfiniBand adapter behind `ib0`, and an Ethernet card."""
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    (tmp_path / "net" / "ib0" / "device" / "infiniband" / "mlx5_0").mkdir(parents=True)
    (tmp_path / "net" / "ib0" / "dev_port").write_text("1\n")
    (tmp_path / "net" / "eth0").mkdir()
    (tmp_path / "net" / "lo").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "names", "has_rdma"),
    [
        (None, ("lo",), False),
        ("eth0", ("eth0",), False),
        ("mlx5_0", ("mlx5_0:1",), True),
        ("mlx5_0:2", ("mlx5_0:2",), True),
        ("ib0", ("mlx5_0:2", "ib0"), True),
    ],
)
def test_a_device_is_found_by_either_of_its_names(
    machine: Path, name: str | None, names: tuple[str, ...], has_rdma: bool
) -> None:
    assert find_devices(name, machine) == Devices(names, has_rdma=has_rdma)


@pytest.mark.parametrize("name", ["mlx5_1", "eth1", "eth0:1", "../net", ""])
def test_a_device_that_is_not_there_is_an_error_that_lists_those_that_are(
    machine: Path, name: str
) -> None:
    with pytest.raises(ConfigError, match="mlx5_0, eth0, ib0, lo"):
        find_devices(name, machine)


def test_mtu_and_queue_depth_reach_rdma_devices() -> None:
    found = ucx_environment(NixlOptions(mtu=4096, queue_depth=64), RDMA)

    assert found["UCX_RC_PATH_MTU"] == "4096"
    assert found["UCX_RC_TX_QUEUE_LEN"] == found["UCX_RC_RX_QUEUE_LEN"] == "64"
    assert found["UCX_NET_DEVICES"] == "mlx5_0:1,ib0"
    assert found["UCX_TLS"] == "rc,ud,cma,tcp,self"


def test_an_mtu_without_an_rdma_device_is_refused_with_a_sentence() -> None:
    with pytest.raises(ConfigError, match="lo is no RDMA device"):
        ucx_environment(NixlOptions(mtu=4096), PLAIN)


def test_the_same_host_may_be_left_out_and_a_gpu_added() -> None:
    assert ucx_environment(NixlOptions(same_host=False), PLAIN)["UCX_TLS"] == "tcp,self"
    with_gpu = ucx_environment(NixlOptions(), PLAIN, has_gpu=True)
    assert with_gpu["UCX_TLS"] == "cma,cuda_copy,cuda_ipc,tcp,self"
    assert with_gpu["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] == "y"
