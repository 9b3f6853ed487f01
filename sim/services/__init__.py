"""The servers that planes need, as hosts of the world.

Each is the memory model of its service behind messages on the simulated network, so there is one
model of each, and what passes the conformance suite here passes it on the real server:

* `SimulatedEtcd` and `open_simulated_etcd`: the control store, its leases on its own clock;
* `SimulatedNats` and `open_simulated_nats`: the message broker, and leased work queues on its disk;
* `MemoryFabric`: one-sided memory, moved by adapters and not by tasks.

They speak over simulated TCP, not over the bus: cuts, resets, frozen and killed servers, torn
reads and back-pressure then come from the network that carries everything else, and connecting
again is code that runs. Faults on single messages are rules of the service's `interceptor`.

Read in this order: `peer.py`, `connector.py`, `interception.py`, then
`services/etcd/server.py`, `services/etcd/channel.py`, and `services/nats/server.py`,
`services/nats/client.py`.
"""

from .etcd.channel import open_simulated_etcd
from .etcd.server import SimulatedEtcd
from .interception import Interceptor
from .machine import MachineClock
from .memory import MemoryFabric
from .nats.client import SimulatedEventPlane, open_simulated_nats
from .nats.server import SimulatedNats

__all__ = [
    "Interceptor",
    "MachineClock",
    "MemoryFabric",
    "SimulatedEtcd",
    "SimulatedEventPlane",
    "SimulatedNats",
    "open_simulated_etcd",
    "open_simulated_nats",
]
