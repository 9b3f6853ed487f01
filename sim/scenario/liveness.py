"""After the storm: a core of the cluster is healed, the rest stays broken, and all work must end.

A run that never breaks a safety rule may still hang. So, as TigerBeetle's simulator does, a scenario
ends with a second phase: `heal_core` makes the links inside the core whole, wakes and restarts its
hosts, and cuts everybody else off for good. From then on every request that was accepted must end,
in success or in a typed error, within the bound that was stated for it: `Promises` keeps the book.

What this module does not do: take back faults that are still planned against the core; plan none
after this moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import trio

from ..core.errors import Violation
from ..core.host import HostState
from ..core.world import World
from ..net.network import Network

__all__ = ["Promises", "heal_core"]

RUNNING = (HostState.UP, HostState.PAUSED)


def heal_core(
    world: World, network: Network, core: Sequence[str], boot: Callable[[str], object]
) -> None:
    """Heal the hosts of `core` and the links between them; cut the other hosts off, for good.

    `boot` is called with the name of each host of the core that does not run, and must boot it. The
    other hosts stay as they are, dead, paused or running, but nothing passes to or from them.
    """
    outside = [name for name in world.host_names if name not in core]
    world.note("liveness.begin", core=tuple(core), outside=tuple(outside))
    for name in outside:
        for other in world.host_names:
            if other != name and (_passes(network, name, other) or _passes(network, other, name)):
                network.cut(name, other)
    for index, name in enumerate(core):
        for other in core[index:]:
            # A link that was whole is left alone: to heal it would have its segments sent again.
            if not (_passes(network, name, other) and _passes(network, other, name)):
                network.heal(name, other)
        network.answer_syn(name, "accept")
    for name in core:
        world.resume(name)
        if world.host(name).state not in RUNNING:
            boot(name)


def _passes(network: Network, source: str, target: str) -> bool:
    return not network.link(source, target).is_cut


@attrs.define
class _Promise:
    bound_s: float
    made_s: float


class Promises:
    """Which accepted requests have not ended, and when each must have.

    `accept` and `end` are for the code that knows, such as a client host; `settle` is for the
    scenario, once the core is healed.
    """

    def __init__(self, world: World, invariant: str = "I15") -> None:
        self._world, self._invariant = world, invariant
        self._open: dict[str, _Promise] = {}
        self._changed = trio.Event()
        self.accepted = self.ended = 0

    @property
    def open(self) -> list[str]:
        """The requests that have not ended, in the order in which they were accepted."""
        return list(self._open)

    def accept(self, request: str, bound_s: float) -> None:
        """From now, or from the healing if that is later, `request` must end within `bound_s`."""
        if request in self._open:
            raise ValueError(f"request {request!r} was accepted before and has not ended")
        self.accepted += 1
        self._open[request] = _Promise(bound_s, self._world.current_time())
        self._wake()

    def end(self, request: str, outcome: str) -> None:
        """`request` ended; `Violation` if it is not open: it ended twice, or never began."""
        if self._open.pop(request, None) is None:
            raise Violation(self._invariant, f"{request} ended ({outcome}), and was not open")
        self.ended += 1
        self._world.note("promise.end", request=request, outcome=outcome)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def settle(self) -> None:
        """Return once every request has ended; `Violation` when one passes its bound.

        Its text names the overdue requests and says where every task waits.
        """
        healed_s = self._world.current_time()
        while self._open:
            due_s = min(
                max(promise.made_s, healed_s) + promise.bound_s for promise in self._open.values()
            )
            if self._world.current_time() >= due_s:
                raise Violation(self._invariant, self._overdue(healed_s))
            changed = self._changed
            with trio.move_on_at(due_s):
                await changed.wait()

    def _overdue(self, healed_s: float) -> str:
        now_s = self._world.current_time()
        late = [
            f"{request} (accepted at {promise.made_s:.3f} s, bound {promise.bound_s} s)"
            for request, promise in self._open.items()
            if max(promise.made_s, healed_s) + promise.bound_s <= now_s
        ]
        return f"{len(late)} requests did not end: {', '.join(late)}\n{self._world.waiting()}"
