"""`trinamo config set` changes what a running cluster does, and `--reset` changes it back."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest

from tests.cli.places import Place, RunningCluster, cluster, wait_for
from tests.cli.test_completion import completed

PROCESSES = 3


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    place = Place(tmp_path_factory.mktemp("tuned"))
    with cluster(place, "--engine", "exact", "--workers", "2") as found:
        yield found


def set_live(running: RunningCluster, name: str, *words: str) -> None:
    """Set or reset it, and wait until every process has said so."""
    said = f"setting {name} is "
    before = running.place.output.count(said)
    done = running.place.run("config", "set", name, *words)
    assert done.returncode == 0, done.stderr
    wait_for(
        lambda: running.place.output.count(said) >= before + PROCESSES, 120, f"{name} in force"
    )


def wait_told(running: RunningCluster, *words: str) -> None:
    """Until `config get` prints these: it leaves out what does not answer it in time."""

    def are_told() -> bool:
        told = running.place.run("config", "get").stdout
        return all(each in told for each in words)

    wait_for(are_told, 300, f"{words} in what is told")


def ask(running: RunningCluster, request_id: str) -> int:
    body = {"prompt": "hi", "max_tokens": 2}
    headers = {"content-type": "application/json", "x-request-id": request_id}
    asked = Request(f"{running.url}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urlopen(asked, timeout=120) as response:
            return int(response.status)
    except HTTPError as error:
        with error:
            return error.code


def test_what_is_in_force_is_shown_by_process_where_it_differs(running: RunningCluster) -> None:
    """Not what is stored, which is nothing, but what each process goes by."""
    wait_told(
        running,
        'router.policy = "round_robin" (as configured)\n',
        "worker.requests_max = 256 (as configured)\n",
    )
    assert running.place.run("config", "get", "log.level").stdout == '"info"\n'
    set_live(running, "worker.requests_max", "64")
    wait_told(running, "worker.requests_max = 64 (set)\n")
    set_live(running, "worker.requests_max", "--reset")
    own = ("--set", "worker.requests_max=7", "--engine", "echo", "--model-name", "other")
    place = Place(running.place.root / "other", extra=running.place.environ)
    place.root.mkdir()
    process = place.start("worker", *own)
    try:
        wait_for(lambda: "is ready: " in place.output, 300, "the other worker's start")
        wait_told(
            running,
            "worker.requests_max = 256 (as configured: worker-1, worker-2)\n",
            "worker.requests_max = 7 (as configured there, here 256: worker ",
        )
    finally:
        process.terminate()
        process.wait(120)


def test_access_lines_can_be_switched_off_and_on(running: RunningCluster) -> None:
    set_live(running, "log.access", "none")
    assert ask(running, "unheard") == 200
    set_live(running, "log.access", "--reset")
    assert ask(running, "heard") == 200
    wait_for(lambda: "request_id=heard" in running.place.output, 120, "the line")
    assert "request_id=unheard" not in running.place.output


def test_the_level_of_the_log_changes_in_workers_too(running: RunningCluster) -> None:
    assert ask(running, "before") == 200
    set_live(running, "log.level", "debug")
    assert ask(running, "looked-at") == 200

    def worker_lines(request_id: str) -> list[str]:
        return [
            line
            for line in running.place.output.splitlines()
            if "request ended" in line and f"request_id={request_id}" in line
        ]

    wait_for(lambda: bool(worker_lines("looked-at")), 120, "the worker's line")
    set_live(running, "log.level", "--reset")
    assert worker_lines("before") == []


def test_the_bound_of_requests_changes(running: RunningCluster) -> None:
    set_live(running, "http.queue_max", "0")
    set_live(running, "http.requests_max", "1")
    parts = urlsplit(running.url)
    body = b'{"model": "exact", "prompt": "hold", "max_tokens": 1900, "stream": true}'

    def is_refused() -> bool:
        with socket.create_connection((parts.hostname, parts.port), timeout=120) as holder:
            holder.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )
            holder.recv(1)
            return ask(running, "refused") == 503

    wait_for(is_refused, 120, "a refusal")
    wait_for(lambda: ask(running, "alone") == 200, 120, "an answer")
    set_live(running, "http.requests_max", "--reset")
    set_live(running, "http.queue_max", "--reset")


def test_all_are_listed_with_what_they_may_be(running: RunningCluster) -> None:
    set_live(running, "router.policy", "least_loaded")
    wait_told(
        running,
        'router.policy = "least_loaded" (set)',
        "router.migrations_max = 3 (as configured)",
    )
    set_live(running, "router.policy", "--reset")

    wrong = running.place.run("config", "set", "router.policy", "kv")
    assert wrong.returncode != 0
    assert "router.policy" in wrong.stderr
    start = running.place.run("config", "set", "http.port", "1")
    assert "read once, at the start" in " ".join(start.stderr.split())


def test_the_help_has_examples(tmp_path: Path) -> None:
    shown = " ".join(Place(tmp_path).run("config", "--help").stdout.split())

    assert "trinamo config set router.policy" in shown


def test_the_shell_is_offered_the_models_of_the_cluster(running: RunningCluster) -> None:
    # A completion gives the cluster little time.
    wait_for(
        lambda: completed(running.place, "chat", "--model", "ex") == ["exact"],
        300,
        "the name of the model",
    )
    assert completed(running.place, "chat", "--model", "zzz") == []


def test_a_cluster_with_a_folder_of_its_own_keeps_its_settings(tmp_path: Path) -> None:
    """What is stored is signed with the cluster's secret, which must be kept with it."""
    data = tmp_path / "data"
    kept = ("--engine", "echo", "--set", f"control_plane.etcd.data_dir={data}")
    first, then = Place(tmp_path / "first"), Place(tmp_path / "then")
    for place in (first, then):
        place.root.mkdir()
    with cluster(first, *kept) as running:
        set_live(running, "worker.requests_max", "64")
    secret = data.with_name("data.secret")
    assert secret.stat().st_mode & 0o777 == 0o600
    with cluster(then, *kept) as running:
        wait_told(running, "worker.requests_max = 64 (set)\n")
