from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime
from operator import methodcaller
from typing import Any

import pytest
import trio
from trio._core import _run as trio_run

from trinamo.sim import (
    Escape,
    Network,
    SeedChoices,
    StepLimit,
    UnsupportedTrio,
    World,
    check_trio,
)

UTCNOW = methodcaller("utcnow")  # Deprecated, and used.
# Looked up when called: the guard replaces the names.
# ruff: noqa: PLW0108, DTZ002, DTZ005, DTZ006, DTZ011
ESCAPES: dict[str, Callable[[], Any]] = {
    "time.time": lambda: time.time(),
    "time.monotonic_ns": lambda: time.monotonic_ns(),
    "time.perf_counter": lambda: time.perf_counter(),
    "time.sleep": lambda: time.sleep(0),
    "random.random": lambda: random.random(),
    "random.shuffle": lambda: random.shuffle([1, 2]),
    "random.Random": lambda: random.Random(),
    "datetime.now": lambda: datetime.now(UTC),
    "datetime.utcnow": lambda: UTCNOW(datetime),
    "date.today": lambda: date.today(),
    "os.urandom": lambda: os.urandom(4),
    "uuid.uuid1": lambda: uuid.uuid1(),
    "uuid4": lambda: uuid.uuid4(),
    "secrets": lambda: secrets.token_hex(4),
    "thread": lambda: threading.Thread(target=int).start(),
    "blocking socket": lambda: socket.create_server(("", 80)).accept(),
    "subprocess": lambda: subprocess.run(["true"], check=True),
    "os.system": lambda: os.system("true"),
    "os.kill": lambda: os.kill(os.getpid(), 0),
}


@pytest.mark.parametrize("name", ESCAPES)
def test_reaching_for_the_real_world_raises_escape(name: str) -> None:
    world = World(SeedChoices(1), ambient="raise")
    Network(world)

    async def main() -> None:
        ESCAPES[name]()

    with pytest.raises(Escape):
        world.run(main)


WITHOUT_NETWORK: dict[str, Callable[[], Any]] = {
    "socket": lambda: socket.socket(),
    "getaddrinfo": lambda: socket.getaddrinfo("example.invalid", 80),
    "gethostname": lambda: socket.gethostname(),
}


@pytest.mark.parametrize("name", WITHOUT_NETWORK)
def test_sockets_and_names_raise_escape_in_a_world_without_a_network(name: str) -> None:
    async def main() -> None:
        WITHOUT_NETWORK[name]()

    with pytest.raises(Escape):
        World(SeedChoices(1)).run(main)


ASYNC_ESCAPES: dict[str, Callable[[], Any]] = {
    "run_process": lambda: trio.run_process(["true"]),  # noqa: ASYNC105 -- the test awaits it
}


@pytest.mark.parametrize("name", ASYNC_ESCAPES)
def test_trio_processes_raise_escape(name: str) -> None:
    async def main() -> None:
        await ASYNC_ESCAPES[name]()

    with pytest.raises(Escape):
        World(SeedChoices(1)).run(main)


@pytest.mark.parametrize(
    ("name", "advice"),
    {
        "time.time": "ambient='virtual'",
        "secrets": "ambient='virtual'",
        "time.sleep": "await trio.sleep",
        "thread": "nursery",
        "subprocess": "boot a host that plays the other process",
        "socket": r"make Network\(world\)",
    }.items(),
)
def test_an_escape_of_a_host_arrives_as_itself_and_says_where_and_what_to_do(
    name: str, advice: str
) -> None:
    """No group, though it left nurseries and the main function of a process."""

    async def reaches() -> None:
        (ESCAPES | WITHOUT_NETWORK)[name]()

    async def host() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            nursery.start_soon(reaches)

    async def main() -> None:
        await world.boot("a", host).ended.wait()

    world = World(SeedChoices(1), ambient="raise")
    with pytest.raises(Escape, match=rf"test_guard\.py:\d+ in (.*\n)+  instead: .*{advice}"):
        world.run(main)


def test_an_escape_from_deep_inside_a_library_names_the_line_that_called_it(tmp_path: Any) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    deep = "".join(f"def f{n}(): f{n + 1}()\n" for n in range(6))
    (folder / "deep_library.py").write_text(f"import time\n{deep}def f6(): time.sleep(1)\n")
    sys.path.insert(0, str(folder))

    async def calls_it() -> None:
        import deep_library  # type: ignore[import-not-found]

        deep_library.f0()

    try:
        with pytest.raises(Escape, match=r"in f3\n  .*test_guard\.py:\d+ in calls_it\n"):
            World(SeedChoices(1)).run(calls_it)
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("deep_library", None)


def test_an_escape_that_the_code_swallows_still_fails_the_run() -> None:
    async def main() -> None:
        with contextlib.suppress(BaseException):
            time.time()
        await trio.sleep(1)

    with pytest.raises(Escape, match=r"time\.time"):
        World(SeedChoices(1), ambient="raise").run(main)


def test_everything_is_as_before_after_a_run_that_failed() -> None:
    dice, clock, scheduler = random.getstate(), time.time, trio_run._r

    async def main() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        World(SeedChoices(1)).run(main)
    assert random.getstate() == dice
    assert time.time is clock
    assert trio_run._r is scheduler
    socket.socket().close()


def test_time_and_dice_are_the_run_s_for_whoever_asks() -> None:
    """Nothing is silently real: neither what C code asks for, nor dice that nobody seeded."""

    def draw(seed: int) -> list[Any]:
        seen: list[Any] = []

        async def main() -> None:
            await trio.sleep(2)
            seen.extend((time.monotonic(), time.time(), time.time_ns(), time.process_time()))
            seen.extend((datetime.now(UTC), UTCNOW(datetime), datetime.now(), datetime.today()))
            seen.extend((date.today(), datetime.now(tz=UTC), time.strftime("%s"), Stamp.now(UTC)))
            seen.extend((random.random(), os.urandom(4), uuid.uuid4(), secrets.token_hex(4)))
            seen.extend((random.Random().random(), uuid.uuid1()))
            random.seed()
            seen.append(random.random())

        World(SeedChoices(seed)).run(main)
        return seen

    first, again, other = draw(1), draw(1), draw(2)
    assert first == again
    at_s, utc = 1_700_000_002, datetime.fromtimestamp(1_700_000_002, UTC)
    assert first[:4] == [2.0, at_s, at_s * 1_000_000_000, 2.0]
    local = datetime.fromtimestamp(at_s)
    assert first[4:8] == [utc, utc.replace(tzinfo=None), local, local]
    assert first[8:12] == [local.date(), utc, str(at_s), Stamp.fromtimestamp(at_s, UTC)]
    assert type(first[4]) is datetime, "no stand-in: it can be pickled, compared, stored"
    assert type(first[11]) is Stamp
    assert all(a != b for a, b in zip(first[12:], other[12:], strict=True))
    assert datetime.now(UTC).year > 2024, "real again"


class Stamp(datetime):
    """Somebody's own kind of date."""


def test_log_records_carry_virtual_time(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        await trio.sleep(3)
        logging.getLogger("trinamo.sim.test").warning("in the simulation")

    World(SeedChoices(1)).run(main)
    assert caplog.records[0].created == 1_700_000_003.0


def test_a_trio_without_its_random_generator_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(trio_run, "_r")
    with pytest.raises(UnsupportedTrio, match=rf"trio {trio.__version__}: trio\._core\._run\._r"):
        check_trio.__wrapped__()


def test_a_trio_that_does_not_shuffle_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trio_run, "list", lambda queue: _Unsorted(queue), raising=False)
    with pytest.raises(UnsupportedTrio, match="not sorted by creation"):
        check_trio.__wrapped__()


def test_a_trio_whose_sockets_moved_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def elsewhere(_fd: object) -> None:
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr("trio.lowlevel.wait_readable", elsewhere)
    with pytest.raises(UnsupportedTrio, match="sockets are not made, used or waited for"):
        check_trio.__wrapped__()


class _Unsorted(list[Any]):
    """A batch that ignores the request to be sorted."""

    def sort(self, **_keywords: Any) -> None:
        super().sort(**_keywords)
        self.reverse()


def test_tasks_that_do_not_end_when_cancelled_meet_the_step_limit_and_spoil_no_later_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop has to be broken for them; nothing of it is left, not even what they would say."""
    monkeypatch.setattr("trinamo.sim.core.world.UNWINDING_STEPS_MAX", 1000)

    async def deaf() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            while True:
                with contextlib.suppress(trio.Cancelled):
                    await trio.sleep(1)

    async def main() -> None:
        world.boot("a", deaf)
        await trio.sleep(5)

    world = World(SeedChoices(0))
    with pytest.raises(StepLimit, match=r"cancelled tasks do not end\n(.*\n)*  a\.1 a:main"):
        world.run(main)
    gc.collect()
    World(SeedChoices(0)).run(_sleep_once)
    socket.create_server(("127.0.0.1", 0)).close()


async def _sleep_once() -> None:
    await trio.sleep(1)
