"""A log on three disks, of which two must answer, and replicas that answer too early.

Run it: `trinamo sim swarm examples/protocols/replicated_log.py::hasty --seeds 0..99`.
The explanation is in `replicated_log.md`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import trio
from messages import NO_ANSWER, append, ask, lines, serve

from trinamo.points import note
from trinamo.sim import Choices, Network, Violation, World

PORT = 7400
REPLICAS, MAJORITY = ("r1", "r2", "r3"), 2
LOG = Path("log")


async def answer(*, is_synced: bool, entry: int | None = None) -> list[int]:
    """The entries of this replica; one that is given is added before."""
    if entry is not None and str(entry) not in lines(LOG):
        append(LOG, str(entry), is_synced=is_synced)
    return [int(line) for line in lines(LOG)]


async def ask_majority(**question: Any) -> list[list[int]]:
    """The answers of the first two replicas that answer within a second; fewer if they do not."""
    answers: list[list[int]] = []

    async def ask_one(replica: str) -> None:
        try:
            answers.append(await ask(replica, PORT, **question))
        except NO_ANSWER:
            return
        if len(answers) == MAJORITY:
            nursery.cancel_scope.cancel()

    with trio.move_on_after(1):
        async with trio.open_nursery() as nursery:
            for replica in REPLICAS:
                nursery.start_soon(ask_one, replica)
    return answers


async def write() -> None:
    """Add entries 1 to 5, each until two replicas have it; such an entry is told, and for ever."""
    for entry in range(1, 6):
        while len(await ask_majority(entry=entry)) < MAJORITY:
            await trio.sleep(0.1)
        note("acknowledged", entry=entry)


async def read() -> None:
    """What two replicas have together is the log: any two have what was told."""
    while len(answers := await ask_majority()) < MAJORITY:
        await trio.sleep(0.1)
    note("read", entries=tuple(sorted({entry for entries in answers for entry in entries})))


def hasty(choices: Choices) -> None:
    """Replicas answer when the entry is in the file."""
    play(choices, is_synced=False)


def synced(choices: Choices) -> None:
    """Replicas answer when the entry is on the platter."""
    play(choices, is_synced=True)


def play(choices: Choices, *, is_synced: bool) -> None:
    world = World(choices, virtual_s_max=120)
    network = Network(world)

    def boot(name: str) -> None:
        world.boot(name, serve, PORT, partial(answer, is_synced=is_synced))

    async def main() -> None:
        for name in REPLICAS:
            boot(name)
        if cut := choices.below(4, "who is cut off from the writer"):
            network.cut("writer", REPLICAS[cut - 1])
        if nth := choices.below(6, "after which entry the power fails"):
            victim = REPLICAS[choices.below(3, "whose power")]
            world.after_note("acknowledged", nth, world.power_off, victim)
            world.after_note("acknowledged", nth, boot, victim, delay_s=0.5)
        await world.boot("writer", write).ended.wait()
        if missing := choices.below(4, "who is cut off from the reader"):
            network.cut("reader", REPLICAS[missing - 1])
        await trio.sleep(2)
        await world.boot("reader", read).ended.wait()

    world.run(main)
    rows = world.trace.rows
    told = {row.field("entry") for row in rows if row.kind == "acknowledged"}
    seen = {entry for row in rows if row.kind == "read" for entry in row.field("entries")}
    if lost := told - seen:
        raise Violation("what was told is kept", f"entry {min(lost)} is gone")
