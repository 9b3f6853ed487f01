"""A scenario as plain data: what is played, what breaks and when, and what must hold.

The fields are the keys of the tables in a scenario file, which `scenario/file.py` reads and
`scenario/run.py` plays. The plans of the cluster and its load stand with them (`cluster.py`, `workload.py`).
"""

from __future__ import annotations

import math

import attrs
import msgspec
from typing_extensions import override

from ..core.policies import Policy
from .byzantine import ByzantineClient
from .cluster import ClusterPlan


@attrs.frozen(kw_only=True)
class NetworkPlan:
    """The network as long as nothing is broken."""

    tear_one_in: int = 4
    short_one_in: int = 8
    window_bytes: int = 65_536
    connect_timeout_s: float = 10.0
    latency_s: float = 0.0005
    jitter_s: float = 0.0002


@attrs.frozen(kw_only=True)
class LinkPlan:
    """One direction, or both: `source` and `target` may hold `*`."""

    source: str
    target: str
    is_both_ways: bool = False
    latency_s: float | None = None
    jitter_s: float | None = None
    bytes_per_s: float | None = None
    """Bandwidth; 0 is without limit."""
    loss_one_in: int | None = None
    """One segment in so many is lost, and so late; 0 is none."""
    fin_delay_s: float | None = None
    """How long the end of a connection is held back: a peer that closes slowly."""


@attrs.frozen(kw_only=True)
class Limits:
    """When a run is given up, and the bounds it is held to, all in virtual seconds."""

    virtual_s: float = 600.0
    steps: int = 2_000_000
    end_s: float = 60.0
    """From the start of the load until every accepted request has ended (I15)."""
    idle_s: float = 0.1
    """From the end of a request at its client until every leg of it is idle (I4)."""
    settle_s: float = 40.0
    """After the last request, until nothing of any request is left (I5, I16)."""


@attrs.frozen(kw_only=True)
class LivenessBound:
    """At `at_s` a core is healed; what else is broken then stays so. Negative: never."""

    at_s: float = -1.0
    whole_after_s: float = -1.0
    """Requests that begin so long after that are answered whole (I15). Negative: none need be."""


@attrs.frozen(kw_only=True)
class Expect:
    """What the run must show beside the invariants."""

    invariants: tuple[str, ...] = ()
    """Those that are checked; empty means all."""
    outcomes: tuple[str, ...] = ()
    """The only ends a client may see; empty means any. A word ending in `*` is a beginning."""
    complete_min: int = 0
    """How many requests must be answered whole."""
    notes: tuple[str, ...] = ()
    """Kinds of notes that must occur, in some run of a swarm: else nothing was tested."""
    never: tuple[str, ...] = ()
    """Kinds of notes that must not occur before everybody is told to leave."""
    burst_note: str = ""
    burst_max: int = 0
    """Once a fault is over, at most so many notes of the kind come within `BURST_S`."""


@attrs.frozen(kw_only=True)
class FaultPlan:
    """One `[[fault]]` of a scenario file."""

    do: str
    at: float | tuple[float, float] | None = None
    """Seconds after the load began; a range is drawn from."""
    after_note: str = ""
    """`kind#n`: at the n-th note of this kind since the load began."""
    delay: float | tuple[float, float] = 0.0
    """Seconds after that note."""
    on: str = ""
    """A host, or a pattern one match of which is chosen."""
    to: str = ""
    """The other end of a link."""
    lasts_s: float = math.inf
    """`for` in the file: undone after so many seconds; without it never."""
    maybe: bool = False
    """Strikes in half of the runs."""
    count: int = 1
    seconds: float = 0.0

    @override
    def __str__(self) -> str:
        return " ".join(word for word in ("the fault", self.do, self.on, self.to) if word)


@attrs.frozen(kw_only=True)
class QueuePlan:
    """The small leased queue in place of a cluster (see `programs/leased_queue.py`)."""

    workers: int = 2
    jobs: int = 1
    losses: bool = True
    real: bool = False
    """The runtime's own consumers on the simulated broker (`programs/queue_consumers.py`)."""
    stranger: bool = False
    """They have a secret, and somebody with the broker's token says of their jobs that they are done."""
    late: bool = False
    """They are paused, each time while a job is on its way to them, and nothing else befalls."""


@attrs.frozen(kw_only=True)
class Mutant:
    """The same scenario with a known mistake put back: some seed must show it."""

    bug: str
    finds: str
    """The invariant that is broken then."""
    seeds_max: int = 200


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
    liveness: LivenessBound = attrs.Factory(LivenessBound)
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
