"""What a cluster of real processes says of itself, for tests."""

from __future__ import annotations

from typing import Any

import httpx

from tests.cluster.processes import Cluster, Member, chat, until

OK = 200


async def ask(cluster: Cluster, *, max_tokens: int = 8, **more: Any) -> int:
    """The status of a short answer: `exact` talks for as long as it may."""
    body = chat("hello", max_tokens=max_tokens, **more)
    answer = await cluster.client.post(f"{cluster.url}/v1/chat/completions", json=body)
    return answer.status_code


async def incarnation(worker: Member) -> int:
    async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
        answer = await client.get(f"{worker.facts['status_url']}/health")
    return int(answer.json()["incarnation"])


async def wait_registered(cluster: Cluster) -> None:
    async def all_granted() -> bool:
        states = [
            await cluster.metric(worker.facts["status_url"], "lease_state", state="granted")
            for worker in cluster.workers
        ]
        return all(states)

    await until(all_granted, "every worker has a lease")
