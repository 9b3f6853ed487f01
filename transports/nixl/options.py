"""What an operator may set about NIXL, and the environment of NIXL and UCX that it becomes.

Devices are always named to UCX: left to itself it listens on every network there is. A setting
that no device here can honour is refused with a sentence, never dropped.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import attrs

from trinamo.runtime.config.planes import NixlConfig
from trinamo.runtime.errors import BackendMissingError, ConfigError


class NixlOptions(NixlConfig, frozen=True, kw_only=True):
    """The section `data_plane.nixl`, and what others say of every backend."""

    connect_timeout_s: float = 5.0
    drain_s: float = 5.0
    """How long forgetting, deregistering and closing wait for transfers that cannot be stopped."""
    chunk_bytes: int = 64 << 20
    """What is moved between two looks at the peer's access page."""


@attrs.frozen
class Devices:
    """The devices that UCX is told to use."""

    names: tuple[str, ...]
    """As `UCX_NET_DEVICES` wants them."""
    has_rdma: bool


def find_devices(name: str | None, sys_class: Path = Path("/sys/class")) -> Devices:
    """What `name` stands for on this machine; `BackendMissingError` if there is no such device."""
    if name is None:
        return Devices(("lo",), has_rdma=False)
    adapter, _, port = name.partition(":")
    if _is_there(sys_class / "infiniband", adapter):
        return Devices((f"{adapter}:{port or 1}",), has_rdma=True)
    if not port and _is_there(sys_class / "net", name):
        behind = sys_class / "net" / name / "device" / "infiniband"
        adapters = sorted(each.name for each in behind.iterdir()) if behind.is_dir() else []
        number = 1
        with suppress(OSError, ValueError):
            number += int((sys_class / "net" / name / "dev_port").read_text("ascii"))
        rdma = tuple(f"{each}:{number}" for each in adapters)
        # The interface itself stays in the list: TCP finds out there that a peer has died.
        return Devices((*rdma, name), has_rdma=bool(rdma))
    there = [
        each.name
        for kind in ("infiniband", "net")
        if (sys_class / kind).is_dir()
        for each in sorted((sys_class / kind).iterdir())
    ]
    raise BackendMissingError(
        f"data_plane.nixl.rdma_interface: there is no device {name!r} here; "
        f"there are: {', '.join(there) or 'none'}"
    )


def _is_there(folder: Path, name: str) -> bool:
    return folder.is_dir() and name in {each.name for each in folder.iterdir()}


def ucx_environment(
    options: NixlOptions, devices: Devices, *, has_gpu: bool = False
) -> dict[str, str]:
    """The variables that must be set when the library makes its context."""
    if options.mtu is not None and not devices.has_rdma:
        raise ConfigError(
            f"nixl: mtu {options.mtu} is a property of RDMA connections, and "
            f"{', '.join(devices.names)} is no RDMA device; set the interface's own MTU instead"
        )
    transports = ["rc", "ud"] if devices.has_rdma else []
    transports += ["cma"] if options.same_host else []
    transports += ["cuda_copy", "cuda_ipc"] if has_gpu else []
    found = {
        "UCX_NET_DEVICES": ",".join(devices.names),
        "UCX_TLS": ",".join((*transports, "tcp", "self")),
        # Reads over tcp are answered by the peer in segments; large ones cost less.
        "UCX_TCP_TX_SEG_SIZE": "1m",
        "UCX_TCP_RX_SEG_SIZE": "1m",
    }
    if has_gpu:
        # By itself UCX reads another process's GPU over tcp on an H100: 2.5 GB/s, where this moves 125.
        found["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] = "y"
    if devices.has_rdma:
        found["UCX_RC_TX_QUEUE_LEN"] = str(options.queue_depth)
        found["UCX_RC_RX_QUEUE_LEN"] = str(options.queue_depth)
        if options.mtu is not None:
            found["UCX_RC_PATH_MTU"] = str(options.mtu)
    return found
