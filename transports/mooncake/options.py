"""What an operator may set about Mooncake, and the environment variables that it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from trinamo.runtime.config.planes import MooncakeConfig
from trinamo.runtime.errors import BackendMissingError, ConfigError

SLICES_MAX: Final = 512
"""Ranges of one call. Over TCP more than 1,024 were refused, and sometimes the engine with them."""
FORCE_TCP: Final = "MC_FORCE_TCP"


class MooncakeOptions(MooncakeConfig, frozen=True, kw_only=True):
    """The section `data_plane.mooncake`, and what others say of every backend."""

    host: str = "127.0.0.1"
    """The address that peers reach us at; the engine listens on all of them."""
    connect_timeout_s: float = 5.0
    drain_s: float = 6.0
    """How long forgetting, deregistering and closing wait for calls that cannot be stopped."""
    chunk_bytes: int = 16 << 20
    """What is moved between two looks at the peer's access page."""


def choose_path(
    options: MooncakeOptions,
    environment: Mapping[str, str],
    adapters: Path = Path("/sys/class/infiniband"),
) -> Literal["rdma", "tcp"]:
    """What the engine will really run over; `ConfigError` for what it would not say.

    Of these `BackendMissingError` is for a device that is not there, which others do without.

    Left to itself it takes TCP where there is no RDMA device, without a word, and takes
    `MC_FORCE_TCP=0` for a yes.
    """
    forced = environment.get(FORCE_TCP)
    if options.protocol == "tcp" or forced == "1":
        return "tcp"
    if forced is not None:
        raise ConfigError(
            f"{FORCE_TCP}={forced} makes Mooncake use TCP, as any value does, and "
            "mooncake.protocol is rdma: unset the variable, or set protocol to tcp"
        )
    there = sorted(each.name for each in adapters.iterdir()) if adapters.is_dir() else []
    if not there:
        raise BackendMissingError("mooncake.protocol is rdma, and this machine has no RDMA device")
    if options.device is not None and options.device not in there:
        raise BackendMissingError(
            f"mooncake.device: there is no RDMA device {options.device!r} here; "
            f"there are: {', '.join(there)}"
        )
    return "rdma"


def engine_environment(options: MooncakeOptions, path: Literal["rdma", "tcp"]) -> dict[str, str]:
    """The variables that must be set before the engine is made."""
    found = {
        "MC_TRANSFER_TIMEOUT": str(options.transfer_timeout_s),
        # The engine's own bound on waiting slices fails a whole batch when it is reached.
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
        # A connection per transfer runs out of ports.
        "MC_TCP_ENABLE_CONNECTION_POOL": "true",
    }
    if path == "tcp":
        found[FORCE_TCP] = "1"
    return found
