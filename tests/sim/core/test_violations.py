"""A broken rule ends a run as itself: `pytest.raises(Violation)` and `except Violation` match."""

from __future__ import annotations

import pytest
import trio

from trinamo.sim import SeedChoices, Violation, World


async def _breaks_late() -> None:
    try:
        await trio.sleep_forever()
    finally:
        raise KeyError("while it was cancelled")


async def _breaks_a_rule() -> None:
    await trio.sleep(0.1)
    raise Violation("one leader", "there are two")


async def _in_two_nurseries() -> None:
    async with trio.open_nursery() as outer:
        outer.start_soon(_breaks_late)
        async with trio.open_nursery() as inner:
            inner.start_soon(_breaks_late)
            inner.start_soon(_breaks_a_rule)


@pytest.mark.parametrize("is_on_a_host", [True, False])
def test_a_violation_arrives_as_itself_out_of_nurseries_and_other_errors(
    is_on_a_host: bool,
) -> None:
    world = World(SeedChoices(0))

    async def main() -> None:
        if is_on_a_host:
            await world.boot("server", _in_two_nurseries).ended.wait()
        else:
            await _in_two_nurseries()

    with pytest.raises(Violation, match="one leader: there are two"):
        world.run(main)


def test_a_violation_comes_before_an_error_of_the_same_moment() -> None:
    world = World(SeedChoices(0))

    async def main() -> None:
        raise ExceptionGroup("both", [KeyError("first"), Violation("rule", "second")])

    with pytest.raises(Violation, match="rule: second"):
        world.run(main)
