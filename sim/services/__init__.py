"""The servers that planes need, as hosts of the world.

What passes the conformance suites here passes them on the real servers:

* `SimulatedEtcd` and `open_simulated_etcd`: the control store, the memory plane's model behind messages,
  its leases on its own clock;
* `SimulatedNats`: a broker that speaks NATS and its JetStream, to which production's client connects;
* `MemoryFabric`: one-sided memory, moved by adapters and not by tasks.

They speak over simulated TCP, not over the bus: cuts, resets, frozen and killed servers, torn
reads and back-pressure then come from the network that carries everything else, and connecting
again is code that runs. Faults on single messages are rules of the service's `interceptor`.

Read in this order: `machine.py`, `interception.py`, `peer.py`; then `etcd/wire.py`, `etcd/server.py`,
`etcd/channel.py`; and `nats/wire.py`, `nats/broker.py`, `nats/jetstream.py`,
`nats/server.py`.
"""

from .etcd.channel import open_simulated_etcd
from .etcd.server import SimulatedEtcd
from .interception import Interceptor
from .machine import MachineClock
from .memory import MemoryFabric
from .nats.server import SimulatedNats

__all__ = [
    "Interceptor",
    "MachineClock",
    "MemoryFabric",
    "SimulatedEtcd",
    "SimulatedNats",
    "open_simulated_etcd",
]
