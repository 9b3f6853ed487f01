"""The nursery tree of a process: where each task waits, and since when."""

from __future__ import annotations

import types
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
import trio
import trio.testing

from trinamo.runtime.config.http import HttpConfig
from trinamo.runtime.env import RealEnv
from trinamo.runtime.http.admission.keys import ApiKeys
from trinamo.runtime.http.app import build_starlette, tasks_routes
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.process.tasks import (
    LOOK_INTERVAL_S,
    SIBLINGS_MAX,
    NurseryView,
    TasksView,
    TaskTree,
    TaskView,
)
from trinamo.runtime.worker.metrics import WorkerMetrics
from trinamo.transports.openai.client import fetch


class VirtualClock:
    """Trio's, which the tests wind forward."""

    def now(self) -> float:
        return trio.current_time()

    def wall(self) -> float:
        return trio.current_time()


async def blocked() -> None:
    await trio.Event().wait()


async def told() -> AsyncGenerator[int, None]:
    yield 1
    await trio.sleep_forever()


async def reader() -> None:
    async with aclosing(told()) as items:
        async for _ in items:
            pass


@types.coroutine
def driven() -> Generator[Any, Any, None]:
    """As an engine's steps are measured: the awaitable is driven by hand."""
    awaited, value = blocked().__await__(), None
    while True:
        value = yield awaited.send(value)


async def driver() -> None:
    await driven()


async def parent() -> None:
    async with open_nursery() as nursery:
        nursery.start_soon(blocked)


@attrs.frozen
class Request:
    """An object that is a task's function, with a secret in its `repr`."""

    prompt: str

    async def __call__(self) -> None:
        await blocked()


def below(nurseries: list[NurseryView]) -> Iterator[TaskView]:
    for nursery in nurseries:
        for task in nursery.tasks:
            yield task
            yield from below(task.nurseries)


def find(view: TasksView, name: str) -> list[TaskView]:
    return [each for each in below([NurseryView(tasks=[view.root])]) if name in each.name]


async def test_a_task_is_shown_with_its_line_and_equal_ones_together(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Through a generator, too; who has opened a nursery waits for it, not in our wrapper of it."""
    tree = TaskTree(VirtualClock())
    async with trio.open_nursery() as nursery:
        for task in (blocked, blocked, reader, driver, parent, blocked):
            nursery.start_soon(task)
        await trio.testing.wait_all_tasks_blocked()
        view = tree.view()
        nursery.cancel_scope.cancel()
        (cancelled,) = [
            each for task in find(tree.view(), "") for each in task.nurseries if each.is_cancelled
        ]
    shown = {
        name: [(each.function, each.waits_in, each.count) for each in find(view, name)]
        for name in (".blocked", ".driver", ".reader", ".parent")
    }

    assert shown == {
        ".blocked": [("blocked", "Event.wait", 3), ("blocked", "Event.wait", 1)],
        ".driver": [("blocked", "Event.wait", 1)],
        ".reader": [("told", "sleep_forever", 1)],
        ".parent": [("parent", "its nursery", 1)],
    }
    place = find(view, ".blocked")[0].place
    assert place == f"test_tasks.py:{blocked.__code__.co_firstlineno + 1}"
    assert [each.name for each in find(view, ".parent")[0].nurseries[0].tasks] == [
        f"{__name__}.blocked"
    ]
    assert view.left_out == 0
    assert len(cancelled.tasks) == 4


async def test_how_long_a_task_waits_counts_from_the_look_that_saw_it_first(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Never more than is true; and one that ran in between has waited for no time that is known."""
    tree, runs = TaskTree(VirtualClock()), trio.Event()

    async def woken() -> None:
        await runs.wait()
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tree.follow)
        await trio.sleep(LOOK_INTERVAL_S / 2)
        nursery.start_soon(blocked)
        nursery.start_soon(woken)
        await trio.sleep(LOOK_INTERVAL_S * 10)
        before = tree.view()
        runs.set()
        await trio.testing.wait_all_tasks_blocked()
        after = tree.view()
        nursery.cancel_scope.cancel()

    assert [each.since_s for each in find(before, "blocked")] == [LOOK_INTERVAL_S * 9.5]
    assert [each.since_s for each in find(before, "woken")] == [LOOK_INTERVAL_S * 9.5]
    assert [each.since_s for each in find(after, "blocked")] == [LOOK_INTERVAL_S * 9.5]
    assert [each.since_s for each in find(after, "woken")] == [0.0]


async def test_a_name_that_trio_makes_of_an_object_does_not_tell_what_is_in_it() -> None:
    tree = TaskTree(VirtualClock())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Request("my secret prompt"))
        await trio.testing.wait_all_tasks_blocked()
        view = tree.view()
        nursery.cancel_scope.cancel()

    assert [each.name for each in find(view, "Request")] == ["Request.__call__"]


async def test_a_crowd_is_left_out_and_counted() -> None:
    tree = TaskTree(VirtualClock())
    async with trio.open_nursery() as nursery:
        for _ in range(SIBLINGS_MAX + 7):
            nursery.start_soon(blocked)
        await trio.testing.wait_all_tasks_blocked()
        view = tree.view()
        nursery.cancel_scope.cancel()

    assert [each.count for each in find(view, "blocked")] == [SIBLINGS_MAX]
    assert view.left_out == 7


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    file = tmp_path / "keys"
    file.write_text("alice: client-0123456789\nbob (operator): operator-0123456789\n", "ascii")
    env = RealEnv()
    return ApiKeys(HttpConfig(api_keys_file=str(file)), env.rng, WorkerMetrics(env))


@pytest.mark.parametrize(
    ("host", "key", "has_keys", "status"),
    [
        ("127.0.0.1", "", True, 200),
        ("127.0.0.1", "", False, 200),
        ("0.0.0.0", "", False, 403),
        ("0.0.0.0", "", True, 401),
        ("10.0.0.7", "client-0123456789", True, 403),
        ("10.0.0.7", "operator-0123456789", True, 200),
    ],
)
async def test_beyond_loopback_only_an_operator_is_told(
    keys: ApiKeys, host: str, key: str, has_keys: bool, status: int
) -> None:
    view = TaskTree(VirtualClock()).view
    routes = tasks_routes(view, host, keys if has_keys else None, fetch, dict)
    transport = httpx.ASGITransport(build_starlette(routes))
    async with httpx.AsyncClient(transport=transport, base_url="http://port") as client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        answer = await client.get("/tasks", headers=headers)
        other = await client.get("/tasks/another", headers=headers)

    # Who may not know of this process may not ask for another through it; nobody is called so here.
    assert other.status_code == (404 if status == 200 else status)
    assert answer.status_code == status
    assert ("root" in answer.json()) is (status == 200)
