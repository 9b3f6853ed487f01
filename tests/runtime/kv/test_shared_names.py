"""How processes come to name their KV blocks alike: by a secret, or by a salt in the control plane."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing

from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import ControlPlaneError
from trinamo.runtime.kv.events import KV_NAMES_PREFIX, share_names
from trinamo.runtime.planes import ControlPlane
from trinamo.transports.memory.control import MemoryControlPlane
from trinamo.transports.memory.store import MemoryStore

SECRET = b"what the processes of one cluster know"


async def mark(control: ControlPlane, seed: int, secret: bytes = b"", namespace: str = "a") -> str:
    env = RealEnv()
    env.rng = random.Random(seed)
    return (await share_names(control, env, secret, namespace)).mark


async def test_a_secret_is_enough_to_agree() -> None:
    plane = MemoryControlPlane()
    plane.faults.cut_link()
    first = await mark(plane, 1, SECRET)
    assert first == await mark(plane, 2, SECRET)
    assert first != await mark(plane, 1, SECRET + b"!")
    assert first != await mark(plane, 1, SECRET, "b")


async def test_without_one_all_who_begin_at_once_agree_by_the_store() -> None:
    store, marks = MemoryStore(), list[str]()

    async def begin(seed: int) -> None:
        plane = MemoryControlPlane(store)
        plane.faults.delay_s = seed % 3 / 100
        marks.append(await mark(plane, seed))

    async with trio.open_nursery() as nursery:
        for seed in range(8):
            nursery.start_soon(begin, seed)
    assert len(marks) == 8
    assert len(set(marks)) == 1
    later = MemoryControlPlane(store)
    assert marks[0] == await mark(later, 9)
    assert marks[0] != await mark(later, 9, namespace="b")
    # For good: under no lease.
    entry = await later.get(f"{KV_NAMES_PREFIX}a")
    assert entry is not None
    assert (len(entry.value), entry.lease_id) == (16, 0)


async def test_a_store_that_is_away_is_waited_for(autojump_clock: trio.testing.MockClock) -> None:
    """A draw of which nothing is known is no reason to have two."""
    store, marks = MemoryStore(), list[str]()
    plane = MemoryControlPlane(store)
    plane.faults.cut_link()

    async def begin() -> None:
        marks.append(await mark(plane, 1))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(begin)
        await trio.sleep(5)
        assert not marks
        plane.faults.lose_replies()
        plane.faults.mend_link()
    assert marks == [await mark(MemoryControlPlane(store), 2)]


async def test_where_the_store_refuses_everybody_has_names_of_its_own() -> None:
    class Refusing(MemoryControlPlane):
        async def get(self, key: str) -> None:
            raise ControlPlaneError(f"{key}: permission denied")

    assert await mark(Refusing(), 1) != await mark(Refusing(), 2)


@pytest.mark.parametrize("secret", [b"", SECRET])
async def test_the_same_dice_and_secret_give_the_same_names(secret: bytes) -> None:
    """As a simulated run has them."""
    assert await mark(MemoryControlPlane(), 1, secret) == await mark(
        MemoryControlPlane(), 1, secret
    )
