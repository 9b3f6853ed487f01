"""The servers that planes need, as hosts of the world.

Each is the memory model of its service behind messages on the simulated network, so there is one
model of each, and what passes the conformance suite here passes it on the real server:

* `SimulatedEtcd` and `open_simulated_etcd`: the control store, its leases on its own clock;
* `SimulatedNats` and `open_simulated_nats`: the message broker, and leased work queues on its disk;
* `MemoryFabric` and `open_simulated_memory`: one-sided memory, moved by adapters and not by tasks.

They speak over simulated TCP, not over the bus: cuts, resets, frozen and killed servers, torn
reads and back-pressure then come from the network that carries everything else, and connecting
again is code that runs. Faults on single messages are rules of the service's `interceptor`.

Read in this order: `peer.py`, `connector.py`, `interception.py`, `calls.py`, then
`etcd.py`, `etcd_client.py`, and `nats.py`, `nats_client.py`.
"""

from .etcd import SimulatedEtcd
from .etcd_client import SimulatedControlPlane, open_simulated_etcd
from .interception import Interceptor
from .machine_clock import MachineClock
from .memory import MemoryFabric, SimulatedMemoryPlane, open_simulated_memory
from .nats import SimulatedNats
from .nats_client import SimulatedEventPlane, open_simulated_nats

__all__ = [
    "Interceptor",
    "MachineClock",
    "MemoryFabric",
    "SimulatedControlPlane",
    "SimulatedEtcd",
    "SimulatedEventPlane",
    "SimulatedMemoryPlane",
    "SimulatedNats",
    "open_simulated_etcd",
    "open_simulated_memory",
    "open_simulated_nats",
]
