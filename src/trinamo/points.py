"""Points of a program that its simulated runs know of, and that cost nothing in real life.

    from trinamo.points import note, reached, sometimes

A program says at them what happened (`note`), what some run must come to (`reached`), where it may be
unlucky (`sometimes`), and where a scenario may hold it up (`barrier`). Inside `World.run` they find
the world by themselves; outside they do nothing, so a protocol needs no handle on its simulator.
This module imports nothing but the standard library's context variables.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .sim.core.world import World

WORLD: Final[ContextVar[Any]] = ContextVar("trinamo_world", default=None)
"""The `World` that runs, or None; `World.run` sets it."""


def note(kind: str, /, **fields: Any) -> None:
    """Report a fact to the run's trace, its checkers and the faults that wait for it; see `World.note`."""
    world: World | None = WORLD.get()
    if world is not None:
        world.note(kind, **fields)


def reached(label: str) -> None:
    """Note that this point was reached, under `label` as the kind.

    A label that stands in the code as a text and that no run of a search reaches is told of: it was
    not tested.
    """
    note(label)


def sometimes(label: str, one_in: int = 2) -> bool:
    """Whether the unlucky thing happens here: True in about one of `one_in` cases, as the run decides.

    Always False outside a run. The decision is recorded under `label`, and False is the dull answer; a
    True is noted, with `label` as the kind.
    """
    world: World | None = WORLD.get()
    if world is None or world.is_unwinding or not world.choices.chance(one_in, label):
        return False
    world.note(label)
    return True


async def barrier(label: str) -> None:
    """Note that this point was reached, and wait there for as long as the scenario holds it (`World.hold`).

    Without a hold it returns at once, and is no checkpoint.
    """
    world: World | None = WORLD.get()
    if world is not None:
        world.note(label)
        gate = world.gates.get(label)
        if gate is not None:
            await gate.wait()
