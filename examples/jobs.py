"""Jobs that must be done: a work queue, its consumer, and what becomes of a job that cannot be done.

    python examples/jobs.py

Here the queue lives in the memory of this process; with `event_plane.backend: nats` it is kept in
JetStream, and every process of the cluster may put and take.
"""

from __future__ import annotations

import logging

import trio

from trinamo import Backoff, ConsumerLimits, Job, QueueLimits, load_config, open_runtime

MEMORY = {"control_plane.backend": "memory", "event_plane.backend": "memory"}
LIMITS = QueueLimits(attempts_max=2)
PACE = ConsumerLimits(jobs_max=1, backoff=Backoff(min_s=0.01, max_s=0.01))


async def divide(job: Job, number: int) -> None:
    print(f"{job.id}: 12 / {number} = {12 // number} (attempt {job.attempt})")


async def main() -> None:
    logging.disable()  # It would tell of the dead letter too.
    config = load_config(environ={}, overrides=MEMORY)
    async with (
        open_runtime(config) as runtime,
        runtime.queues.open("division", limits=LIMITS) as queue,
    ):
        for number in (3, 0, 4):
            await queue.put(f"by-{number}", str(number).encode())
        # The id is the job's: whoever is not sure that a put arrived says it again.
        print("by-3 again:", (await queue.put("by-3", b"3")).value)
        async with runtime.queues.consume(
            "division", divide, decode=int, queue_limits=LIMITS, limits=PACE
        ):
            while (await queue.statistics()).depth:
                await trio.sleep(0.01)
        for letter in await queue.dead_letters():
            print(f"{letter.id}: given up after {letter.attempts} attempts: {letter.reason}")


if __name__ == "__main__":
    trio.run(main)
