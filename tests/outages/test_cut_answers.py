"""Whoever is told to end cuts off what its drain leaves: real processes, and what their clients see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import httpx
import trio

from tests.cluster.processes import PATIENT, Member, chat, open_cluster, start, until
from tests.transports.openai.fake import (
    STREAM_HEAD,
    Asked,
    chat_chunk,
    chunk,
    events,
    open_fake,
    whole,
)

WORDS = 60
# One word, and the others once the gate is there.
ENGINE = f"""
from pathlib import Path
import trio
import trinamo

@trinamo.engine
async def own(request, context):
    for number in range({WORDS}):
        while number and not Path(__file__).with_name("gate").exists():
            await trio.sleep(0.01)
        yield f"w{{number}} "
"""
TEXT = "".join(f"w{number} " for number in range(WORDS))
SOON = {
    "shutdown.drain_timeout_s": 0.5,
    "http.drain_timeout_s": 0.5,
    "log.access": "all",
    "log.format": "json",
}


async def talks_for_ever(asked: Asked, stream: Any) -> None:
    """An upstream whose streams go on, and whose whole answers take too long."""
    if not asked.json.get("stream"):
        await trio.sleep(3000)
        await stream.send_all(whole({"choices": []}))
        return
    await stream.send_all(STREAM_HEAD)
    for number in range(60_000):
        await stream.send_all(chunk(events(chat_chunk(f"s{number}"), done=False)))
        await trio.sleep(0.05)


@attrs.define
class Cut:
    """One answer, asked of `url` in its own task, as its client saw it."""

    url: str
    model: str
    is_streamed: bool
    has_begun: bool = False
    status: int = 0
    retry_after: str = ""
    text: str = ""
    """The body, or the lines that came."""

    async def ask(self, client: httpx.AsyncClient) -> None:
        body = chat("hello there", stream=self.is_streamed, model=self.model)
        url = f"{self.url}/v1/chat/completions"
        async with client.stream("POST", url, json=body) as answer:
            self.status = answer.status_code
            self.retry_after = answer.headers.get("retry-after", "")
            async for line in answer.aiter_lines():
                self.has_begun = answer.is_success
                self.text += line + "\n"

    def check(self) -> None:
        """It does not look whole: an error's status, or an event with the error at the end."""
        assert "[DONE]" not in self.text
        assert '"finish_reason":"' not in self.text
        assert '"error":' in self.text.splitlines()[-2 if self.is_streamed else -1]
        expected = (200, "") if self.is_streamed else (503, "1")
        assert (self.status, self.retry_after) == expected


async def begin(nursery: trio.Nursery, client: httpx.AsyncClient, cuts: list[Cut]) -> None:
    for each in cuts:
        nursery.start_soon(each.ask, client)

    async def have_begun() -> bool:
        return all(each.has_begun for each in cuts if each.is_streamed)

    await until(have_begun, "the streams have begun")


def pair(url: str, model: str) -> list[Cut]:
    return [Cut(url, model, is_streamed=True), Cut(url, model, is_streamed=False)]


def outcomes(frontend: Member) -> list[str]:
    """Of the requests that have ended, as the access log tells them."""
    lines = [json.loads(line) for line in frontend.log.read_text().splitlines()]
    return sorted(line["outcome"] for line in lines if line.get("path", "").startswith("/v1/chat"))


async def test_what_a_drain_cuts_off_is_done_elsewhere_or_does_not_look_whole(
    tmp_path: Path,
) -> None:
    """Workers with an own engine and before an upstream, a frontend, and one without workers."""
    own, gate = tmp_path / "own.py", tmp_path / "gate"
    own.write_text(ENGINE)
    engine = f"{own}:own"
    async with (
        open_fake(talks_for_ever) as fake,
        open_cluster(tmp_path, workers=1, engine=engine, settings=SOON) as cluster,
    ):
        nodes = {
            **PATIENT,
            "control_plane.etcd.endpoints": cluster.etcd.endpoint,
            "event_plane.nats.servers": cluster.nats.url,
            "event_plane.nats.token": cluster.nats.token,
            **SOON,
        }
        fake.models = [{"id": "up", "max_model_len": 4096}]
        before = {"worker.engine": "openai", "worker.upstream.url": fake.url}
        behind = await start("worker", nodes | before, tmp_path / "behind.log")
        alone = {"http.upstreams": fake.url, "http.port": 0, **SOON}
        one_hop = await start("frontend", alone, tmp_path / "one_hop.log")
        started = [behind, one_hop]
        try:
            await cluster.wait_models(2)
            one_hop_url = str(one_hop.facts["url"])

            async def is_known() -> bool:
                models = await cluster.client.get(f"{one_hop_url}/v1/models")
                return len(models.json()["data"]) == 1

            await until(is_known, "the frontend without workers knows its model")
            cuts = [*pair(cluster.url, "own"), *pair(cluster.url, "up"), *pair(one_hop_url, "up")]
            with trio.fail_after(300):
                async with trio.open_nursery() as nursery:
                    await begin(nursery, cluster.client, cuts)
                    await until(lambda: _are(fake.asked, 4), "the upstream has what it is asked")
                    # Whoever takes over is there before the first one leaves.
                    late = {"worker.engine": engine}
                    heir = await start("worker", nodes | late, tmp_path / "heir.log")
                    started.append(heir)
                    await cluster.wait_live(3)
                    for leaving in (behind, one_hop):
                        nursery.start_soon(leaving.stop)
                    await cluster.workers[0].stop()
                    gate.touch()
            gate.unlink()
            anew = cuts.pop(1)
            last = pair(cluster.url, "own")
            with trio.fail_after(300):
                async with trio.open_nursery() as nursery:
                    await begin(nursery, cluster.client, last)
                    nursery.start_soon(cluster.frontend.stop)
        finally:
            for member in started:
                member.kill()
                await member.process.wait()

    # Nobody had anything of it, so another worker did it again.
    answer = json.loads(anew.text)
    assert (anew.status, answer["choices"][0]["message"]["content"]) == (200, TEXT)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == WORDS
    for each in [*cuts, *last]:
        each.check()
    assert outcomes(cluster.frontend) == [
        *("frontend_shutdown", "frontend_shutdown", "success"),
        *("unavailable", "unavailable", "unavailable"),
    ]
    assert outcomes(one_hop) == ["frontend_shutdown", "frontend_shutdown"]


async def _are(asked: list[Any], count: int) -> bool:
    return len(asked) >= count
