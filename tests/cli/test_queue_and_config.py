"""`trinamo queue` and `trinamo config` against real servers."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio

from tests.cli.places import COMMAND, Place
from tests.servers import SessionEtcd, SessionNats
from tests.transports.nats.brokers import private_server
from trinamo.runtime.planes import QueueLimits, Settlement
from trinamo.runtime.process.settings import SETTINGS
from trinamo.transports.nats import open_nats
from trinamo.transports.security.sealing import Sealer
from trinamo.transports.servers.binaries import find_nats_server

LIMIT = "worker.requests_max"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


async def bury(url: str, name: str, *job_ids: str, secret: bytes = b"") -> None:
    async with (
        open_nats(url, sealer=Sealer([secret], random.Random(1))) as events,
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

    listed = place.run("queue", "ls", *where)
    assert f"{name}: 0 ready, 0 leased, 3 dead, oldest 0.0 s" in listed.stdout
    shown = place.run("queue", "show", name, "b", *where)
    assert "b: 1 attempts" in shown.stdout
    assert "always fails" in shown.stdout
    assert "payload of b" in shown.stdout
    once = place.run("queue", "requeue", name, "a", *where)
    assert (once.returncode, once.stdout) == (0, f"{name}: 1 dead letter queued again\n")
    again = place.run("queue", "requeue", name, "a", *where)
    assert (again.returncode, again.stderr) == (1, f"trinamo: {name} has no dead letter a\n")
    forgotten = place.run("queue", "purge", name, "--all", *where)
    assert (forgotten.returncode, forgotten.stdout) == (0, f"{name}: 2 dead letters forgotten\n")
    rows = msgspec.json.decode(place.run("queue", "ls", "--json", *where).stdout)
    (row,) = [row for row in rows if row["queue"] == name]
    assert (row["depth"], row["ready"], row["dead"]) == (1, 1, 0)


def test_who_has_the_secret_reads_dead_letters_and_nobody_else(
    place: Place, nats_server: SessionNats
) -> None:
    name, where = f"sealed-{os.getpid()}", ("--nats", nats_server.url)
    path, secret = place.root / "cluster.secret", b"0123456789abcdef0123456789abcdef"
    path.write_bytes(secret)
    path.chmod(0o600)
    trio.run(partial(bury, nats_server.url, name, "a", secret=secret))

    member = Place(place.root, {"TRINAMO_SECURITY__SECRET_FILE": str(path)})
    shown = [each.run("queue", "show", name, "a", *where).stdout for each in (member, place)]
    assert "always fails" in shown[0]
    assert "payload of a" in shown[0]
    assert "a: 1 attempts" in shown[1]
    assert not any(words in shown[1] for words in ("always", "payload"))


def test_a_job_is_put_into_a_queue_once(place: Place, nats_server: SessionNats) -> None:
    name, where = f"put-{os.getpid()}", ("--nats", nats_server.url)
    trio.run(bury, nats_server.url, name, "old")

    first = place.run("queue", "put", name, "a", '{"page": 7}', *where)
    assert (first.returncode, first.stdout) == (0, f"{name}: a added\n")
    again = place.run("queue", "put", name, "a", "other", *where)
    assert (again.returncode, again.stdout) == (0, f"{name}: a duplicate\n")
    piped = subprocess.run(
        [*COMMAND, "queue", "put", name, "b", *where],
        env=place.environ,
        input=b"\x00bytes",
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert piped.returncode == 0

    async def taken() -> list[bytes]:
        async with open_nats(nats_server.url) as events, events.work_queue(name) as queue:
            found = []
            for _ in range(2):
                job = await queue.take(wait_s=5)
                assert job is not None
                found.append(bytes(job.payload))
                await queue.ack(job)
            return found

    assert trio.run(taken) == [b'{"page": 7}', b"\x00bytes"]
    missing = place.run("queue", "put", f"{name}-none", "a", "x", *where)
    assert missing.returncode == 1


def test_a_queue_that_is_not_there_is_one_sentence(place: Place, nats_server: SessionNats) -> None:
    done = place.run("queue", "show", "nobody", "--nats", nats_server.url)
    assert (done.returncode, done.stderr) == (1, "trinamo: there is no queue nobody\n")


def test_a_broker_that_keeps_no_queues_says_what_to_start(place: Place) -> None:
    with private_server(find_nats_server()) as server:
        done = place.run("queue", "ls", "--nats", server.url)
    assert done.returncode == 1
    assert "JetStream does not answer" in done.stderr
    assert "nats-server with -js" in done.stderr


def test_names_of_queues_and_dead_letters_are_completed(
    place: Place, nats_server: SessionNats
) -> None:
    name, where = f"tab-{os.getpid()}", f"--nats {nats_server.url}"
    trio.run(bury, nats_server.url, name, "first", "second")

    assert name in complete(place, f"trinamo queue show {where} tab-")
    assert complete(place, f"trinamo queue purge {where} {name} fi") == ["first"]
    assert ask_completion(place, "trinamo queue show --nats nats://127.0.0.1:1 ta") == []


def complete(place: Place, line: str) -> list[str]:
    """What a shell that asks for the end of `line` is told, asked again where it took too long.

    A completion gives the cluster 1.5 s, which a busy machine may not answer within.
    """
    for _ in range(5):
        found = ask_completion(place, line)
        if found:
            return found
    return []


def ask_completion(place: Place, line: str) -> list[str]:
    script = "import sys; sys.argv[0] = 'trinamo'; from trinamo.cli.main import main; main()"
    asking = {"_TRINAMO_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": line}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**place.environ, **asking},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return re.findall(r'"([\w-]+)"', done.stdout)


def test_a_setting_is_got_set_refused_reset_and_watched(
    place: Place, etcd_server: SessionEtcd
) -> None:
    where = ("--etcd", etcd_server.endpoint)
    assert place.run("config", "get", LIMIT, *where).stdout == "0\n"
    watching = place.start("config", "watch", LIMIT, *where)
    try:
        wait_output(place, "0\n")
        assert place.run("config", "set", LIMIT, "64", *where).stdout == f"{LIMIT} = 64\n"
        wait_output(place, "0\n64\n")
    finally:
        watching.kill()
        watching.wait()
    refused = place.run("config", "set", LIMIT, "lots", *where)
    assert refused.returncode == 1
    assert LIMIT in refused.stderr
    refused = place.run("config", "set", "http.requests_max", "-3", *where)
    assert refused.returncode == 1
    assert "http.requests_max: Expected `int` >= 1" in refused.stderr
    assert "64 (set)" in place.run("config", "get", *where).stdout
    assert place.run("config", "set", LIMIT, "--reset", *where).returncode == 0
    told = json.loads(place.run("config", "get", "--json", *where).stdout)
    assert told == {name: setting.default for name, setting in SETTINGS.items()}


def wait_output(place: Place, text: str) -> None:
    deadline = time.monotonic() + 120
    while place.output != text:
        assert time.monotonic() < deadline, place.output
        time.sleep(0.05)
