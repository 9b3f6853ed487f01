"""Disks that fill up: of etcd, of NATS, and where the log goes. Requests go on, and the operator reads why."""

from __future__ import annotations

import itertools
import json
import re
import sys
from contextlib import suppress
from pathlib import Path

import trio

from tests.cluster.processes import Cluster, chat, open_cluster, until
from tests.cluster.test_disaggregation import PROMPTS, alone, answer, metric
from tests.outages.disks import small_disk
from trinamo.runtime.errors import ControlPlaneError, TrinamoError
from trinamo.runtime.planes import ControlPlane
from trinamo.transports.etcd import open_etcd
from trinamo.transports.servers.process import spawn, terminate

JUNK = bytes(400_000)
ANSWERED = "/v1/chat/completions 200"


PROGRAM = (sys.executable, "-m", "trinamo.cli")


def places(cluster: Cluster) -> tuple[str, ...]:
    """What tells a command where the servers are."""
    token = ("--set", f"event_plane.nats.token={cluster.nats.token}")
    return ("--etcd", cluster.etcd.endpoint, "--nats", cluster.nats.url, *token)


async def trinamo(cluster: Cluster, line: str, *codes: int) -> str:
    """What a command prints; it must end with one of `codes`."""
    command = [*PROGRAM, *line.split(), *places(cluster)]
    done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
    said = done.stdout.decode() + done.stderr.decode()
    assert done.returncode in codes, said
    return " ".join(said.split())


def logged(log: Path, words: str) -> list[str]:
    """The lines of a log that have these words."""
    lines = map(json.loads, log.read_text().splitlines())
    return [line["event"] for line in lines if words in line["event"]]


async def fill(store: ControlPlane) -> None:
    """Write until that fails."""
    for number in itertools.count():
        await store.put(f"junk/{number}", JUNK)


async def fill_until_told(store: ControlPlane, words: str) -> None:
    """Write until an error says this, however many others come first."""
    with trio.fail_after(300):
        while True:
            try:
                await fill(store)
            except TrinamoError as error:
                if isinstance(error, ControlPlaneError) and words in str(error):
                    return


async def wait_printed(cluster: Cluster, line: str, words: str, *codes: int) -> None:
    """Until a command prints these words."""

    async def is_printed() -> bool:
        return words in await trinamo(cluster, line, *codes)

    await until(is_printed, f"{line} prints: {words}")


async def is_answered(cluster: Cluster) -> bool:
    response = await cluster.client.post(f"{cluster.url}/v1/chat/completions", json=chat("hello"))
    return response.status_code == 200


async def test_an_etcd_whose_database_is_full_lets_nobody_register_and_says_what_to_do(
    tmp_path: Path,
) -> None:
    """Who is there stays: a lease is renewed without a write."""
    async with open_cluster(tmp_path, workers=1, etcd_bytes=2_000_000) as cluster:
        async with open_etcd([cluster.etcd.endpoint]) as store:
            await fill_until_told(store, "etcdctl alarm disarm")
        await wait_printed(cluster, "status", "it takes no writes, nobody can register", 0, 3)
        await wait_printed(cluster, "doctor", "etcdctl alarm disarm", 0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cluster.start_worker)
            log = tmp_path / "worker2.log"

            async def has_said() -> bool:
                return log.exists() and bool(
                    logged(log, "no lease granted: etcd: etcdserver: mvcc")
                )

            await until(has_said, "the new worker says why it does not begin")
            assert await is_answered(cluster)
            nursery.cancel_scope.cancel()
        (said, *_) = logged(log, "no lease granted")
        assert "etcdctl alarm disarm" in said
        assert await metric(cluster, cluster.workers[0], "control_plane_connected") == 1


async def test_a_full_disk_of_etcd_is_an_etcd_that_is_away(tmp_path: Path) -> None:
    """It ends at a write, and with each start, until there is room. Its log alone needs twice 64 MB."""
    async with (
        small_disk(tmp_path / "disk", 160) as disk,
        open_cluster(tmp_path, workers=1, stores={"etcd": disk.path / "etcd"}) as cluster,
    ):
        disk.fill()
        async with open_etcd([cluster.etcd.endpoint]) as store:
            with trio.move_on_after(5), suppress(TrinamoError):
                await fill(store)

        async def is_away() -> bool:
            is_said = b"no space left on device" in cluster.etcd.log_path.read_bytes()
            connected = await metric(cluster, cluster.workers[0], "control_plane_connected")
            return is_said and connected == 0

        await until(is_away, "etcd has ended")
        assert await is_answered(cluster)
        disk.empty()
        await until(lambda: is_back(cluster), "etcd is back")
        assert await is_answered(cluster)
        assert logged(cluster.frontend.log, "answers")


async def is_back(cluster: Cluster) -> bool:
    return await metric(cluster, cluster.workers[0], "control_plane_connected") == 1


async def test_a_full_disk_of_nats_costs_remote_prefill_and_no_answer(tmp_path: Path) -> None:
    """It takes no jobs, and does not say so: one prompt waits for that, and not each."""
    async with (
        small_disk(tmp_path / "disk", 8) as disk,
        open_cluster(
            tmp_path,
            roles=["decode", "prefill"],
            engine="exact",
            stores={"nats": disk.path / "nats"},
            settings={
                "disaggregation.mode": "decode_first",
                "disaggregation.prefill_tokens_local_max": 32,
                # Half of it is for the queue to take a job.
                "disaggregation.queue_timeout_s": 20,
            },
        ) as cluster,
    ):
        decode, prefill = cluster.workers

        numbers = itertools.count()

        async def computes() -> bool:
            before = await metric(cluster, prefill, "engine_prompt_tokens_total")
            await answer(cluster, f"{next(numbers)} is in no prompt that was here before", 0)
            return await metric(cluster, prefill, "engine_prompt_tokens_total") > before

        await until(computes, "prompts are computed by the prefill worker")
        assert "take no jobs" not in await trinamo(cluster, "doctor --json", 0)

        async def takes_no_jobs() -> bool:
            # What it had deleted a moment ago is room again.
            disk.fill()
            return "work queues take no jobs: " in await trinamo(cluster, "doctor --json", 0)

        await until(takes_no_jobs, "the doctor says that nothing can be stored")

        async def is_told() -> bool:
            # The doctor's own stream was deleted a moment ago, and is room.
            disk.fill()
            texts = [f"{next(numbers)} {text}" for text in PROMPTS]
            right = await alone(texts)
            assert [await answer(cluster, text, seed) for seed, text in enumerate(texts)] == right
            return bool(logged(decode.log, "takes no jobs, so prompts are computed here"))

        await until(is_told, "the decode worker says that no jobs are taken")
        (said,) = logged(decode.log, "takes no jobs, so prompts are computed here")
        assert "queue prefill" in said
        failed = await metric(
            cluster, decode, "queue_operations_total", operation="put", result="failed"
        )
        assert 1 <= failed < len(PROMPTS)
        # nats-server writes no more into a stream that it could not write into once, until it begins anew.
        disk.empty()
        await cluster.nats.restart()
        await until(computes, "prompts are computed by the prefill worker again")


async def test_a_full_disk_under_the_log_stops_nobody_and_the_log_goes_on(tmp_path: Path) -> None:
    async with (
        open_cluster(tmp_path, workers=1) as cluster,
        small_disk(tmp_path / "disk", 1) as disk,
    ):
        log = disk.path / "frontend.log"
        words = [*PROGRAM, "frontend", "--port", "0", *places(cluster)]
        frontend = spawn(words, log_path=log)
        try:
            found: list[str] = []

            async def is_ready() -> bool:
                found[:] = re.findall(r"frontend is ready: .*(http://[\d.:]+)", log.read_text())
                return bool(found)

            async def is_answered() -> bool:
                url = f"{found[0]}/v1/chat/completions"
                return (await cluster.client.post(url, json=chat("hello"))).status_code == 200

            await until(is_ready, "the frontend is ready")
            await until(is_answered, "it knows the worker")
            disk.fill()
            before = log.read_text()
            for _ in range(20):
                assert await is_answered()
            # All but what the last block of the file had room for.
            assert log.read_text().count(ANSWERED) < 20
            disk.empty()

            async def is_written() -> bool:
                return log.read_text().count(ANSWERED) >= 21

            await until(is_written, "what waited is in the log")
            assert log.read_text().startswith(before)
        finally:
            with trio.CancelScope(shield=True):
                await terminate(frontend, grace_s=10)
