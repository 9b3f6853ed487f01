"""What looks like a mistake of whoever wrote the scenario, in sentences: hints, no findings.

A healthy scenario gets none. What this module does not do: judge a run, or read the scenario's code
(`own/source.py` does).
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..core.host import HostState
from ..core.world import World
from ..errors import EndlessStep, Escape, SimulationError, Violation

FAULTS_SAID_MAX = 3
HERE = Path(__file__).resolve().parents[1]
_NAMES_A_SOCKET = re.compile("socket|getaddrinfo")


def hints_of(world: World, error: BaseException | None) -> list[str]:
    """The hints for one run that has ended, with `error` or without."""
    hints = [*_raised(world, error)]
    for adviser in world.advisers:
        hints += adviser()
    hints += _strangers(world)
    if error is None:
        if not hints and world.dials and not world.answers:
            hints.append(
                "not one byte came back on any connection, and there were attempts: if clients wait"
                " for answers here, every one of them failed, and what they do with errors hides it"
            )
        hints += [*_never_struck(world), *_too_short(world)]
        hints += [hint for checker in world.checkers for hint in checker.hints()]
    return hints


def varying(world: World) -> tuple[str, ...]:
    """What can go wrong in a run: the labels of its decisions, and its faults."""
    return tuple(sorted({choice.label for choice in world.choices.record} | {*world.struck}))


def followed(world: World) -> tuple[str, ...]:
    """The kinds of notes that came after the first fault."""
    if not world.struck:
        return ()
    return tuple(sorted(world.noted - world.noted_in_peace))


def broke_off(world: World) -> tuple[str, ...]:
    """The kinds that came again and again before the first fault, and never after it."""
    peace = world.noted_in_peace
    return tuple(
        kind for kind in sorted(peace) if peace[kind] > 1 and world.noted[kind] == peace[kind]
    )


def nothing_varies(varying: Iterable[str]) -> str:
    """A hint for runs in which only so much can go wrong; empty if that is enough."""
    kinds = set(varying)
    if not kinds:
        return (
            "nothing can go wrong in this run: no fault strikes, no message is late, no decision is"
            " drawn; give the network jitter_s, draw from choices, cut a link, kill a host"
        )
    if kinds <= {"jitter", "tear", "tear size"}:
        return (
            "only the delays of messages vary, and how much a read takes of them, and no fault"
            " strikes: make jitter_s as long as what"
            " may overlap, and let choices decide when to cut a link, kill or pause a host"
        )
    return ""


def _raised(world: World, error: BaseException | None) -> Iterator[str]:
    """Where an error came from that is no finding about a rule."""
    if isinstance(error, Escape) and not world.on_start and _NAMES_A_SOCKET.search(str(error)):
        yield (
            "this world has no network, so the call went for the real one: take `network` as a"
            " parameter, or make Network(world) before the run"
        )
    if error is None or isinstance(error, (Violation, SimulationError, Escape, EndlessStep)):
        return
    kind, place = type(error).__name__, _place(error)
    host, fallen = world.fallen or ("", None)
    if fallen is error:
        yield (
            f"{kind} left the main function of {host}{place}, and that ends the run, as it ends a"
            " process: catch in its handlers what a peer or a fault can cause (OSError,"
            " trio.BrokenResourceError)"
        )
    elif place:
        yield f"{kind} was raised by the scenario itself{place}"


def _place(error: BaseException) -> str:
    """The innermost line that is neither ours nor a library's, in words."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if "site-packages" not in path.parts and not path.resolve().is_relative_to(HERE):
            return f" ({frame.name}, {path.name}, line {frame.lineno})"
    return ""


def _strangers(world: World) -> Iterator[str]:
    """Faults that were aimed at hosts that do not exist."""
    booted = [name for name in world.host_names if world.host(name).generation]
    for name, fault in world.aimed.items():
        if name not in booted and booted:
            yield (
                f"a fault ({fault}) was aimed at {name!r}, and no host of that name was ever booted;"
                f" there were {', '.join(booted)}"
            )


def _never_struck(world: World) -> Iterator[str]:
    for at_s, fault, args in world.never_struck[:FAULTS_SAID_MAX]:
        what = f"{fault}({', '.join(repr(each) for each in args)})"
        yield (
            f"{what} never struck: it was planned for {at_s:g} s, and the run ended at"
            f" {world.ended_s:g} s"
        )


def _too_short(world: World) -> Iterator[str]:
    running = [name for name in world.host_names if world.host(name).state is HostState.UP]
    if world.ended_s == 0 and running:
        yield (
            f"the run ended at 0 s, with {', '.join(running)} still at work: main must wait for them,"
            " as in `await host.ended.wait()`, where host is what world.boot returns"
        )
