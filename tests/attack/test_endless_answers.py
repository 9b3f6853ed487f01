"""A worker whose answers do not end, and whose engine cannot say how it is: real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests.cluster.processes import Member, chat, open_cluster

pytestmark = [
    # The client leaves generators of its own to the garbage collector when a stream is left early.
    pytest.mark.filterwarnings("ignore:.*(httpx|httpcore|Response.aiter).*"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
ENGINE = '''
from contextlib import asynccontextmanager
from pathlib import Path

import trio
import trinamo

class Endless:
    """Heeds no bound; `kind` is what a delta brings."""

    info = trinamo.EngineInfo(engine="endless", model="endless", context_tokens_max=4096)

    async def generate(self, request, context):
        kind = request.text
        while True:
            if kind == "slow":
                await trio.sleep(0.1)
            else:
                await trio.lowlevel.checkpoint()
            yield trinamo.Delta("x" * (20_000 if kind == "long" else 1), [1] if kind != "long" else [])

    def statistics(self):
        if Path(__file__).with_name("raises").exists():
            raise ZeroDivisionError("nothing was counted")
        return trinamo.EngineStatistics()

@asynccontextmanager
async def endless():
    yield Endless()
'''
SETTINGS = {
    "worker.waiting_tokens_max": 5,
    "router.policy": "least_loaded",
    "http.answer_bytes_max": 16 << 20,
    "http.answers_bytes_max": 24 << 20,
}
MB = 1 << 20


def rss(member: Member) -> int:
    pages = Path(f"/proc/{member.pid}/statm").read_text().split()[1]
    return int(pages) * 4096


async def test_answers_end_though_the_engine_does_not_and_statistics_that_raise_end_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "own.py").write_text(ENGINE)
    engine = f"{tmp_path / 'own.py'}:endless"
    answers: dict[tuple[str, bool], list[httpx.Response]] = {}
    async with open_cluster(tmp_path, workers=1, engine=engine, settings=SETTINGS) as cluster:
        url, [worker] = f"{cluster.url}/v1/chat/completions", cluster.workers

        async def ask(kind: str, **more: Any) -> None:
            answer = await cluster.client.post(url, json=chat(kind, max_tokens=1, **more))
            answers.setdefault((kind, "stream" in more), []).append(answer)

        await ask("tokens")
        before = rss(cluster.frontend)
        with trio.fail_after(100):
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    for kind in ("tokens", "long"):
                        nursery.start_soon(ask, kind)
            for kind in ("tokens", "long"):
                async with cluster.client.stream(
                    "POST", url, json=chat(kind, stream=True)
                ) as answer:
                    streamed = (await answer.aread()).decode()
                assert '"error"' in streamed
                assert "[DONE]" not in streamed
        grown = rss(cluster.frontend) - before

        slow = chat("slow", stream=True, max_tokens=4096)
        async with cluster.client.stream("POST", url, json=slow) as stream:
            lines = stream.aiter_lines()
            assert await anext(lines)
            (tmp_path / "raises").touch()
            await ask("refused")
            pages = [
                await cluster.client.get(f"{worker.facts['status_url']}/{page}")
                for page in ("metrics", "health")
            ]
            for _ in range(30):
                assert '"error"' not in await anext(lines)
        assert worker.is_running
        (tmp_path / "raises").unlink()

    def codes(kind: str) -> set[tuple[int, str]]:
        return {(a.status_code, a.json()["error"]["code"]) for a in answers[kind, False]}

    assert codes("tokens") == {(502, "remote_protocol")}
    assert codes("long") <= {(500, "engine"), (503, "overloaded")}
    assert codes("refused") == {(500, "engine")}
    assert [page.status_code for page in pages] == [200, 200]
    assert grown < 64 * MB
