"""The same house on simulated ground: virtual time, simulated TCP, injected faults, one trace.

Unmodified trio code runs in a `World`: its clock jumps from event to event, its scheduler takes
every decision from `Choices`, its sockets are those of a `Network`, and whatever reaches for the
real world raises `Escape`. The same seed gives the same trace, in any process.

    world = World(SeedChoices(1))
    network = Network(world)

    async def main() -> None:
        world.boot("server", serve)
        world.boot("client", ask)
        world.after(0.5, world.kill, "server")
        await world.host("client").ended.wait()

    digest = world.run(main)

Read in this order: `core/choices.py`, `core/host.py`, `core/machines.py`, `core/policies.py`,
`core/scheduler.py`, `core/world.py`, `core/trace.py`, `isolation/ambient.py`, `isolation/threads.py`,
`isolation/tls.py`, `isolation/endless.py`, `isolation/guard.py`;
then `net/links.py`, `net/connection.py` (what TCP does), `net/network.py` (hosts and faults),
`net/std_sockets.py` and `net/sockets.py` (what a process sees of it), `net/bus.py` (messages that may be lost),
`disk/disk.py` (files, and what a power cut leaves of them),
`faults.py` (what breaks, and the healing of
it), and `stress.py` (both drawn in one call). `explore/` makes many runs: search, shrink, replay; `own/` does it all for a function of one's own.
Nothing of these knows the cluster. Whole clusters are played by `scenario/run.py`
(`cluster/cluster.py`), struck by `scenario/faults.py` and judged by `checks/`.
"""

from trinamo.points import barrier, note, reached, sometimes

from .checkers import (
    Checker,
    Delivery,
    Linearizability,
    Operation,
    Serializability,
    models,
    register,
)
from .core.choices import (
    Choice,
    Choices,
    DeviationChoices,
    LabelledChoices,
    PrefixChoices,
    ReplayChoices,
    SeedChoices,
)
from .core.host import Host, HostState, WallClock
from .core.policies import Policy
from .core.trace import Difference, Row, Trace, diff, first_difference
from .core.world import World
from .disk.disk import Disk
from .env import SimClock, SimEnv
from .errors import (
    Deadlock,
    EndlessStep,
    Escape,
    Livelock,
    SimulationError,
    StepLimit,
    TimeLimit,
    UnsupportedTrio,
    Violation,
)
from .explore.run import BadScenario, page_of
from .faults import Fault, arm, heal_core
from .isolation.guard import check_trio
from .net.bus import Bus, Message, Verdict
from .net.connection import Connection, Endpoint
from .net.handshake import SynAnswer
from .net.links import Link, Links
from .net.network import Network
from .net.sockets import SimSocket
from .own.scenario import own_scenario
from .own.search import Found, Hint, examine, search
from .stress import gives_up_and_asks_again, recovers, stress

__all__ = [
    "BadScenario",
    "Bus",
    "Checker",
    "Choice",
    "Choices",
    "Connection",
    "Deadlock",
    "Delivery",
    "DeviationChoices",
    "Difference",
    "Disk",
    "EndlessStep",
    "Endpoint",
    "Escape",
    "Fault",
    "Found",
    "Hint",
    "Host",
    "HostState",
    "LabelledChoices",
    "Linearizability",
    "Link",
    "Links",
    "Livelock",
    "Message",
    "Network",
    "Operation",
    "Policy",
    "PrefixChoices",
    "ReplayChoices",
    "Row",
    "SeedChoices",
    "Serializability",
    "SimClock",
    "SimEnv",
    "SimSocket",
    "SimulationError",
    "StepLimit",
    "SynAnswer",
    "TimeLimit",
    "Trace",
    "UnsupportedTrio",
    "Verdict",
    "Violation",
    "WallClock",
    "World",
    "arm",
    "barrier",
    "check_trio",
    "diff",
    "examine",
    "first_difference",
    "gives_up_and_asks_again",
    "heal_core",
    "models",
    "note",
    "own_scenario",
    "page_of",
    "reached",
    "recovers",
    "register",
    "search",
    "sometimes",
    "stress",
]
