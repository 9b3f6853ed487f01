"""`trinamo queue` and `trinamo config` against real servers."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import msgspec
import pytest
import trio

from tests.cli.running import COMMAND, Place
from tests.servers import SessionEtcd, SessionNats
from trinamo.runtime.planes import QueueLimits, Settlement
from trinamo.transports.nats import open_nats

pytestmark = [pytest.mark.slow, pytest.mark.services]
THRESHOLD = "disaggregation.prefill_tokens_local_max"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def run(place: Place, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        env=place.environ,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


async def bury(url: str, name: str, *job_ids: str) -> None:
    async with (
        open_nats(url) as events,
        events.work_queue(name, limits=QueueLimits(attempts_max=1)) as queue,
    ):
        for job_id in job_ids:
            await queue.put(job_id, b"payload of " + job_id.encode())
            job = await queue.take(wait_s=5)
            assert job is not None
            assert await queue.nak(job, reason="always fails") is Settlement.DEAD


def test_dead_letters_are_listed_shown_requeued_and_purged(
    place: Place, nats_server: SessionNats
) -> None:
    name, where = f"cli-{os.getpid()}", ("--nats", nats_server.url)
    trio.run(bury, nats_server.url, name, "a", "b", "c")

    listed = run(place, "queue", "ls", *where)
    assert f"{name}: 0 jobs, 0 of them taken, oldest 0.0 s, 3 dead" in listed.stdout
    shown = run(place, "queue", "show", name, "b", *where)
    assert "b: 1 attempts" in shown.stdout
    assert "always fails" in shown.stdout
    assert "payload of b" in shown.stdout
    assert run(place, "queue", "requeue", name, "a", *where).returncode == 0
    again = run(place, "queue", "requeue", name, "a", *where)
    assert (again.returncode, again.stderr) == (1, f"trinamo: {name} has no dead letter a\n")
    assert run(place, "queue", "purge", name, "--all", *where).returncode == 0
    rows = msgspec.json.decode(run(place, "queue", "ls", "--json", *where).stdout)
    (row,) = [row for row in rows if row["queue"] == name]
    assert (row["depth"], row["dead"]) == (1, 0)


def test_a_queue_that_is_not_there_is_one_sentence(place: Place, nats_server: SessionNats) -> None:
    done = run(place, "queue", "show", "nobody", "--nats", nats_server.url)
    assert (done.returncode, done.stderr) == (1, "trinamo: there is no queue nobody\n")


def test_a_setting_is_got_set_refused_reset_and_watched(
    place: Place, etcd_server: SessionEtcd
) -> None:
    where = ("--etcd", etcd_server.endpoint)
    assert run(place, "config", "get", THRESHOLD, *where).stdout == "512\n"
    watching = place.start("config", "watch", THRESHOLD, *where)
    try:
        wait_output(place, "512\n")
        assert run(place, "config", "set", THRESHOLD, "64", *where).stdout == f"{THRESHOLD} = 64\n"
        wait_output(place, "512\n64\n")
    finally:
        watching.kill()
        watching.wait()
    refused = run(place, "config", "set", THRESHOLD, "lots", *where)
    assert refused.returncode == 1
    assert THRESHOLD in refused.stderr
    assert "64 (set)" in run(place, "config", "get", *where).stdout
    assert run(place, "config", "set", THRESHOLD, "--reset", *where).returncode == 0
    assert run(place, "config", "get", "--json", *where).stdout == f'{{"{THRESHOLD}":512}}\n'


def wait_output(place: Place, text: str) -> None:
    deadline = time.monotonic() + 20
    while place.output != text:
        assert time.monotonic() < deadline, place.output
        time.sleep(0.05)
