from __future__ import annotations

import trio

from trinamo.runtime.env import Env
from trinamo.sim import SeedChoices, SimEnv, World


def test_the_simulated_env_tells_virtual_time_with_the_hosts_skew() -> None:
    world = World(SeedChoices(1))
    env: Env = SimEnv(world, "a")
    seen: list[tuple[float, float]] = []

    async def look() -> None:
        await trio.sleep(2)
        seen.append((env.clock.now(), env.clock.wall()))

    async def main() -> None:
        world.skew("a", 60.0)
        await world.boot("a", look).ended.wait()

    world.run(main)
    assert seen == [(2.0, 1_700_000_062.0)]


def test_each_env_has_dice_of_its_own() -> None:
    world = World(SeedChoices(1))
    again = World(SeedChoices(1))
    assert SimEnv(world, "a").rng.random() != SimEnv(world, "b").rng.random()
    assert SimEnv(world, "a").rng.random() == SimEnv(again, "a").rng.random()


def test_notes_become_rows_on_the_host_that_made_them() -> None:
    world = World(SeedChoices(1), trace_steps=False)
    env = SimEnv(world, "a")

    async def speak() -> None:
        env.note("stream.token", index=3)

    async def main() -> None:
        await world.boot("a", speak).ended.wait()

    world.run(main)
    (row,) = world.trace.of_kind("stream.token")
    assert (row.host, row.field("index")) == ("a.1", 3)
