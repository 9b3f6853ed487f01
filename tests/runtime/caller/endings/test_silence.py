"""A request over which one worker after the other falls silent: it may be what blocks them."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
import trio

from tests.runtime.caller.migration.test_migration import REQUEST, Taken, policy
from tests.runtime.endpoints import Cluster, open_cluster
from trinamo.runtime.caller.client import Client
from trinamo.runtime.caller.migration import MigratingAnswer
from trinamo.runtime.context import Context
from trinamo.runtime.errors import DisconnectedError, SilentError
from trinamo.runtime.protocol.openai.generate import Delta, GenerateRequest

WORKERS = 5


def end_all(client: Client, error: DisconnectedError) -> None:
    """As the router does when it finds that a worker has gone, or says nothing."""
    for record in client.router._known:
        for request in [*record.requests]:
            request.fail(error)


async def run(cluster: Cluster, plan: list[tuple[bool, type[DisconnectedError]]]) -> int:
    """Lose a request as planned, before or behind its first item; how many workers had it."""
    held = 0

    async def hold(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        nonlocal held
        held += 1
        if plan[held - 1][0]:
            yield Delta("a", [1])
        await trio.sleep_forever()

    for number in range(WORKERS):
        await cluster.serve(str(number), hold, request_type=GenerateRequest)
    client = await cluster.client(attempts_max=WORKERS)
    taken, lost = Taken(), plan[-1][1]
    answer = MigratingAnswer(client, REQUEST, Context("1"), taken, policy(), can_resume=True)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def ask() -> None:
            with pytest.raises(DisconnectedError) as failed:
                await answer.run()
            assert type(failed.value) is lost

        for count, (_, error) in enumerate(plan, start=1):
            expected = count, sum(is_begun for is_begun, _ in plan[:count])
            with trio.fail_after(120):
                while (held, len(taken.deltas)) != expected:
                    await trio.sleep(0.002)
            end_all(client, error("it has gone"))
    return held


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
async def test_no_third_worker_gets_a_request_over_which_two_fell_silent(
    first: bool, second: bool
) -> None:
    """Counted together, before the first item of an answer and behind it."""
    async with open_cluster() as cluster:
        assert await run(cluster, [(first, SilentError), (second, SilentError)]) == 2


async def test_workers_that_died_do_not_count() -> None:
    """As often as `router.migrations_max` says, three times, and between them one that was silent."""
    died, silent = (True, DisconnectedError), (True, SilentError)
    async with open_cluster() as cluster:
        assert await run(cluster, [died, silent, died, died]) == 4
