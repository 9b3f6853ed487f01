"""aiojobs: a scheduler of two jobs at once; some jobs are closed while they wait or run."""

import asyncio

import aiojobs
import trio_asyncio

from trinamo.sim import Violation


async def limit_is_kept(world, network):
    running, done = set(), set()
    world.always("at most two jobs run", lambda: len(running) <= 2)

    async def job(number):
        running.add(number)
        try:
            await asyncio.sleep(0.01 * (1 + world.choices.below(5, "works")))
            done.add(number)
        finally:
            running.discard(number)

    async def use():
        scheduler = aiojobs.Scheduler(limit=2)
        jobs = []
        for number in range(8):
            await asyncio.sleep(0.005 * world.choices.below(4, "pause"))
            jobs.append(await scheduler.spawn(job(number)))
            if world.choices.chance(3, "closes one"):
                await jobs[world.choices.below(len(jobs), "which")].close()
        await asyncio.sleep(5)
        if scheduler.active_count or scheduler.pending_count:
            raise Violation("all jobs end", f"{scheduler}, {running}, {scheduler.pending_count}")

    async def host():
        async with trio_asyncio.open_loop():
            await trio_asyncio.aio_as_trio(use)()

    await world.boot("users", host).ended.wait()
