"""Who waits for a change is woken by the next one, and by no earlier one."""

from __future__ import annotations

import trio
import trio.testing

from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.sinks import Changes


async def test_a_change_wakes_all_who_wait_and_is_not_remembered() -> None:
    changes = Changes()
    woken: list[int] = []

    async def wait(number: int) -> None:
        await changes.wait()
        woken.append(number)

    changes.notify()
    async with open_nursery() as nursery:
        for number in (1, 2):
            nursery.start_soon(wait, number)
        await trio.testing.wait_all_tasks_blocked()
        assert woken == []
        changes.notify()
        nursery.start_soon(wait, 3)
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(woken) == [1, 2]
        changes.notify()
    assert sorted(woken) == [1, 2, 3]


async def test_one_who_gave_up_takes_no_change_from_the_others() -> None:
    changes = Changes()
    async with open_nursery() as nursery:
        with trio.move_on_after(0) as scope:
            await changes.wait()
        assert scope.cancelled_caught
        nursery.start_soon(changes.wait)
        await trio.testing.wait_all_tasks_blocked()
        changes.notify()
