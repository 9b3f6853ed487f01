"""Readers and writers of one lock, some of whom give up: a reader does not wait for readers."""

import trio
from tricycle import RWLock

from trinamo.sim import World


def tricycle_readers_go_on(choices):
    world, lock = World(choices, policy="step"), RWLock()

    def is_stuck():
        now = lock.statistics()
        return now.locked == "read" and now.readers_waiting and not now.writers_waiting

    async def user(is_writer):
        for _ in range(3):
            await trio.sleep(0.01 * choices.below(8, "pause"))
            with trio.move_on_after(0.02 * choices.below(4, "patience")):
                async with lock.write_locked() if is_writer else lock.read_locked():
                    assert len(lock.statistics().readers) == 0 or not is_writer
                    await trio.sleep(0.01 * choices.below(8, "held"))

    async def users():
        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(user, number < 2)

    async def main():
        await world.boot("host", users).ended.wait()

    world.always("readers wait for writers only", lambda: not is_stuck())
    world.run(main)
