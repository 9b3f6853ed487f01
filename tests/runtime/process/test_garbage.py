"""What a request leaves goes with its last reference: nothing of ours waits for Python's collector.

A serving process looks for cycles seldom (`cli/serve/resources.py`), and what waits that long grows it.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from tests.leftovers import uncollected
from tests.runtime.small_cluster import MODEL, SmallCluster, open_small_cluster

TIMES = 4
MESSAGES = [{"role": "user", "content": "one two three"}]
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("completions", {"prompt": "one two three"}),
    "completion streamed": ("completions", {"prompt": "one two three", "stream": True}),
    "of several prompts": ("completions", {"prompt": ["one", "two", "three"], "n": 2}),
    "chat": ("chat/completions", {"messages": MESSAGES}),
    "chat streamed": ("chat/completions", {"messages": MESSAGES, "stream": True}),
    "responses": ("responses", {"input": "one", "max_output_tokens": 4, "stream": True}),
    "refused by the frontend": ("completions", {"prompt": "one", "temperature": -1}),
    "refused by the worker": ("completions", {"prompt": "one " * 40_000}),
    "of no model": ("completions", {"prompt": "one", "model": "other"}),
    "of no path": ("nothing", {}),
}


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """What other tests have left in this process takes long to look through."""
    with uncollected():
        yield


def left_behind() -> Counter[str]:
    """Objects of ours that only the collector finds, by class."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        classes = (type(each) for each in gc.garbage)
        return Counter(
            f"{each.__module__}.{each.__qualname__}"
            for each in classes
            if each.__module__.startswith("trinamo.")
        )
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@asynccontextmanager
async def no_garbage(cluster: SmallCluster, what: str) -> AsyncIterator[None]:
    gc.collect()
    yield
    with trio.fail_after(120):
        while cluster.transports.open_streams or cluster.service.admission.in_flight:
            await trio.sleep(0.005)
    await trio.testing.wait_all_tasks_blocked(0.01)
    assert not left_behind(), f"a request leaves cycles behind: {what}"


async def repeated(cluster: SmallCluster, what: str, ask: Callable[[], Awaitable[object]]) -> None:
    """The first time modules are imported, and classes made."""
    await ask()
    async with no_garbage(cluster, what):
        for _ in range(TIMES):
            await ask()


@pytest.mark.check
@pytest.mark.parametrize("policy", ["round_robin", "kv"])
async def test_no_request_leaves_cycles_of_ours_behind(policy: str) -> None:
    async with open_small_cluster(router__policy=policy) as cluster:
        for what, (path, asked) in ASKED.items():
            few = {} if path == "responses" else {"max_tokens": 4}
            body = {"model": MODEL, **few, **asked}
            await repeated(cluster, what, partial(cluster.http.post, f"/v1/{path}", json=body))


async def test_nor_does_one_whose_client_leaves_or_that_waits_for_a_place() -> None:
    async with open_small_cluster(worker__running_max=1, worker__waiting_max=1) as cluster:

        async def leave(*, is_streamed: bool) -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(cluster.ask, max_tokens=400, stream=is_streamed))
                with trio.fail_after(120):
                    while not cluster.service.admission.in_flight:
                        await trio.sleep(0.001)
                nursery.cancel_scope.cancel()

        async def crowd() -> None:
            async with trio.open_nursery() as nursery:
                for _ in range(TIMES):
                    nursery.start_soon(cluster.ask)

        await cluster.ask()
        await repeated(cluster, "its client leaves", partial(leave, is_streamed=False))
        await repeated(cluster, "its client leaves a stream", partial(leave, is_streamed=True))
        await repeated(cluster, "others are before it", crowd)


async def test_nor_does_a_connection() -> None:
    async with open_small_cluster() as cluster:

        async def connect() -> None:
            async with httpx.AsyncClient(
                base_url=cluster.http.base_url, trust_env=False, timeout=120
            ) as client:
                await client.get("/v1/models")

        await repeated(cluster, "a connection", connect)
