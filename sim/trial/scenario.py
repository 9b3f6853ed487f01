"""A scenario: what is played, what breaks and when, and what must hold, all as plain data.

`file.py` reads one from TOML, `run.py` plays it.
"""

from __future__ import annotations

import attrs
import msgspec

from ..cluster.byzantine import ByzantineClient
from ..cluster.cluster import ClusterPlan
from ..cluster.plans import (
    Expect,
    FaultPlan,
    Limits,
    LinkPlan,
    Liveness,
    Mutant,
    NetworkPlan,
    QueuePlan,
)
from ..core.scheduler import Policy


@attrs.frozen(kw_only=True)
class Scenario:
    """One file of the catalogue."""

    name: str
    about: str
    policy: Policy | None = None
    """None leaves it to what is played: `grouped` for queues, which are searched, else `batch`."""
    streams: str | None = None
    """The only carrier that it is about, in place of what the configuration says; None: any."""
    cluster: ClusterPlan = attrs.Factory(ClusterPlan)
    queue: QueuePlan | None = None
    """Instead of the cluster."""
    network: NetworkPlan = attrs.Factory(NetworkPlan)
    links: tuple[LinkPlan, ...] = ()
    byzantines: tuple[ByzantineClient, ...] = ()
    faults: tuple[FaultPlan, ...] = ()
    liveness: Liveness = attrs.Factory(Liveness)
    limits: Limits = attrs.Factory(Limits)
    expect: Expect = attrs.Factory(Expect)
    mutants: tuple[Mutant, ...] = ()

    def on(self, streams: str) -> Scenario:
        """The same, whose answers and input travel on this carrier."""
        config = self.cluster.config
        tcp = msgspec.structs.replace(config.data_plane.tcp, streams=streams)
        plane = msgspec.structs.replace(config.data_plane, tcp=tcp)
        config = msgspec.structs.replace(config, data_plane=plane)
        return attrs.evolve(self, cluster=attrs.evolve(self.cluster, config=config))
