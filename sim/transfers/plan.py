"""What is moved in a scenario of transfers, and by whom: the keys of `[transfers]`."""

from __future__ import annotations

import math
from typing import Literal

import attrs

from trinamo.runtime.config.config import Config, ControlPlaneConfig, DataPlaneConfig
from trinamo.runtime.config.planes import EtcdConfig, TransferConfig
from trinamo.runtime.kv.memory import KvLayout

from ..cluster.services import STORE

__all__ = ["TransferPlan"]


@attrs.frozen(kw_only=True)
class TransferPlan:
    """Hosts `store`, `prefill0`…, `decode0`…, and the requests of every slot of a decode host.

    Pairs are ranges, both ends included; times are drawn from them in 16 steps.
    """

    move: Literal["read", "write"] = "read"
    """Who starts the transfer: the decode host reads, or the prefill host writes."""
    prefills: int = 1
    decodes: int = 1
    slots: int = 3
    """Requests at a time, of each host."""
    requests: int = 6
    """Of each slot of each decode host, one after the other."""
    pool_blocks: int = 12
    request_blocks: tuple[int, int] = (2, 5)
    block_bytes: int = 64
    layout: KvLayout = KvLayout.BLOCK_FIRST
    """`layer_first`: a block lies in two places, each of which the backends move by itself."""
    backends: tuple[Literal["simulated", "tcp"], ...] = ("simulated", "tcp")
    """The chain, in order."""
    is_fenced: bool = True
    """Whether one-sided memory checks tickets when a block lands; RDMA does not."""
    is_copied: bool = False
    """Whether a process moves the bytes itself, so that what it had begun lands after its pause."""
    window: int = 4
    """Blocks of one transfer on the way at once, by one-sided memory."""
    give_up_s: float = 1.0
    """When an adapter gives up what is not answered."""
    compute_s: tuple[float, float] = (0.0, 0.01)
    """How long a prefill host computes."""
    hold_s: tuple[float, float] = (0.0, 0.05)
    """How long a decode host uses its blocks."""
    abort_one_in: int = 0
    """One request in so many is aborted; 0 is none."""
    abort_after_s: tuple[float, float] = (0.0, 0.01)
    """From the start of the transfer to the abort."""
    deadline_s: float = 8.0
    """Of one request's transfer, and of each wait for the other host."""
    drain_s: float = 4.0
    """How long blocks wait for an abandoned transfer before they are quarantined."""
    attempt_s: float = 3.0
    """For one backend, while there is another one."""
    lease_ttl_s: float = 2.0
    """Of the lease under which every host offers its memory in the store."""
    missing_grace_s: float = 15.0
    """How long a host that the store does not name any more is kept while it answers."""
    whole_after_s: float = math.inf
    """Requests that begin so long after the last fault is over are complete, or were aborted."""

    def __attrs_post_init__(self) -> None:
        if min(self.prefills, self.decodes, self.slots, self.requests) < 1:
            raise ValueError("prefills, decodes, slots and requests are at least 1")
        low, high = self.request_blocks
        if not 1 <= low <= high <= self.pool_blocks:
            raise ValueError(f"request_blocks are from 1 to pool_blocks ({self.pool_blocks})")
        if not self.backends:
            raise ValueError("backends must name at least one")
        if self.block_bytes < 2 or self.block_bytes % 2:
            raise ValueError("block_bytes must be even: keys and values are halves of a block")

    @property
    def engines(self) -> list[str]:
        """The hosts that have KV memory; each is known to the others by its name."""
        return [
            *(f"prefill{number}" for number in range(self.prefills)),
            *(f"decode{number}" for number in range(self.decodes)),
        ]

    @property
    def hosts(self) -> list[str]:
        """The names of all hosts."""
        return [STORE, *self.engines]

    @property
    def leave_s(self) -> float:
        """How long a host that leaves in order waits for its transfers."""
        return self.deadline_s + self.drain_s

    @property
    def config(self) -> Config:
        """Of every host."""
        transfer = TransferConfig(
            timeout_s=self.deadline_s,
            attempt_timeout_s=self.attempt_s,
            settle_timeout_s=self.drain_s,
            quarantine_after_s=self.drain_s,
            probe_interval_s=1.0,
            missing_grace_s=self.missing_grace_s,
        )
        etcd = EtcdConfig(lease_ttl_s=self.lease_ttl_s)
        return Config(
            control_plane=ControlPlaneConfig(etcd=etcd),
            data_plane=DataPlaneConfig(transfer=transfer),
        )
