"""A message broker as a host of the world: it speaks NATS's own protocol, and production's client is its client.

`SimulatedNats` is the machine; `broker.py` is one life of its process, `jetstream.py` its disk. Whoever wants a
plane opens `transports/nats` to `nats://<name>:4222` from a host of the world.

Faults: `kill`, `power_off`, `pause` and `resume`, `restart` with the disk or without, `refuse` (streams
have no leader; plain messages go on), `lose_replies`, `forge` (`stranger.py`), `clock` (acknowledgements are waited for on it), and
`interceptor.rules` for single messages.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import trio
from typing_extensions import override

from ...core.world import World
from ..machine import ServiceMachine
from .broker import Broker
from .jetstream import JetStream
from .stranger import Stranger

PORT: Final = 4222
PENDING_BYTES_MAX: Final = 64 << 20
"""As the real server's `max_pending`."""


class SimulatedNats(ServiceMachine):
    """The broker's machine. `boot` starts it; needs a `Network` on the same world.

    Args:
        world: Whose host it is.
        name: The host's name.
        port: Where it listens.
        pending_bytes_max: How much a client may leave unread before it is cut off.
    """

    def __init__(
        self,
        world: World,
        *,
        name: str = "nats",
        port: int = PORT,
        pending_bytes_max: int = PENDING_BYTES_MAX,
    ) -> None:
        super().__init__(world, name, on_clock=self._elected, losable=("store", "ack"))
        self.port, self.pending_bytes_max = port, pending_bytes_max
        self._rng = world.choices.stream(f"{name} groups")
        self._stranger: Stranger | None = None
        self._empty_disk()

    @property
    def url(self) -> str:
        """Where its clients find it."""
        return f"nats://{self.name}:{self.port}"

    def boot(self) -> None:
        """Start the process: nobody is subscribed, streams are what is on the disk."""
        self.streams.booted()
        self.interceptor.forget()
        self.world.boot(self.name, self._main)

    def forge(self, *, is_on: bool) -> None:
        """Whether a stranger with the broker's token is about, who says things of his own."""
        self._stranger = Stranger(self.world) if is_on else None

    def _empty_disk(self) -> None:
        self.streams = JetStream(self.clock)

    @override
    def _elected(self) -> None:
        self.streams.stir()

    async def _main(self) -> None:
        broker = Broker(
            self,
            self.streams,
            rng=self._rng,
            pending_bytes_max=self.pending_bytes_max,
            forge=lambda each: self._stranger.says(each) if self._stranger else [],
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.streams.run, broker.send, lambda: self.is_leaderless)
            nursery.start_soon(partial(trio.serve_tcp, broker.serve, self.port), name="listener")
