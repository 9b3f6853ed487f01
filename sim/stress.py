"""What nearly every scenario wants: bad links and a few faults, healing, and the question that follows.

    boot("server"), boot("client")
    stress(world, network, server="server", boot=boot)
    ...
    await recovers(ask, within_s=10)

`stress` draws it all when it is called, each choice a labelled decision of which 0 means that nothing
happens, so that two to six of them are left after shrinking. Whatever it breaks is healed, and what
died is booted again; from then on `recovers` holds a client to its answer. Read next: `faults.py`,
which carries the plan out.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import outcome
import trio

from trinamo.points import WORLD
from trinamo.runtime.logs.text import leaves

from .core.choices import Choices
from .core.world import World
from .errors import Violation
from .faults import ON_HOSTS, Fault, Kind, arm
from .net.network import Network

Answer = TypeVar("Answer")

JITTERS_S: Final = (0.0, 0.02, 0.1, 0.3)
"""How late messages may be, on every link or on some."""
PIECES: Final = ((0, 0), (2, 0), (0, 2), (2, 2))
"""Of so many reads one is torn, and of so many writes one is short; 0: as the network has it."""
KINDS: Final[tuple[Kind, ...]] = (
    *("kill", "power_off", "pause"),
    *("cut", "cut_one_way", "reset", "finish", "thin"),
)
MOMENTS: Final = 64
LASTS_S: Final = (0.05, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
NOTES_MAX: Final = 8
PATIENCES: Final = 8
PAUSE_S: Final = 0.1
"""Between two attempts of `recovers`."""


def stress(
    world: World,
    network: Network,
    *,
    server: str | Sequence[str],
    boot: Callable[[str], object] | None = None,
    clients: Sequence[str] = (),
    faults_max: int = 2,
    by_s: float = 2.0,
    lasts_s_max: float = 8.0,
    notes: Sequence[str] = (),
) -> list[Fault]:
    """Draw a profile of the links and up to `faults_max` faults of servers and clients; the faults.

    Call it inside the run, once the hosts are booted; the clients are all hosts but the servers unless
    they are named. Messages are late by up to 0.3 s, on all links alike or on each direction of them by a
    measure of its own, reads are torn and writes short, or not. Each
    fault strikes within `by_s` seconds from now, early moments rather than late ones, or at one of the
    first eight notes of a kind among `notes`, and then whoever made it. It is over after 0.05 s to
    `lasts_s_max`; then `boot` is called with the name of a host that died. Without `boot` none dies.
    """
    servers = [server] if isinstance(server, str) else list(server)
    others = list(clients) or [name for name in world.host_names if name not in servers]
    if not servers or not others:
        raise ValueError("stress needs a server, and clients: boot them before, or name them")
    choices = world.choices
    _delay(choices, network, servers, others)
    torn, short = PIECES[choices.below(len(PIECES), "stress: pieces")]
    network.tear_one_in, network.short_one_in = (
        torn or network.tear_one_in,
        short or network.short_one_in,
    )
    lasts = [each for each in LASTS_S if each <= lasts_s_max] or [lasts_s_max]
    kinds = KINDS if boot is not None else KINDS[2:]
    plan = []
    for number in range(1, faults_max + 1):
        kind = choices.below(len(kinds) + 1, f"fault {number}")
        if kind:
            fault = _drawn(choices, f"fault {number}", kinds[kind - 1], servers, others)
            _timed(choices, f"fault {number}", fault, by_s, lasts, notes)
            fault["at_s"] += 0.0 if "after_note" in fault else world.current_time()
            plan.append(fault)
    arm(world, network, plan, boot=boot)
    return plan


def _delay(
    choices: Choices, network: Network, servers: Sequence[str], others: Sequence[str]
) -> None:
    """One profile for all links, or one for each direction between a server and whoever is no server."""
    profile = choices.below(len(JITTERS_S) + 1, "stress: delays")
    if profile < len(JITTERS_S):
        links = [("*", "*", profile)] if profile else []
    else:
        pairs = [pair for a in servers for b in others for pair in ((a, b), (b, a))]
        links = [
            (*pair, choices.below(len(JITTERS_S), f"stress: delays from {pair[0]} to {pair[1]}"))
            for pair in pairs
        ]
    for source, target, jitter in links:
        network.links.shape(source, target, jitter_s=JITTERS_S[jitter])


def _drawn(choices: Choices, label: str, do: Kind, servers: list[str], others: list[str]) -> Fault:
    """What breaks, and where: of a link one end is a server."""
    if do in ON_HOSTS:
        hosts = servers + others
        return {
            "do": do,
            "host": hosts[choices.below(len(hosts), f"{label}: {do} of host")],
            "at_s": 0,
        }
    server = servers[choices.below(len(servers), f"{label}: {do} of server")]
    peers = [*others, *(name for name in servers if name != server)]
    peer = peers[choices.below(len(peers), f"{label}: {do} with")]
    if do == "cut_one_way" and choices.chance(2, f"{label}: towards the server"):
        server, peer = peer, server
    return {"do": do, "host": server, "to": peer, "at_s": 0}


def _timed(
    choices: Choices,
    label: str,
    fault: Fault,
    by_s: float,
    lasts: Sequence[float],
    notes: Sequence[str],
) -> None:
    """When it strikes, and for how long."""
    note = choices.below(len(notes) + 1, f"{label}: at note")
    if note:
        nth = 1 + choices.below(NOTES_MAX, f"{label}: at which {notes[note - 1]}")
        fault["after_note"] = f"{notes[note - 1]}#{nth}"
        if "to" not in fault:
            del fault["host"]
            fault["on"] = "note"
    else:
        fault["at_s"] = (
            by_s * (choices.below(MOMENTS, f"{label}: {fault['do']} when") / (MOMENTS - 1)) ** 2
        )
    if fault["do"] not in ("reset", "finish"):
        fault["for_s"] = lasts[choices.below(len(lasts), f"{label}: {fault['do']} for how long")]


async def recovers(ask: Callable[[], Awaitable[Answer]], *, within_s: float) -> Answer:
    """Wait until every fault that `stress` and `arm` planned is over; then a request must be answered.

    Calls `ask()` until it returns, at least once, and again after a time if it raises; its answer is
    returned. It runs in the task that calls this, so on a client's own host, with the client's own
    pool. A `Violation` ("recovers") if there is no answer within `within_s` virtual seconds, with the
    last error, or the lines in which the request waited. What `ask` asserts is raised as it is.
    Raises `ValueError` if a fault of the plan is never over.
    """
    world = WORLD.get()
    if world is None:
        raise RuntimeError("recovers is for the inside of World.run")
    began_s, ended = trio.current_time(), "it was not asked"
    while True:
        calm_s = max(began_s, world.calm_at_s)
        if calm_s == math.inf:
            raise ValueError("a fault of the plan is never over: give it for_s, or leave this out")
        await trio.sleep_until(calm_s)
        with trio.move_on_at(calm_s + within_s):
            while True:
                try:
                    answer = await ask()
                except trio.Cancelled as given_up:
                    ended = f"it waited in {_places(given_up)}"
                    raise
                except Exception as error:
                    if _is_finding(error):
                        raise
                    ended = f"at last {type(error).__name__}: {error}"
                else:
                    world.note("recovered", after_s=trio.current_time() - calm_s)
                    return answer
                await trio.sleep(PAUSE_S)
        # A fault at a note may have struck meanwhile.
        if world.calm_at_s <= calm_s:
            text = f"no answer within {within_s:g} s after all was whole again, at {calm_s:g} s"
            raise Violation("recovers", f"{text}\n{ended}")


def _places(error: BaseException) -> str:
    """The innermost lines of code that are neither trio's nor ours, in words."""
    packages = [Path(str(module.__file__)).parent for module in (trio, outcome)]
    frames = [
        f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not {*Path(frame.filename).parents} & {*packages}
    ]
    return " < ".join(reversed(frames[-3:])) or "trio"


async def gives_up_and_asks_again(
    ask: Callable[[], Awaitable[Answer]],
    *,
    patience_s: float,
    within_s: float,
    times: int = 4,
) -> Answer:
    """Give `ask()` up after a drawn time of at most `patience_s`, `times` times; then it `recovers`.

    Each time is a decision, and 0 means that it is not asked. What a request raises that is given up
    is nobody's concern, but for what it asserts. A client that loses something by each (a place in its
    pool, a lock, an answer for somebody else) is found when it asks again.
    """
    world = WORLD.get()
    if world is None:
        raise RuntimeError("gives_up_and_asks_again is for the inside of World.run")
    for _ in range(times):
        patience = world.choices.below(PATIENCES, "gives up after")
        if not patience:
            continue
        with trio.move_on_after(patience_s * patience / (PATIENCES - 1)):
            try:
                await ask()
            except Exception as error:
                if _is_finding(error):
                    raise
    return await recovers(ask, within_s=within_s)


def _is_finding(error: Exception) -> bool:
    return any(isinstance(each, AssertionError) for each in leaves(error))
