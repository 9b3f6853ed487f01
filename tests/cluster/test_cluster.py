"""A real cluster: etcd, NATS, two worker processes and a frontend process, asked over HTTP."""

from __future__ import annotations

import json
import random
import signal
import ssl
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trio

from tests.cluster.processes import PATIENT, Cluster, chat, open_cluster, start, until
from trinamo.runtime.kv.events import KV_NAMES_PREFIX
from trinamo.transports.etcd import open_etcd

pytestmark = [
    # The clients leave generators of theirs to the garbage collector when a stream is left early.
    pytest.mark.filterwarnings("ignore:.*(openai|httpx|httpcore|Response.aiter).*"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
WORDS = " ".join(f"word{number}" for number in range(400))


async def ask(cluster: Cluster, text: str = "hello there") -> httpx.Response:
    return await cluster.client.post(
        f"{cluster.url}/v1/chat/completions", json=chat(text, max_tokens=32)
    )


async def read_events(response: httpx.Response) -> list[Any]:
    events: list[Any] = []
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            events.append(data if data == "[DONE]" else json.loads(data))
    return events


async def test_the_official_client_gets_answers_streaming_and_not(tmp_path: Path) -> None:
    async with (
        open_cluster(tmp_path, engine="exact") as cluster,
        openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client,
    ):
        models = await client.models.list()
        whole = await client.chat.completions.create(
            model="exact",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=12,
            temperature=0,
        )
        stream = await client.chat.completions.create(
            model="exact",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        completion = await client.completions.create(
            model="exact", prompt="once upon", max_tokens=8, temperature=0
        )

    assert [model.id for model in models.data] == ["exact"]
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert completion.choices[0].text


async def test_requests_over_nats_are_answered_over_tcp_and_a_killed_worker_is_noticed_at_once(
    tmp_path: Path,
) -> None:
    settings = {"data_plane.requests": "nats", "control_plane.etcd.lease_ttl_s": 600}
    async with open_cluster(tmp_path, settings=settings) as cluster:
        answers = [await ask(cluster, f"number {n}") for n in range(10)]
        cluster.workers[0].kill()
        # No request is under way, and the lease has not run out: an idle connection told.
        await cluster.wait_live(1)
        async with open_etcd(cluster.etcd.endpoint) as control:
            named = await control.range("instances/")
        answers += [await ask(cluster, f"number {n}") for n in range(10, 14)]

    assert len(named.entries) == 2
    assert [a.status_code for a in answers] == [200] * 14
    assert answers[3].json()["choices"][0]["message"]["content"] == "number 3"


async def test_a_killed_worker_ends_streams_that_may_not_migrate_and_gets_nothing_more(
    tmp_path: Path,
) -> None:
    settings = {"control_plane.etcd.lease_ttl_s": 600, "router.migrations_max": 0}
    async with open_cluster(tmp_path, engine="exact", settings=settings) as cluster:
        seen: dict[str, list[str]] = {}
        victim = cluster.workers[0]
        name = victim.facts["instance_id"]

        async def stream() -> None:
            body = chat("a long story", stream=True, max_tokens=6000, temperature=0)
            async with cluster.client.stream(
                "POST", f"{cluster.url}/v1/chat/completions", json=body
            ) as response:
                worker = response.headers["x-trinamo-worker"]
                seen[worker] = []
                async for line in response.aiter_lines():
                    if line:
                        seen[worker].append(line)

        async def have_begun() -> bool:
            return len(seen) == 2 and all(seen.values())

        while victim.is_running:
            seen.clear()
            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    # Round robin: one stream on each worker.
                    nursery.start_soon(stream)
                await until(have_begun, "both streams run")
                # Frozen until all that it sent has arrived, so that it dies in its answer.
                victim.freeze()
                count = 0
                while count < (count := len(seen[name])):
                    await trio.sleep(1)
                if seen[name][-1] != "data: [DONE]":
                    victim.kill()
                    await victim.process.wait()
                else:
                    victim.thaw()
        # Discovery still names the dead one, whose lease has not run out: its connection told.
        await cluster.wait_live(1)
        async with open_etcd(cluster.etcd.endpoint) as control:
            named = await control.range("instances/")
        answers = [await ask(cluster) for _ in range(20)]
        refused = await cluster.metric(cluster.url, "inhibited_instances")

    ends = list(seen.values())
    broken = [events for events in ends if '"error"' in events[-1]]
    assert len(named.entries) == 2
    assert refused <= 1
    assert len(broken) == 1
    error = json.loads(broken[0][-1].removeprefix("data: "))["error"]
    assert error["code"] == "disconnected"
    assert sum(events[-1] == "data: [DONE]" for events in ends) == 1
    assert [a.status_code for a in answers] == [200] * 20


async def test_an_etcd_outage_stops_no_stream_and_no_request_to_known_workers(
    tmp_path: Path,
) -> None:
    async with open_cluster(tmp_path) as cluster:
        pids = [m.pid for m in [*cluster.workers, cluster.frontend]]
        await cluster.etcd.kill()
        answers = []
        for _ in range(10):
            answers.append(await ask(cluster))
            await trio.sleep(0.5)
        await cluster.etcd.restart()

        async def all_registered() -> bool:
            states = [
                await cluster.metric(w.facts["status_url"], "lease_state", state="granted")
                for w in cluster.workers
            ]
            return states == [1.0, 1.0]

        await until(all_registered, "every worker has a lease")
        await cluster.wait_live(2)
        late = await start(
            "worker",
            {
                **PATIENT,
                "control_plane.etcd.endpoints": cluster.etcd.endpoint,
                "event_plane.nats.servers": cluster.nats.url,
                "event_plane.nats.token": cluster.nats.token,
                "worker.engine": "echo",
            },
            tmp_path / "late.log",
        )
        await cluster.wait_live(3)
        code = await late.stop()
        await cluster.wait_live(2)
        after = await ask(cluster)
        still = [m.pid for m in [*cluster.workers, cluster.frontend] if m.is_running]
        assert late.process.stdout is not None
        await late.process.stdout.aclose()

    assert [a.status_code for a in answers] == [200] * 10
    assert after.status_code == 200
    assert code == 0
    assert still == pids


async def test_a_nats_outage_stops_no_request_over_tcp(tmp_path: Path) -> None:
    async with open_cluster(tmp_path) as cluster:
        pids = [m.pid for m in [*cluster.workers, cluster.frontend]]
        await cluster.nats.kill()
        answers = []
        for _ in range(10):
            answers.append(await ask(cluster))
            await trio.sleep(0.5)
        await cluster.nats.restart()
        after = await ask(cluster)
        still = [m.pid for m in [*cluster.workers, cluster.frontend] if m.is_running]

    assert [a.status_code for a in answers] == [200] * 10
    assert after.status_code == 200
    assert still == pids


async def test_hundreds_of_requests_with_a_third_leaving_leave_nothing_behind(
    tmp_path: Path,
) -> None:
    dice = random.Random(7)
    # One for all clients: to read the authorities takes longer than a whole request.
    unused = ssl.create_default_context()
    async with open_cluster(tmp_path, engine="exact") as cluster:
        members = [cluster.frontend, *cluster.workers]
        for _ in range(4):
            await ask(cluster)
        before = [m.fd_count() for m in members]
        outcomes: list[str] = []
        limiter = trio.CapacityLimiter(64)

        async def one(number: int, leaves: bool) -> None:
            async with (
                limiter,
                httpx.AsyncClient(timeout=300, trust_env=False, verify=unused) as client,
            ):
                body = chat(f"request {number}", stream=True, max_tokens=8, temperature=0)
                async with client.stream(
                    "POST", f"{cluster.url}/v1/chat/completions", json=body
                ) as response:
                    lines = [await anext(response.aiter_lines())] if leaves else None
                    if lines is None:
                        events = await read_events(response)
                        outcomes.append(str(events[-1]))
                    else:
                        outcomes.append("left")

        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                for number in range(400):
                    nursery.start_soon(one, number, dice.random() < 1 / 3)

        async def is_quiet() -> bool:
            gauges = [await cluster.metric(cluster.url, "requests_in_flight")]
            for worker in cluster.workers:
                url = worker.facts["status_url"]
                gauges.append(await cluster.metric(url, "worker_requests_in_flight"))
                gauges.append(await cluster.metric(url, "worker_streams"))
            return not any(gauges)

        await until(is_quiet, "the gauges are back to zero")

        async def fds_are_back() -> bool:
            now = [m.fd_count() for m in members]
            # The clients of this test and the metrics' scraping hold a few connections.
            return all(n <= b + 8 for n, b in zip(now, before, strict=True))

        await until(fds_are_back, "the descriptors are closed")
        answer = await ask(cluster)

    assert len(outcomes) == 400
    assert set(outcomes) == {"left", "[DONE]"}
    assert answer.status_code == 200


async def test_garbage_on_every_port_harms_nobody_else(tmp_path: Path) -> None:
    async with open_cluster(tmp_path, workers=1) as cluster:
        ports = sorted(
            {
                port
                for member in [cluster.frontend, *cluster.workers]
                for port in listening_ports(member.pid)
            }
        )
        junk = [b"\xff" * 64, b"GET / HTTP/9.9\r\n\r\n", b"\0" * 8, b"\0\0\0\x02\0\0\0\0{}", b"{"]
        for port in ports:
            for piece in junk:
                stream = await trio.open_tcp_stream("127.0.0.1", port)
                async with stream:
                    with trio.move_on_after(2):
                        try:
                            await stream.send_all(piece)
                            await stream.send_eof()
                            while await stream.receive_some(4096):
                                pass
                        except trio.BrokenResourceError:
                            pass
        answer = await ask(cluster)

    assert len(ports) >= 4
    assert answer.status_code == 200


def listening_ports(pid: int) -> list[int]:
    """The TCP ports a process listens on, from /proc."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = fd.readlink().name
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    ports = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            ports.append(int(fields[1].split(":")[1], 16))
    return ports


async def test_a_worker_told_to_end_finishes_its_stream_and_leaves_discovery(
    tmp_path: Path,
) -> None:
    async with open_cluster(tmp_path, workers=2) as cluster:
        body = chat(WORDS * 30, stream=True)
        async with cluster.client.stream(
            "POST", f"{cluster.url}/v1/chat/completions", json=body
        ) as response:
            lines = response.aiter_lines()
            await anext(lines)
            for worker in cluster.workers[:1]:
                worker.process.send_signal(signal.SIGTERM)
            rest = [line async for line in lines if line]
        with trio.fail_after(300):
            code = await cluster.workers[0].process.wait()
        await cluster.wait_live(1)
        answers = [await ask(cluster) for _ in range(5)]

    assert rest[-1] == "data: [DONE]"
    assert code == 0
    assert [a.status_code for a in answers] == [200] * 5


@pytest.mark.parametrize("has_secret", [True, False])
async def test_a_frontend_finds_by_its_names_what_workers_keep(
    tmp_path: Path, has_secret: bool
) -> None:
    """And says so of one that names its blocks otherwise."""
    settings: dict[str, object] = {"router.policy": "kv"}
    if has_secret:
        secret = tmp_path / "cluster.secret"
        secret.write_text("0123456789abcdef0123456789abcdef")
        secret.chmod(0o600)
        settings["security.secret_file"] = secret
    async with (
        open_cluster(tmp_path, engine="mocker", settings=settings) as cluster,
        open_etcd(cluster.etcd.endpoint) as control,
    ):
        salts = (await control.range(KV_NAMES_PREFIX)).entries
        assert [each.key for each in salts] == [f"{KV_NAMES_PREFIX}trinamo"] * (not has_secret)
        worker = (await ask(cluster, WORDS[:320])).headers["x-trinamo-worker"]

        async def is_found() -> bool:
            headers = (await ask(cluster, WORDS[:320])).headers
            return (
                headers["x-trinamo-worker"] == worker
                and int(headers["x-trinamo-cached-blocks"]) == 320 // 16
                and await cluster.metric(cluster.url, "kv_index_blocks") > 0
            )

        await until(is_found, "the frontend finds the prompt's blocks")
        log = cluster.frontend.log.read_text()
        assert "does not tell which KV blocks" not in log
        if not has_secret:
            await control.delete(salts[0].key)
            await cluster.start_worker()
            await cluster.wait_live(3)

            async def is_logged() -> bool:
                return "by the names in use here" in cluster.frontend.log.read_text()

            await until(is_logged, "the log says so of the worker with other names")
