"""One-sided memory between simulated hosts: a transfer plane as RDMA would have it (NIXL-like).

The plane and its mover are those of `transports/memory/transfer.py`; here is what carries its blocks: the
adapters of simulated hosts. They move blocks by themselves, as events of the world over the network's
links, up to `window` of one transfer at once. A paused process at the other end does not stop a transfer, a
killed one fails it, a cut link or a machine that is off leaves it hanging until the adapter gives up
after `give_up_s`. What is on the way lands, also after an abort, a deadline or the death of the process
that started it: only then is the transfer settled.

A stalled adapter keeps what is on its way and lets it land when it goes on, however long nobody has
waited for it any more, unless the process that started it has died meanwhile: its queue died with it.
A broken one loses everything, so that the other side gives up after `give_up_s`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from zlib import crc32

from typing_extensions import override

from trinamo.transports.memory.transfer import MemoryMover, TransferFabric

from ..core.host import HostState, current_host_name
from ..core.world import World
from ..net.network import Network

LOOK_S: Final = 0.01
"""How soon a copy goes on after the process that makes it does."""


class MemoryFabric(TransferFabric):
    """The adapters of a world's hosts; a plane belongs to the host of the task that opens it.

    Args:
        network: Whose links the blocks take; a cut there cuts them off too.
        window: How many blocks of one transfer are on the way at once.
        give_up_s: How long an adapter repeats what is not answered.
        is_fenced: Whether the owner's side checks generation and ticket of every block.
        is_copied: No adapter moves the bytes but the process that started the transfer, as by
            copying between two processes: while it is paused nothing lands, and when it goes on,
            the rest.
    """

    backend = "simulated"
    path = "fabric"
    lands_late = True
    close_s = 10.0

    def __init__(
        self,
        world: World,
        network: Network,
        *,
        window: int = 4,
        give_up_s: float = 4.0,
        is_fenced: bool = True,
        is_copied: bool = False,
    ) -> None:
        super().__init__()
        self.world, self.network = world, network
        self.window, self.give_up_s = window, give_up_s
        self.is_fenced, self.is_copied = is_fenced, is_copied
        self.stalled: set[str] = set()
        """The hosts whose adapters hold back what they move."""
        self.broken: set[str] = set()
        """Those whose adapters lose it."""
        self._waiting: list[Callable[[], None]] = []
        self._generations: dict[MemoryMover, int] = {}

    @override
    def join(self, mover: MemoryMover) -> None:
        mover.address = current_host_name()
        self._generations[mover] = self.world.host(mover.address).generation
        super().join(mover)

    @override
    def is_alive(self, mover: MemoryMover) -> bool:
        """Whether its process still is; paused is alive, for its memory."""
        host, generation = self.world.host(mover.address), self._generations[mover]
        return host.generation == generation and (host.is_running or generation == 0)

    @override
    def knows(self, address: str) -> bool:
        return self.world.knows(address)

    @override
    def landed(self, address: str, position: int, data: bytes) -> None:
        self.world.add_row("block", target=address, position=position, crc=crc32(data))

    def go_on(self, host: str) -> None:
        """The adapter of `host` works again: what it held back arrives now, in order."""
        self.stalled.discard(host)
        waiting, self._waiting = self._waiting, []
        for reach in waiting:
            reach()

    @override
    def carry(
        self,
        source: str,
        destination: str,
        size: int,
        arrive: Callable[[], None],
        give_up: Callable[[], None],
        *,
        by: str = "",
        delay_s: float = 0.0,
    ) -> None:
        """See `TransferFabric.carry`; `by` is the host that started it all."""
        world, links, ends = self.world, self.network.links, (source, destination)
        began_s = world.current_time()
        starter = world.host(by or source)
        generation = starter.generation
        was_held = False

        def send(delay_s: float) -> None:
            link = links.link(source, destination)
            delay_s += links.delay_s(link, size=size, has_jitter=False)
            is_lost = links.loses(link) or not links.passes(source, destination)
            world.after(delay_s, land, is_lost)

        def land(is_lost: bool) -> None:  # noqa: FBT001 -- as it is called by the clock
            if links.passes(source, destination) and not is_lost:
                reach()
            elif world.current_time() - began_s >= self.give_up_s:
                give_up()
            else:
                # The adapter repeats what was not acknowledged.
                world.after(self.give_up_s / 16, send, 0.0)

        def reach() -> None:
            nonlocal was_held
            is_over = generation > 0 and not starter.is_running
            is_dead = is_over or starter.generation != generation
            if not self.stalled.isdisjoint(ends):
                was_held = True
                self._waiting.append(reach)
            elif self.is_copied and starter.state is HostState.PAUSED and not is_dead:
                was_held = True
                world.after(LOOK_S, reach)
            elif not self.broken.isdisjoint(ends) or (was_held and is_dead):
                world.at(max(began_s + self.give_up_s, world.current_time()), give_up)
            else:
                arrive()

        send(delay_s)
