"""A step that never yields ends its run, by a timer of the process's own time."""

from __future__ import annotations

import math
import random
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import trio

from trinamo.sim import EndlessStep, Found, Network, SeedChoices, World, search

TICK = signal.SIGVTALRM


def _spin() -> None:
    while True:
        pass


async def _spin_in_server() -> None:
    await trio.sleep(1)
    _spin()


def test_a_busy_loop_ends_the_run_and_names_task_and_line() -> None:
    async def main() -> None:
        await world.boot("server", _spin_in_server).ended.wait()

    world = World(SeedChoices(0), step_cpu_s_max=0.1)
    with pytest.raises(EndlessStep) as caught:
        world.run(main)
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("server.1 server:main took 0.1 s of processor time in one step")
    assert "test_endless_steps.py:" in rest[0]
    assert rest[0].endswith("in _spin")
    assert rest[1].endswith("in _spin_in_server")
    assert world.ended_s == 1
    assert signal.getsignal(TICK) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


async def _wait_for_the_clock() -> None:
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        pass


async def _catch_everything() -> None:
    while True:
        with suppress(Exception):
            _spin()


async def _catch_even_more() -> None:
    caught = 0
    while caught < 3:
        try:
            _spin()
        except BaseException:  # noqa: BLE001 -- as careless code does
            caught += 1
    await trio.sleep(1)


async def _spin_in_thread() -> None:
    await trio.to_thread.run_sync(_spin)


async def _spin_at_the_end() -> None:
    try:
        await trio.sleep_forever()
    finally:
        _spin()


@pytest.mark.parametrize(
    "spins",
    [
        _wait_for_the_clock,
        _catch_everything,
        _catch_even_more,
        _spin_in_thread,
        _spin_at_the_end,
    ],
)
def test_it_ends_wherever_it_spins(spins: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        world.boot("host", spins)
        await trio.sleep(10)

    world = World(SeedChoices(0), step_cpu_s_max=0.1)
    with pytest.raises(EndlessStep, match=r"host\.1"):
        world.run(main)


def test_it_ends_in_an_event() -> None:
    async def main() -> None:
        world.after(1, _spin)
        await trio.sleep(10)

    world = World(SeedChoices(0), step_cpu_s_max=0.1)
    with pytest.raises(EndlessStep, match="in _spin"):
        world.run(main)


def _ticking_run(ticks_a_step: int, step_cpu_s_max: float = 1000.0) -> str:
    async def serve() -> None:
        for _ in range(20):
            for _ in range(ticks_a_step):
                signal.raise_signal(TICK)
            await trio.sleep(0.1)

    async def main() -> None:
        await world.boot("server", serve).ended.wait()

    world = World(SeedChoices(0), step_cpu_s_max=step_cpu_s_max)
    Network(world)
    return world.run(main)


def test_looks_at_a_run_that_goes_on_leave_no_trace() -> None:
    assert _ticking_run(0) == _ticking_run(3) == _ticking_run(0, math.inf)


def test_time_decides_only_when_one_step_has_used_it_all() -> None:
    with pytest.raises(EndlessStep):
        _ticking_run(6)


def test_a_checker_may_take_its_time_at_the_end() -> None:
    class Slow:
        def on(self, _row: object) -> None:
            pass

        def at_end(self) -> None:
            for _ in range(20):
                signal.raise_signal(TICK)

    async def main() -> None:
        await trio.sleep(1)

    world = World(SeedChoices(0))
    world.checkers.append(Slow())  # type: ignore[arg-type]
    world.run(main)


def test_whoever_uses_the_timer_keeps_it() -> None:
    signal.signal(TICK, signal.SIG_IGN)
    try:
        _ticking_run(6)
        assert signal.getsignal(TICK) is signal.SIG_IGN
    finally:
        signal.signal(TICK, signal.SIG_DFL)


def test_a_run_in_another_thread_is_played_unwatched() -> None:
    digests: list[str] = []
    thread = threading.Thread(target=lambda: digests.append(_ticking_run(0)))
    thread.start()
    thread.join()
    assert digests == [_ticking_run(0)]


def test_a_search_finds_it_and_plays_it_again() -> None:
    def play(choices: SeedChoices) -> None:
        async def main() -> None:
            await trio.sleep(1)
            if choices.below(2, "spin"):
                while True:
                    random.random()

        World(choices, step_cpu_s_max=0.1).run(main)

    found = search(play, seeds=range(20))
    assert isinstance(found, Found)
    assert found.rule == "endless step"
    assert [(each.label, each.value) for each in found.decisions] == [("spin", 1)]
