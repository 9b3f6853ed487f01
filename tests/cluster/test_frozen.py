"""A worker process that is stopped: its kernel keeps every connection open and acknowledges."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.cluster.processes import Cluster, chat, open_cluster, until

pytestmark = [
    # httpx leaves generators of its own to the garbage collector when a stream breaks.
    pytest.mark.filterwarnings("ignore:.*(httpx|httpcore|Response.aiter).*"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


async def read_story(cluster: Cluster, begun: list[str], ends: list[str]) -> None:
    """One long streamed answer, of which the first and the last line are kept."""
    body = chat("a long story", stream=True, max_tokens=2000, temperature=0)
    url = f"{cluster.url}/v1/chat/completions"
    async with cluster.client.stream("POST", url, json=body) as response:
        lines = response.aiter_lines()
        begun.append(await anext(lines))
        rest = [line async for line in lines if line]
    ends.append(rest[-1])


async def test_a_stopped_worker_s_answer_goes_on_elsewhere_and_it_hears_kill_when_it_wakes(
    tmp_path: Path,
) -> None:
    """Its lease runs out, its streams are silent: both together move them; others are untouched."""
    settings = {"control_plane.etcd.lease_ttl_s": 10, "router.silence_grace_s": 10}
    async with open_cluster(tmp_path, engine="exact", settings=settings) as cluster:
        frozen = cluster.workers[0]
        begun: list[str] = []
        ends: list[str] = []
        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    # Round robin: one stream on each worker.
                    nursery.start_soon(read_story, cluster, begun, ends)

                async def have_begun() -> bool:
                    return len(begun) == 2

                await until(have_begun, "both streams have begun")
                frozen.freeze()
        migrated = await cluster.metric(cluster.url, "migrations_total", outcome="migrated")
        given_up = await cluster.metric(cluster.url, "silent_requests_total")
        frozen.thaw()

        async def is_idle() -> bool:
            url = frozen.facts["status_url"]
            return await cluster.metric(url, "worker_requests_in_flight") == 0

        await until(is_idle, "the worker that woke has ended what nobody reads")
        await cluster.wait_live(2)

    assert ends == ["data: [DONE]"] * 2
    assert (given_up, migrated) == (1, 1)
