"""A lock service with leases and fencing tokens, and a shelf that does not look at the tokens.

Run it: `trinamo sim swarm examples/protocols/lock_service.py::trusting --seeds 0..99`.
The explanation is in `lock_service.md`.
"""

from __future__ import annotations

from pathlib import Path

import trio
from messages import NO_ANSWER, append, ask, lines, serve

from trinamo.points import note
from trinamo.sim import Choices, Network, Violation, World

PORT, LEASE_S = 7300, 1.0
LOCKS, SHELF, CLIENTS = "locks", "shelf", ("c1", "c2")
TOKENS = Path("tokens")


class Locks:
    """Grants the lock for a second, each time with a larger token; its disk remembers the largest."""

    def __init__(self) -> None:
        # Whoever had it before a restart may have it for a lease's time still.
        self.free_s = trio.current_time() + LEASE_S

    async def answer(self, client: str) -> int:
        """A token, or 0 if somebody else has the lock."""
        now_s = trio.current_time()
        if now_s < self.free_s:
            return 0
        self.free_s = now_s + LEASE_S
        token = len(lines(TOKENS)) + 1
        append(TOKENS, f"{token} {client}")
        return token


class Shelf:
    """What the lock is for: a value that is read, and written by whoever has the lock."""

    def __init__(self, *, is_fenced: bool) -> None:
        self.is_fenced = is_fenced
        self.value = self.token = 0

    async def answer(self, token: int, value: int | None = None) -> int | None:
        """The value; with one given, it is put there. None for a token that is out of date."""
        if self.is_fenced and token < self.token:
            return None
        self.token = max(self.token, token)
        if value is not None:
            self.value = value
            note("put", value=value, token=token)
        return self.value


async def count(client: str) -> None:
    """Take the lock, read, add one, write; again and again."""
    while True:
        try:
            token = await ask(LOCKS, PORT, client=client)
            if token:
                note("granted", client=client, token=token)
                value = await ask(SHELF, PORT, token=token)
                await trio.sleep(0.2)  # Work that needs the lock.
                if value is not None:
                    await ask(SHELF, PORT, token=token, value=value + 1)
        except NO_ANSWER:
            pass
        await trio.sleep(0.3)


def trusting(choices: Choices) -> None:
    """The shelf believes that whoever writes has the lock."""
    play(choices, is_fenced=False)


def fenced(choices: Choices) -> None:
    """The shelf takes no token that is smaller than one it has seen."""
    play(choices, is_fenced=True)


def play(choices: Choices, *, is_fenced: bool) -> None:
    world = World(choices, virtual_s_max=120)
    Network(world)

    async def locks() -> None:
        await serve(PORT, Locks().answer)

    async def main() -> None:
        world.boot(LOCKS, locks)
        world.boot(SHELF, serve, PORT, Shelf(is_fenced=is_fenced).answer)
        for client in CLIENTS:
            world.boot(client, count, client)
        if nth := choices.below(4, "which grant its holder sleeps after"):
            world.after_note("granted", nth, world.pause, on="note", delay_s=0.1)
            world.after_note("granted", nth, world.resume, on="note", delay_s=3.0)
        if nth := choices.below(4, "which grant the power fails after"):
            world.after_note("granted", nth, world.power_off, LOCKS)
            world.after_note("granted", nth, world.boot, LOCKS, locks, delay_s=0.1)
        await trio.sleep(8)

    world.run(main)
    last = 0
    for row in world.trace.rows:
        if row.kind == "put":
            if row.field("value") <= last:
                raise Violation("counts are not lost", f"{row.field('value')} was put after {last}")
            last = row.field("value")
