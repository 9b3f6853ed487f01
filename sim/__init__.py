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

Read in this order: `choices.py`, `host.py`, `scheduler.py`, `world.py`, `trace.py`, `guard.py`,
then `connection.py` (what TCP does), `network.py` (hosts, links, faults), `sockets.py` (what a
process sees of it), and `env.py` (what the runtime takes from the world).
"""

from .choices import Choice, Choices, ReplayChoices, SeedChoices
from .connection import Connection, Endpoint
from .env import SimClock, SimEnv
from .errors import Deadlock, Escape, SimulationError, StepLimit, TimeLimit, UnsupportedTrio
from .guard import check_trio
from .host import Host, HostState
from .network import Link, Network
from .scheduler import Policy
from .sockets import SimSocket
from .trace import Row, Trace, first_difference
from .world import World

__all__ = [
    "Choice",
    "Choices",
    "Connection",
    "Deadlock",
    "Endpoint",
    "Escape",
    "Host",
    "HostState",
    "Link",
    "Network",
    "Policy",
    "ReplayChoices",
    "Row",
    "SeedChoices",
    "SimClock",
    "SimEnv",
    "SimSocket",
    "SimulationError",
    "StepLimit",
    "TimeLimit",
    "Trace",
    "UnsupportedTrio",
    "World",
    "check_trio",
    "first_difference",
]
