"""Two-phase commit with logs on disks, and what one missing sync does to it.

Run it: `trinamo sim swarm examples/protocols/two_phase_commit.py::forgetful --seeds 0..99`.
The explanation is in `two_phase_commit.md`.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import trio
from messages import NO_ANSWER, append, ask, lines, serve

from trinamo.points import note
from trinamo.sim import Choices, Network, Violation, World

PORT = 7200
COORDINATOR, PARTICIPANTS = "c", ("p1", "p2")
LOG = Path("log")


class Coordinator:
    """Decides each transaction, and tells whoever asks later."""

    def __init__(self, *, is_synced: bool) -> None:
        self.is_synced = is_synced
        self.deciding = 0

    async def run(self) -> None:
        begun = [int(line.split()[1]) for line in lines(LOG) if line.startswith("begin")]
        async with trio.open_nursery() as nursery:
            await nursery.start(serve, PORT, self.answer)
            # A transaction that was begun before a crash is not gone on with: it is decided, or aborted.
            for number in range(max(begun, default=0) + 1, 5):
                await self.decide(number)
                await trio.sleep(0.2)

    async def answer(self, number: int) -> str:
        """The outcome of a transaction, for a participant in doubt."""
        if f"commit {number}" in lines(LOG):
            return "commit"
        return "undecided" if number == self.deciding else "abort"

    async def decide(self, number: int) -> None:
        self.deciding = number
        append(LOG, f"begin {number}")
        votes = await self.tell_all("prepare", number)
        outcome = "commit" if votes == [True, True] else "abort"
        if outcome == "commit":
            # From here on there is no way back, if this line stays.
            append(LOG, f"commit {number}", is_synced=self.is_synced)
        self.deciding = 0
        note("decision", number=number, outcome=outcome)
        await self.tell_all(outcome, number)

    async def tell_all(self, what: str, number: int) -> list[bool]:
        answers = []

        async def tell(name: str) -> None:
            # Who does not hear the outcome asks for it.
            with suppress(*NO_ANSWER):
                answers.append(await ask(name, PORT, what=what, number=number))

        with trio.move_on_after(1):
            async with trio.open_nursery() as nursery:
                for name in PARTICIPANTS:
                    nursery.start_soon(tell, name)
        return answers


class Participant:
    """Promises to do what is decided, and then does."""

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(serve, PORT, self.answer)
            while True:
                await trio.sleep(0.5)
                for number in self.in_doubt():
                    await self.inquire(number)

    def in_doubt(self) -> list[int]:
        known = [line.split() for line in lines(LOG)]
        ended = {number for what, number in known if what != "prepare"}
        return [int(n) for what, n in known if what == "prepare" and n not in ended]

    async def inquire(self, number: int) -> None:
        try:
            outcome = await ask(COORDINATOR, PORT, number=number)
        except NO_ANSWER:
            return
        if outcome != "undecided":
            await self.answer(outcome, number)

    async def answer(self, what: str, number: int) -> bool:
        known = lines(LOG)
        if f"commit {number}" in known or f"abort {number}" in known:
            return what != "prepare"
        append(LOG, f"{what} {number}")
        if what != "prepare":
            note("outcome", number=number, what=what)
        return True


def forgetful(choices: Choices) -> None:
    """The coordinator tells the outcome before it is on the platter."""
    play(choices, is_synced=False)


def careful(choices: Choices) -> None:
    """The coordinator syncs the outcome first."""
    play(choices, is_synced=True)


def play(choices: Choices, *, is_synced: bool) -> None:
    world = World(choices, virtual_s_max=120)
    network = Network(world)

    def boot(name: str) -> None:
        made: Any = Coordinator(is_synced=is_synced) if name == COORDINATOR else Participant()
        world.boot(name, made.run)

    async def main() -> None:
        for name in (*PARTICIPANTS, COORDINATOR):
            boot(name)
        nth = 1 + choices.below(4, "which decision")
        if cut := choices.below(3, "who is cut off then"):
            world.after_note("decision", nth, network.cut, COORDINATOR, PARTICIPANTS[cut - 1])
        if choices.chance(2, "the coordinator's power fails"):
            world.after_note("decision", nth, world.power_off, COORDINATOR, delay_s=0.1)
            world.after_note("decision", nth, boot, COORDINATOR, delay_s=1.0)
        await trio.sleep(10)
        for name in PARTICIPANTS:
            network.heal(COORDINATOR, name)
        await trio.sleep(10)

    world.run(main)
    outcomes: dict[int, set[str]] = {}
    for row in world.trace.rows:
        if row.kind == "outcome":
            outcomes.setdefault(row.field("number"), set()).add(row.field("what"))
    split = [number for number, found in outcomes.items() if len(found) > 1]
    if split:
        raise Violation("all or none", f"transaction {split[0]} is committed here, aborted there")
