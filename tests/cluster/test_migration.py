"""Workers that die, or leave, in the middle of answers: real processes, and what their clients see."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from tests.cluster.processes import Cluster, Member, chat, open_cluster, until
from tests.cluster.test_disaggregation import disaggregated

TOKENS = 320
STREAMS = 32
QUIET_S = 6.0
"""All that a frozen worker sent has arrived, whichever process stalls for some seconds."""
# A frozen worker keeps its answers for as long.
LASTING = {"control_plane.etcd.lease_ttl_s": 60, "router.silence_grace_s": 60}


@attrs.define
class Seen:
    """One answer as its client saw it."""

    text: str = ""
    finish_reason: str = ""
    completion_tokens: int = 0
    worker: str = ""
    events: int = 0
    error: str = ""


async def stream(cluster: Cluster, number: int, seen: dict[int, Seen]) -> None:
    seen[number] = each = Seen()
    body = question(number, stream=True, stream_options={"include_usage": True})
    url = f"{cluster.url}/v1/chat/completions"
    async with cluster.client.stream("POST", url, json=body) as response:
        each.worker = response.headers.get("x-trinamo-worker", "")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                take(each, json.loads(line.removeprefix("data: ")))


def take(each: Seen, event: dict[str, Any]) -> None:
    each.events += 1
    if "error" in event:
        each.error = event["error"]["message"]
    elif event.get("usage"):
        each.completion_tokens += event["usage"]["completion_tokens"]
    else:
        (choice,) = event["choices"]
        each.text += choice["delta"].get("content") or ""
        each.finish_reason = choice["finish_reason"] or ""


async def ask(cluster: Cluster, number: int, answers: dict[int, Any]) -> None:
    """The whole answer, not streamed."""
    url = f"{cluster.url}/v1/chat/completions"
    response = await cluster.client.post(url, json=question(number))
    answers[number] = (response.status_code, response.json())


def question(number: int, **more: Any) -> dict[str, Any]:
    # Half of them sampled: whoever goes on with one draws what the first would have drawn.
    sampling = {"temperature": 0} if number % 2 else {"temperature": 0.7, "seed": number}
    return chat(f"tell me number {number}", max_tokens=TOKENS, **sampling, **more)


async def freeze(
    worker: Member, seen: dict[int, Seen], *, least: int = 1, count: int = STREAMS
) -> list[Seen]:
    """Freeze `worker` in the middle of its answers, once each of all `count` has `least` events.

    Those of its answers that are not over: what it had said has arrived, so that it is exact.
    """
    own: list[Seen] = []
    with trio.fail_after(300):
        while (
            len(seen) < count
            or min(each.events for each in seen.values()) < least
            or not any(each.events >= 10 and not each.finish_reason for each in own)
        ):
            await trio.sleep(0.005)
            own = [each for each in seen.values() if each.worker == worker.facts["instance_id"]]
    worker.freeze()
    heard = 0
    while heard < (heard := sum(each.events for each in own)):
        await trio.sleep(QUIET_S)
    return [each for each in own if not each.finish_reason]


_answers: dict[int, Any] = {}


async def undisturbed(directory: Path) -> dict[int, Any]:
    """What the answers are while nobody dies, of a cluster of its own: in a worker that answered a
    question before, the blocks of that answer would be cached."""
    if not _answers:
        found: dict[int, Any] = {}
        own = directory / "undisturbed"
        own.mkdir()
        async with (
            open_cluster(own, engine="exact", workers=1) as cluster,
            trio.open_nursery() as nursery,
        ):
            for number in range(STREAMS):
                nursery.start_soon(ask, cluster, number, found)
        _answers.update(found)
    return _answers


def check_equal(seen: dict[int, Seen], answers: dict[int, Any]) -> None:
    assert {number: each.error for number, each in seen.items() if each.error} == {}
    for number, each in seen.items():
        (choice,) = answers[number][1]["choices"]
        assert each.text == choice["message"]["content"]
        assert each.finish_reason == choice["finish_reason"] == "length"
        assert each.completion_tokens == TOKENS


async def test_of_32_streams_over_two_workers_all_complete_when_one_is_killed(
    tmp_path: Path,
) -> None:
    """I11 across processes: exact counts and the very text, streamed or whole."""
    answers = await undisturbed(tmp_path)
    async with open_cluster(tmp_path, engine="exact", settings=LASTING) as cluster:
        seen: dict[int, Seen] = {}
        whole: dict[int, Any] = {}
        victim = cluster.workers[0]
        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                for number in range(STREAMS):
                    nursery.start_soon(stream, cluster, number, seen)
                for number in range(4):
                    nursery.start_soon(ask, cluster, number, whole)
                moved = await freeze(victim, seen)
                victim.kill()
                await victim.process.wait()
        migrated = await cluster.metric(cluster.url, "migrations_total", outcome="migrated")
        labels = {"kind": "ongoing", "outcome": "migrated"}
        ongoing = await cluster.metric(cluster.url, "migrations_total", **labels)

        async def is_quiet() -> bool:
            url = cluster.workers[1].facts["status_url"]
            gauges = [await cluster.metric(cluster.url, "requests_in_flight")]
            gauges += [await cluster.metric(url, "worker_requests_in_flight")]
            gauges += [await cluster.metric(url, "engine_kv_blocks", state="used")]
            return not any(gauges)

        await until(is_quiet, "nothing is left of the answers")

    check_equal(seen, answers)
    # Which worker has how many is the router's business; neither has all of them.
    assert 0 < len(moved) < STREAMS
    assert migrated >= ongoing > 0
    for number, (status, body) in whole.items():
        assert (status, body["choices"]) == (200, answers[number][1]["choices"])
        # All of it is equal but how much was cached, which is another matter where it goes on.
        differs = {"prompt_tokens_details": body["usage"]["prompt_tokens_details"]}
        assert body["usage"] == answers[number][1]["usage"] | differs


async def test_all_streams_of_the_only_worker_complete_once_it_is_back(tmp_path: Path) -> None:
    """Exact texts, not one error, and whoever asks while nobody is there waits, and is answered."""
    patient = {**LASTING, "router.wait_s": 300, "http.queue_timeout_s": 300}
    answers = await undisturbed(tmp_path)
    async with open_cluster(tmp_path, workers=1, engine="exact", settings=patient) as cluster:
        seen: dict[int, Seen] = {}
        late: dict[int, Any] = {}
        [victim] = cluster.workers
        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                for number in range(20):
                    nursery.start_soon(stream, cluster, number, seen)
                while len(seen) < 20 or min(each.events for each in seen.values()) < 10:
                    await trio.sleep(0.005)
                victim.kill()
                await victim.process.wait()
                for number in range(4):
                    nursery.start_soon(ask, cluster, number, late)
                unknown = {**question(0), "model": "never-seen"}
                url = f"{cluster.url}/v1/chat/completions"
                known = await cluster.client.post(url, json=unknown)
                await cluster.start_worker()
        assert {each.worker for each in seen.values()} == {victim.facts["instance_id"]}
        check_equal(seen, answers)
        for number, (status, body) in late.items():
            assert (status, body["choices"]) == (200, answers[number][1]["choices"])
        # Its card is there until its lease ends, so that somebody is served, and this is nobody's name.
        assert known.status_code == 404
        outcomes = await cluster.metric(cluster.url, "requests_total", outcome="model_not_found")
        assert outcomes == 1
        assert await cluster.metric(cluster.url, "router_waiting") == 0


async def test_a_worker_that_is_told_to_end_hands_over_what_it_cannot_finish_in_time(
    tmp_path: Path,
) -> None:
    """The drain's deadline is far too short; nobody is cut off, and the worker leaves early."""
    settings = {**LASTING, "shutdown.drain_timeout_s": 0.2, "shutdown.stop_timeout_s": 20}
    answers = await undisturbed(tmp_path)
    async with open_cluster(tmp_path, engine="exact", settings=settings) as cluster:
        seen: dict[int, Seen] = {}
        leaving = cluster.workers[0]
        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                for number in range(STREAMS):
                    nursery.start_soon(stream, cluster, number, seen)
                moved = await freeze(leaving, seen)
                leaving.process.send_signal(signal.SIGTERM)
                leaving.thaw()
                with trio.fail_after(300):
                    code = await leaving.process.wait()
        migrated = await cluster.metric(cluster.url, "migrations_total", outcome="migrated")
        log = leaving.log.read_text()

    check_equal(seen, answers)
    assert code == 0
    assert 0 < len(moved) < STREAMS
    assert 0 < migrated <= len(moved)
    steps = ("leave discovery", "drain", "stop", "drain transfers", "revoke the lease")
    places = [log.index(f"shutdown: {step} ") for step in steps]
    assert places == sorted(places)
    assert "shutdown: kill " not in log


@pytest.mark.parametrize("mode", ["decode_first", "prefill_first"])
async def test_answers_of_a_killed_decode_worker_go_on_at_another_whose_prefill_is_remote(
    tmp_path: Path, mode: str
) -> None:
    """Prompt and delivered tokens together are the prompt that the prefill worker computes."""
    roles = ("decode", "decode", "prefill")
    settings: dict[str, Any] = {
        "disaggregation__mode": mode,
        # Each prompt is remote, and waits for as long as the frozen victim keeps the prefill worker.
        "disaggregation__prefill_tokens_local_max": 0,
        "disaggregation__queue_depth_max": 1_000,
        "disaggregation__queue_timeout_s": 60,
        # Frozen, the victim keeps what it has until it is killed.
        **{key.replace(".", "__"): value for key, value in LASTING.items()},
    }
    answers = await undisturbed(tmp_path)
    async with disaggregated(tmp_path, *roles, **settings) as (cluster, members):
        seen: dict[int, Seen] = {}
        victim, other, _ = members
        url = str(other.facts["status_url"])
        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                for number in range(STREAMS):
                    nursery.start_soon(stream, cluster, number, seen)
                moved = await freeze(victim, seen, least=0)
                victim.kill()
                await victim.process.wait()
        remote = await cluster.metric(url, "prefills_total", where="remote")
        # Those whose answer began there.
        own = sum(each.worker == other.facts["instance_id"] for each in seen.values())

    check_equal(seen, answers)
    assert moved
    assert remote > own
