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

Read in this order: `choices.py`, `clock.py`, `host.py`, `policies.py`, `scheduler.py`, `world.py`,
`trace.py`, `ambient.py`, `guard.py`; then `links.py`, `connection.py` (what TCP does), `network.py`
(hosts and faults), `sockets.py` (what a process sees of it), `bus.py` (messages that may be lost),
`disk.py`, `env.py` (what the runtime takes from the world) and `liveness.py`. `explore/` makes many
runs: search, shrink, replay. Whole systems are played by `scenario.py`: clusters (`cluster.py`) and KV
transfers (`transfers/`), struck by `scenario_faults.py` and judged by `checks/`.
"""

from .bus import Bus, Message, Verdict
from .choices import (
    Choice,
    Choices,
    DeviationChoices,
    LabelledChoices,
    PrefixChoices,
    ReplayChoices,
    SeedChoices,
)
from .clock import WallClock
from .connection import Connection, Endpoint
from .disk import Disk
from .env import SimClock, SimEnv
from .errors import (
    Deadlock,
    Escape,
    SimulationError,
    StepLimit,
    TimeLimit,
    UnsupportedTrio,
    Violation,
)
from .guard import check_trio
from .handshake import SynAnswer
from .host import Host, HostState
from .links import Link, Links
from .liveness import Promises, heal_core
from .network import Network
from .scheduler import Policy
from .sockets import SimSocket
from .trace import Difference, Row, Trace, diff, first_difference
from .world import World

__all__ = [
    "Bus",
    "Choice",
    "Choices",
    "Connection",
    "Deadlock",
    "DeviationChoices",
    "Difference",
    "Disk",
    "Endpoint",
    "Escape",
    "Host",
    "HostState",
    "LabelledChoices",
    "Link",
    "Links",
    "Message",
    "Network",
    "Policy",
    "PrefixChoices",
    "Promises",
    "ReplayChoices",
    "Row",
    "SeedChoices",
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
    "check_trio",
    "diff",
    "first_difference",
    "heal_core",
]
