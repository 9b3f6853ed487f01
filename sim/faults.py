"""Faults for anybody's protocol: a plan as plain dictionaries, what carries it out, and how all ends well.

    arm(world, network, [{"do": "cut", "host": "a", "to": "b", "at_s": 0.5, "for_s": 2.0}])

A plan is what JSON can hold, so it travels in a failure file, `shrink` makes it shorter, and
`strategies.fault_plans` draws one.

A run that never breaks a safety rule may still hang. So, as in TigerBeetle's simulator, a run may end
with a second phase: `heal_core` makes a part of its hosts whole, and from then on every request that
was accepted must end, in success or in a typed error, within its bound.

What this module does not do: the faults of a scenario file, which know clusters
(`scenario/faults.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, Literal, NotRequired, TypedDict

from .core.world import World
from .disk.disk import Disk
from .net.network import Network

Kind = Literal[
    "kill",
    "power_off",
    "pause",
    "isolate",
    "cut",
    "cut_one_way",
    "reset",
    "finish",
    "thin",
    "fill",
    "fail_fsync",
    "slow_down",
]
ON_HOSTS: Final[tuple[Kind, ...]] = ("kill", "power_off", "pause", "isolate")
ON_LINKS: Final[tuple[Kind, ...]] = ("cut", "cut_one_way", "reset", "finish", "thin")
ON_DISKS: Final[tuple[Kind, ...]] = ("fill", "fail_fsync", "slow_down")
"""Faults of a host's disk; see `sim/disk/disk.py`."""
AT_ONCE: Final[tuple[Kind, ...]] = ("reset", "finish", "fail_fsync")
"""Those that are over as soon as they have struck."""
THIN_BYTES_PER_S: Final = 3000.0
"""What passes each way over a thin link."""
SLOW_DISK_S: Final = 1.0
"""What a sync takes at most while `slow_down` lasts."""


class Fault(TypedDict):
    """One thing that goes wrong, and when."""

    do: str
    """One of `ON_HOSTS`, `ON_LINKS` or `ON_DISKS`."""
    host: NotRequired[str]
    """Whom it strikes; left out with `on`."""
    on: NotRequired[Literal["note"]]
    """It strikes the host that makes the note of `after_note`."""
    at_s: float
    """Virtual seconds since the run began; with `after_note`, since that note."""
    to: NotRequired[str]
    """The other end of a link."""
    for_s: NotRequired[float]
    """After so many seconds it is undone: the link whole, the host booted or resumed, the disk as it was. Without: never."""
    after_note: NotRequired[str]
    """`kind#n`: at the n-th note of this kind since the plan was armed."""


def arm(
    world: World,
    network: Network,
    faults: Iterable[Fault],
    *,
    boot: Callable[[str], object] | None = None,
) -> None:
    """Ready every fault of the plan; call it inside the run, once the hosts are booted.

    `boot` starts the process of a host again whose `kill` or `power_off` is over; without it the
    host stays down. Each fault is noted as it strikes, and one whose note never comes is in
    `world.untested`. Raises `ValueError` for a fault that no such plan can have.
    """
    for fault in faults:
        _check_keys(fault)
        do, note, on = fault["do"], fault.get("after_note", ""), fault.get("on")
        known = (*ON_HOSTS, *ON_LINKS, *ON_DISKS)
        if do not in known:
            raise ValueError(f"no such fault: {do!r}; there are {', '.join(known)}")
        if do in ON_LINKS and not fault.get("to"):
            raise ValueError(f"a {do} needs the other end of its link, as `to`")
        if ("host" in fault) == (on is not None) or (on and not note):
            raise ValueError(
                f'a {do} strikes its `host`, or with `after_note` and on="note" its maker'
            )
        named = [] if on else [fault.get("host", "")]
        strike = partial(_strike, world, network, fault, boot)
        if note:
            kind, _, number = note.partition("#")
            if not (number or "1").isdecimal():
                raise ValueError(f"after_note is a kind, and which one as a number: {note!r}")
            name = f"the fault {do} {fault.get('host', 'of the host that made a note')}"
            nth, delay_s = int(number or 1), fault["at_s"]
            world.after_note(kind, nth, strike, *named, delay_s=delay_s, name=name, on=on)
        else:
            for_s = 0.0 if do in AT_ONCE else fault.get("for_s", math.inf)
            world.calm_at_s = max(world.calm_at_s, fault["at_s"] + for_s)
            world.at(fault["at_s"], strike, *named)


def _check_keys(fault: Fault) -> None:
    keys = set(fault)
    if strange := sorted(keys - Fault.__annotations__.keys()):
        known = ", ".join(Fault.__annotations__)
        raise ValueError(f"a fault has no {', '.join(strange)}; it has {known}")
    if missing := sorted({"do", "at_s"} - keys):
        raise ValueError(f"a fault needs {' and '.join(missing)}: {fault}")


def _strike(
    world: World,
    network: Network,
    fault: Fault,
    boot: Callable[[str], object] | None,
    host: str,
) -> None:
    do, other = fault["do"], fault.get("to", "")
    world.note("fault", do=do, on=host, to=other)
    undo = effect(world, network, do, host, other, hosts=world.host_names, boot=boot)
    for_s = 0.0 if do in AT_ONCE else fault.get("for_s", math.inf)
    world.calm_at_s = max(world.calm_at_s, world.current_time() + for_s)
    if undo is not None and for_s != math.inf:
        world.after(for_s, _undo, world, do, host, undo)


def _undo(world: World, do: str, host: str, undo: Callable[[], object]) -> None:
    world.note("fault.over", do=do, on=host)
    undo()


def effect(
    world: World,
    network: Network,
    do: str,
    host: str,
    other: str,
    *,
    hosts: Iterable[str],
    boot: Callable[[str], object] | None,
) -> Callable[[], object] | None:
    """Do it now; what undoes it, if anything can. `isolate` cuts `host` off from all other `hosts`."""
    if do in ("kill", "power_off"):
        (world.kill if do == "kill" else world.power_off)(host)
        return None if boot is None else partial(_boot, world, host, boot)
    if do == "pause":
        world.pause(host)
        return partial(world.resume, host)
    if do in ON_DISKS:
        return _disk_effect(world.aim(do, host).disk, do)
    if do in AT_ONCE:
        (network.reset if do == "reset" else network.finish)(host, other)
        return None
    if do == "thin":
        return _thinned(network, host, other)
    others = [name for name in hosts if name != host] if do == "isolate" else [other]
    for each in others:
        network.cut(host, each, one_way=do == "cut_one_way")

    def heal() -> None:
        for each in others:
            network.heal(host, each)

    return heal


def _thinned(network: Network, host: str, other: str) -> Callable[[], object]:
    """Make the link thin both ways; what makes it as it was."""
    ways = (host, other), (other, host)
    before = [network.link(*way).bytes_per_s for way in ways]
    if THIN_BYTES_PER_S in before:
        # Another fault made it so, and will undo it.
        return lambda: None
    network.world.add_row("thin", source=host, target=other, bytes_per_s=THIN_BYTES_PER_S)
    for way in ways:
        network.links.shape(*way, bytes_per_s=THIN_BYTES_PER_S)

    def widen() -> None:
        for way, bytes_per_s in zip(ways, before, strict=True):
            network.links.shape(*way, bytes_per_s=bytes_per_s)

    return widen


def _disk_effect(disk: Disk, do: str) -> Callable[[], object] | None:
    if do == "fill":
        disk.fill()
        return disk.make_room
    if do == "slow_down":
        disk.slow_down(SLOW_DISK_S)
        return partial(disk.slow_down, 0.0)
    disk.fail_fsync()
    return None


def _boot(world: World, host: str, boot: Callable[[str], object]) -> None:
    if not world.host(host).is_running:
        boot(host)


def heal_core(
    world: World, network: Network, core: Sequence[str], boot: Callable[[str], object]
) -> None:
    """Heal the hosts of `core`, their disks and the links between them; cut the other hosts off, for good.

    `boot` is called with the name of each host of the core that does not run, and must boot it. The
    other hosts stay as they are, dead, paused or running, but nothing passes to or from them. Faults
    that are still planned against the core strike it all the same: plan none after this moment.
    """

    def passes(source: str, target: str) -> bool:
        return not network.link(source, target).is_cut

    outside = [name for name in world.host_names if name not in core]
    world.note("liveness.begin", core=tuple(core), outside=tuple(outside))
    for name in outside:
        for other in world.host_names:
            if other != name and (passes(name, other) or passes(other, name)):
                network.cut(name, other)
    for index, name in enumerate(core):
        for other in core[index:]:
            # A link that was whole is left alone: to heal it would have its segments sent again.
            if not (passes(name, other) and passes(other, name)):
                network.heal(name, other)
        network.answer_syn(name, "accept")
    for name in core:
        world.resume(name)
        world.host(name).disk.heal()
        _boot(world, name, boot)
