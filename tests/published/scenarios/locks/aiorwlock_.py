"""aiorwlock: readers and writers of one lock, some of whom give up; nobody waits where only readers hold it."""

import asyncio

import aiorwlock
import trio_asyncio


async def locks(world, network):
    state = {"readers": 0, "writers": 0, "waiting_readers": 0, "waiting_writers": 0}
    world.always("a writer is alone", lambda: state["writers"] + bool(state["readers"]) <= 1)

    async def user(lock, name):
        kind = world.choices.below(2, f"{name} writes")
        what = "writers" if kind else "readers"
        for _ in range(2):
            await asyncio.sleep(0.01 * world.choices.below(8, f"{name} starts"))
            side = lock.writer if kind else lock.reader
            patience = (None, 0.005, 0.02)[world.choices.below(3, f"{name} patience")]
            state["waiting_" + what] += 1
            try:
                async with asyncio.timeout(patience):
                    await side.acquire()
            except TimeoutError:
                continue
            finally:
                state["waiting_" + what] -= 1
            state[what] += 1
            await asyncio.sleep(0.01 * world.choices.below(8, f"{name} holds"))
            state[what] -= 1
            side.release()

    async def host():
        async with trio_asyncio.open_loop():

            async def everybody():
                lock = aiorwlock.RWLock()
                await asyncio.gather(*(user(lock, f"user{n}") for n in range(5)))

            await trio_asyncio.aio_as_trio(everybody)()

    def only_readers_and_one_waits():
        s = state
        return s["waiting_readers"] and not s["writers"] and not s["waiting_writers"]

    world.leads_to(
        "a reader waits for writers only",
        only_readers_and_one_waits,
        lambda: not only_readers_and_one_waits(),
        within_s=0.001,
    )
    await world.boot("users", host).ended.wait()
