"""What an operator may set about NIXL, and the environment of NIXL and UCX that it becomes.

Devices are always named to UCX: left to itself it listens on every network there is. A setting
that no device here can honour is refused with a sentence, never dropped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import attrs

from trinamo.runtime.errors import BackendMissingError, ConfigError

__all__ = ["CompletionMode", "Devices", "NixlOptions", "find_devices", "ucx_environment"]

CompletionMode = Literal["event", "polling"]
_MTUS: Final = (256, 512, 1024, 2048, 4096)


@attrs.frozen(kw_only=True)
class NixlOptions:
    """How the library is set up and used."""

    rdma_interface: str | None = None
    """An RDMA device (`mlx5_0`, `mlx5_0:1`) or a network interface (`ib0`, `eth0`, `lo`).

    None: the loopback interface, so only peers on this host.
    """
    same_host: bool = True
    """Let the kernel copy between processes of this host (UCX's `cma`)."""
    mtu: int | None = None
    """Path MTU in bytes of RDMA connections; None: the device's."""
    queue_depth: int = 128
    """Transfers at once, and on RDMA devices the length of the send and receive queues."""
    completion_mode: CompletionMode = "event"
    """`polling`: look without pause while transfers are under way, which costs a core then."""
    progress_delay_s: float = 0.02
    """How long the library's own thread sleeps unless woken; 0 would keep a core busy for ever."""
    notification_poll_s: float = 0.02
    """The longest time until a notification is noticed; the library cannot wake us."""
    connect_timeout_s: float = 5.0
    drain_s: float = 5.0
    """How long forgetting, deregistering and closing wait for transfers that cannot be stopped."""
    chunk_bytes: int = 64 << 20
    """What is moved between two looks at the peer's access page."""

    def __attrs_post_init__(self) -> None:
        if self.mtu is not None and self.mtu not in _MTUS:
            raise ConfigError(f"nixl: mtu is one of {_MTUS}, not {self.mtu}")
        if not 1 <= self.queue_depth <= 4096:
            raise ConfigError(f"nixl: queue_depth is 1 to 4096, not {self.queue_depth}")
        if self.completion_mode not in ("event", "polling"):
            raise ConfigError(
                f"nixl: completion_mode is event or polling, not {self.completion_mode!r}"
            )
        if not 0.001 <= self.progress_delay_s <= 0.02:
            # UCX does not wake the thread for everything, so it must look by itself now and then.
            raise ConfigError(
                f"nixl: progress_delay_s is 0.001 to 0.02, not {self.progress_delay_s:g}; "
                "at 0 the library's thread never sleeps"
            )


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
        number = _port_number(sys_class / "net" / name)
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


def _port_number(interface: Path) -> int:
    try:
        return int((interface / "dev_port").read_text("ascii")) + 1
    except (OSError, ValueError):
        return 1


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
    if devices.has_rdma:
        found["UCX_RC_TX_QUEUE_LEN"] = str(options.queue_depth)
        found["UCX_RC_RX_QUEUE_LEN"] = str(options.queue_depth)
        if options.mtu is not None:
            found["UCX_RC_PATH_MTU"] = str(options.mtu)
    return found
