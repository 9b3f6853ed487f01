"""What a power cut may leave of files, whatever was written, synced, renamed and decided before."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import given, strategies as st

from trinamo.sim import Choices, World
from trinamo.sim.strategies import choices

appends = st.lists(
    st.one_of(st.binary(min_size=1, max_size=5000), st.just("sync")), min_size=1, max_size=12
)


def left_by(choices: Choices, play: Any) -> World:
    """The world after `play` ran on host a, the power failed, and a second life looked on."""
    world = World(choices)

    async def process() -> None:
        play()

    async def main() -> None:
        await world.boot("a", process).ended.wait()
        world.power_off("a")

    world.run(main)
    return world


def sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


@given(choices(decisions_max=32), appends)
def test_a_log_keeps_all_that_was_synced_and_of_the_rest_nothing_that_was_not_written(
    choices: Choices, steps: list[Any]
) -> None:
    """Its synced beginning is there exactly; behind it each byte is as written, or a hole's zero."""
    durable = len(b"".join(steps[: last_sync(steps)]))
    whole = b"".join(step for step in steps if step != "sync")

    def play() -> None:
        with open("log", "ab", buffering=0) as file:
            sync("/sim")
            for step in steps:
                os.fsync(file.fileno()) if step == "sync" else file.write(step)

    left = left_by(choices, play).host("a").disk.read_bytes("log")
    assert durable <= len(left) <= len(whole)
    assert left[:durable] == whole[:durable]
    assert all(here in (written, 0) for here, written in zip(left, whole, strict=False))


def last_sync(steps: list[Any]) -> int:
    """Takes the marks of syncs out of what comes before the last; how many writes that leaves."""
    if "sync" not in steps:
        return 0
    last = len(steps) - 1 - steps[::-1].index("sync")
    before = [step for step in steps[:last] if step != "sync"]
    steps[: last + 1] = [*before, "sync"]
    return len(before)


@given(
    choices(decisions_max=32), st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=9)
)
def test_a_file_that_is_replaced_as_the_books_say_is_always_a_version_that_was_acknowledged_or_newer(
    choices: Choices, versions: list[bytes]
) -> None:
    """Written aside, synced, renamed, folder synced: never torn, never gone, never older than told."""
    acknowledged: list[bytes] = []

    def play() -> None:
        for version in versions:
            with open("aside", "wb") as file:
                file.write(version)
                file.flush()
                os.fsync(file.fileno())
            os.replace("aside", "state")
            if world.choices.below(3, "stop before the folder is synced") == 1:
                return
            sync("/sim")
            acknowledged.append(version)

    world: Any = type("Early", (), {"choices": choices})
    disk = left_by(choices, play).host("a").disk
    newer = versions[max(0, len(acknowledged) - 1) :][:2]
    try:
        assert disk.read_bytes("state") in newer
    except FileNotFoundError:
        assert not acknowledged


@given(choices(decisions_max=64), st.lists(st.sampled_from(["x", "y", "d/x"]), max_size=20))
def test_a_second_cut_at_once_changes_nothing(choices: Choices, names: list[str]) -> None:
    """What survived is on the platter: what is read after one power cut is there after the next."""

    def play() -> None:
        os.makedirs("d")
        for number, name in enumerate(names):
            with open(name, "ab") as file:
                file.write(b"%d" % number)
            if number % 3 == 2:
                os.rename(name, f"{name}.{number}")

    world = World(choices)
    seen: list[object] = []

    async def process() -> None:
        play()

    async def looking() -> None:
        found = {}
        for at, _, files in os.walk("/sim"):
            for name in files:
                with open(f"{at}/{name}", "rb") as file:
                    found[f"{at}/{name}"] = file.read()
        seen.append(found)

    async def main() -> None:
        await world.boot("a", process).ended.wait()
        for _ in range(2):
            world.power_off("a")
            await world.boot("a", looking).ended.wait()

    world.run(main)
    assert seen[0] == seen[1]
