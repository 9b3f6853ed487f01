"""Builds side by side in one cluster: earlier ones, and one that speaks one minor more than this.

Those of before versions were told are refused; the others serve and are served both ways.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import trio

from tests.cli.places import Place, RunningCluster, cluster, wait_for
from tests.cli.running.builds import FIRST, UNVERSIONED, earlier_build, newer_build
from tests.cluster.processes import Cluster, Member, open_cluster, start, until
from tests.cluster.test_disaggregation import PROMPTS, alone, body, knows_prefill
from tests.cluster.test_migration import Seen, ask, check_equal, freeze, stream
from trinamo.cli.up.certs import write_secret

MODEL: Final = "of-another-build"
START_S: Final = 60
EXCHANGE: Final = Path(__file__).with_name("exchanging.py")
STREAMS: Final = 6


@contextmanager
def member(here: RunningCluster, place: Path, source: Path, *arguments: str) -> Iterator[Place]:
    """A process of another build in the cluster `here`, ended with SIGTERM."""
    (path,) = (here.place.root / "run").rglob("*.json")
    record = json.loads(path.read_text("utf-8"))
    joins = ("--etcd", ",".join(record["etcd"]), "--nats", ",".join(record["nats"]))
    settings = [f"--set={key}={value}" for key, value in record["settings"].items()]
    home = Place(place, extra={"PYTHONPATH": str(source)}, is_patient=False)
    place.mkdir()
    process = home.start(*arguments, *joins, *settings)
    try:
        wait_for(
            lambda: "is ready" in home.output or process.poll() is not None, START_S, "its start"
        )
        assert process.poll() is None, home.output
        yield home
    finally:
        process.terminate()
        process.wait(START_S)


def models(url: str) -> list[str]:
    return [each["id"] for each in httpx.get(f"{url}/v1/models", timeout=120).json()["data"]]


def chat(url: str, model: str, words: str, **more: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": words}], **more}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=START_S)


def test_a_worker_that_tells_no_version_is_neither_listed_nor_asked(tmp_path: Path) -> None:
    source = earlier_build(tmp_path / "old", UNVERSIONED)
    arguments = ("worker", "--engine", "echo", "--model-name", MODEL, "--port", "0")
    with (
        cluster(Place(tmp_path, is_patient=False), "--engine", "echo", "--workers", "1") as here,
        member(here, tmp_path / "its", source, *arguments),
    ):
        listed = models(here.url)
        refused = chat(here.url, MODEL, "hello")
        told = here.place.run("status").stdout
        others = chat(here.url, listed[0], "hello").json()

    assert MODEL not in listed
    assert refused.status_code == 404
    assert "speaks protocol of before 3.0" in " ".join(told.split())
    assert others["choices"][0]["message"]["content"] == "hello"


@pytest.fixture(scope="module", params=["earlier", "newer"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What to import of a build whose protocol fits."""
    place = tmp_path_factory.mktemp("build")
    return newer_build(place) if request.param == "newer" else earlier_build(place, FIRST)


@pytest.mark.parametrize(
    "theirs", [("decode",), ("frontend", "prefill")], ids=["decode", "frontend-and-prefill"]
)
async def test_two_builds_serve_as_one(
    tmp_path: Path, source: Path, theirs: tuple[str, ...]
) -> None:
    """Answers, streams both ways, prompts that are computed elsewhere, KV events, and a worker that leaves."""
    write_secret(tmp_path / "secret")
    launchers = dict.fromkeys(theirs, ("env", f"PYTHONPATH={source}"))
    settings = {
        "security.secret_file": tmp_path / "secret",
        "router.policy": "kv",
        "disaggregation.mode": "decode_first",
        "disaggregation.prefill_tokens_local_max": 32,
        "shutdown.drain_timeout_s": 0.05,
    }
    async with open_cluster(
        tmp_path,
        roles=["decode", "prefill"],
        engine="exact",
        settings=settings,
        launchers=launchers,
    ) as cluster:
        first, _ = cluster.workers
        second = await cluster.start_worker("decode", {"disaggregation.mode": "prefill_first"})
        await cluster.wait_live(2)
        right = await alone(PROMPTS)
        for each in (first, second):
            await check_prefill(cluster, each, right)
        await check_leaving(cluster, [first, second])
        own = {**cluster.places, "security.secret_file": tmp_path / "secret"}
        await check_exchange(tmp_path, own, launchers)
    for member in (*cluster.workers, second, cluster.frontend):
        assert "speaks protocol" not in member.log.read_text("utf-8")


async def check_prefill(cluster: Cluster, decode: Member, right: list[str]) -> None:
    """Its long prompts are computed by the prefill worker, and the frontend hears what it keeps of them."""
    await until(lambda: knows_prefill(cluster, decode), "it knows the prefill worker")
    headers = {"x-trinamo-worker": decode.facts["instance_id"]}
    url = f"{cluster.url}/v1/chat/completions"

    async def take(text: str, seed: int) -> httpx.Response:
        response = await cluster.client.post(url, json=body(text, seed), headers=headers)
        assert response.status_code == 200, response.text
        return response

    found = [await take(text, seed) for seed, text in enumerate(PROMPTS)]
    said = [each.json()["choices"][0]["message"]["content"] for each in found]
    assert said == right
    status_url = str(decode.facts["status_url"])
    assert await cluster.metric(status_url, "prefills_total", where="remote") > 0

    async def is_kept() -> bool:
        response = await take(PROMPTS[-1], len(PROMPTS) - 1)
        return int(response.headers["x-trinamo-cached-blocks"]) > 0

    await until(is_kept, "the frontend knows what the worker keeps")


async def check_leaving(cluster: Cluster, workers: list[Member]) -> None:
    """The answers of one that is told to end go on at the other, and no client notices."""
    answers: dict[int, Any] = {}
    seen: dict[int, Seen] = {}
    async with trio.open_nursery() as nursery:
        for number in range(STREAMS):
            nursery.start_soon(ask, cluster, number, answers)
    with trio.fail_after(START_S):
        async with trio.open_nursery() as nursery:
            for number in range(STREAMS):
                nursery.start_soon(stream, cluster, number, seen)
            while len(seen) < STREAMS or not all(each.worker for each in seen.values()):
                await trio.sleep(0.005)
            [(name, _)] = Counter(each.worker for each in seen.values()).most_common(1)
            [leaving] = (each for each in workers if each.facts["instance_id"] == name)
            moved = await freeze(leaving, seen, count=STREAMS)
            leaving.process.send_signal(signal.SIGTERM)
            leaving.thaw()
            assert await leaving.process.wait() == 0
    check_equal(seen, answers)
    assert moved
    assert await cluster.metric(cluster.url, "migrations_total", outcome="migrated") == len(moved)


async def check_exchange(
    folder: Path, settings: Mapping[str, Any], launchers: Mapping[str, Sequence[str]]
) -> None:
    """One build streams to the other, which streams back."""
    served = await start(
        "serve",
        dict(settings),
        folder / "serve.log",
        script=EXCHANGE,
        launcher=launchers.get("decode", ()),
    )
    try:
        asked = await start(
            "ask",
            dict(settings),
            folder / "ask.log",
            script=EXCHANGE,
            launcher=launchers.get("frontend", ()),
        )
        assert asked.facts["heard"] == ["1", "12", "123", "the end"]
        assert await asked.process.wait() == 0
    finally:
        with trio.CancelScope(shield=True):
            assert await served.stop() == 0
