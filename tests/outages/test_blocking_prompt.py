"""One prompt that blocks the loop of whichever worker gets it: real processes."""

from __future__ import annotations

from pathlib import Path

import httpx
import trio

from tests.cluster.processes import chat, open_cluster, until

ENGINE = """
import os, pathlib, time
import trinamo

@trinamo.engine
async def own(request, context):
    if "block" in request.text:
        (pathlib.Path(__file__).parent / f"blocked{os.getpid()}").touch()
        time.sleep(600)
    yield "well"
"""
SETTINGS = {
    "control_plane.etcd.lease_ttl_s": 10,
    "router.silence_grace_s": 10,
    "router.stale_grace_s": 60,
    "router.attempts_max": 3,
}


async def test_a_prompt_that_blocks_its_worker_is_tried_at_one_other_and_harms_no_third(
    tmp_path: Path,
) -> None:
    (tmp_path / "own.py").write_text(ENGINE)
    engine = f"{tmp_path / 'own.py'}:own"
    async with open_cluster(tmp_path, workers=3, engine=engine, settings=SETTINGS) as cluster:
        url = f"{cluster.url}/v1/chat/completions"
        answers: list[httpx.Response] = []
        with trio.fail_after(300):
            answers.append(await cluster.client.post(url, json=chat("block"), timeout=300))

        async def is_answered() -> bool:
            answer = await cluster.client.post(url, json=chat("hello"), timeout=300)
            return answer.status_code == 200

        await until(is_answered, "the third worker answers others")
        for member in cluster.workers:
            member.kill()

    [answer] = answers
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "silent")
    assert "instance " in answer.json()["error"]["message"]
    assert _count(tmp_path) == 2


def _count(directory: Path) -> int:
    """How many workers have had it."""
    return len([*directory.glob("blocked*")])
