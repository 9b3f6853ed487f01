"""After the storm: a core of the cluster is healed, the rest stays broken, and all work must end.

A run that never breaks a safety rule may still hang. So, as TigerBeetle's simulator does, a scenario
ends with a second phase: `heal_core` makes the links inside the core whole, wakes and restarts its
hosts, and cuts everybody else off for good. From then on every request that was accepted must end,
in success or in a typed error, within its bound.

What this module does not do: take back faults that are still planned against the core; plan none
after this moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.host import HostState
from ..core.world import World
from ..net.network import Network

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
