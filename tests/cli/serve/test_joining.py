"""Processes started beside a running `trinamo up` belong to it; strangers do not."""

from __future__ import annotations

import json
import re
import signal
import socket
import stat
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.cli.places import Place, RunningCluster, cluster, wait_for
from tests.servers import listening_ports


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """A cluster of one echo worker, which the tests leave as it was."""
    place = Place(tmp_path_factory.mktemp("home"))
    with cluster(place, "--engine", "echo", "--workers", "1") as running:
        yield running


@contextmanager
def beside(home: RunningCluster, name: str, *arguments: str) -> Iterator[Place]:
    """A process started next to the cluster by the same user; yields once it is ready."""
    place = Place(home.place.root / name, extra=home.place.environ)
    place.root.mkdir()
    process = place.start(*arguments)
    try:
        wait_for(
            lambda: "is ready: " in place.output or process.poll() is not None,
            60,
            f"{name}'s start",
        )
        assert process.poll() is None, place.output
        yield place
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def ask(url: str, model: str, text: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.load(response)
    assert answer["model"] == model
    return str(answer["choices"][0]["message"]["content"])


def models(url: str) -> set[str]:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=120) as response:
        return {each["id"] for each in json.load(response)["data"]}


def run_file(home: RunningCluster) -> tuple[Path, dict[str, Any]]:
    (path,) = (home.place.root / "run").rglob("*.json")
    return path, json.loads(path.read_text())


def test_a_second_worker_answers_through_the_frontend_that_runs(home: RunningCluster) -> None:
    with beside(home, "second", "worker", "--engine", "echo", "--model-name", "second") as place:
        assert f"joins the cluster of `trinamo up`, pid {home.process.pid}" in place.output
        wait_for(lambda: "second" in models(home.url), 120, "the second model")
        assert ask(home.url, "second", "are you there?") == "are you there?"
        assert ask(home.url, "echo", "and you?") == "and you?"
        status = json.loads(home.place.run("status", "--json").stdout)
        assert sorted(each["metadata"]["model"] for each in status["instances"]) == [
            "echo",
            "second",
        ]
    wait_for(lambda: "second" not in models(home.url), 120, "the second model's end")


def test_a_second_frontend_serves_the_same_models(home: RunningCluster) -> None:
    with beside(home, "frontend", "frontend", "--port", "0") as place:
        found = re.search(r"url (http://[^\s,]+)", place.output)
        assert found is not None
        wait_for(lambda: "echo" in models(found[1]), 120, "the models")
        assert ask(found[1], "echo", "by the side door") == "by the side door"


def test_a_frontend_with_upstreams_of_its_own_joins_nothing(home: RunningCluster) -> None:
    asks = ("frontend", "--port", "0", "--upstream", home.url + "/v1")
    with beside(home, "one-hop", *asks) as place:
        assert "joins" not in place.output
        found = re.search(r"url (http://[^\s,]+)", place.output)
        assert found is not None
        wait_for(lambda: "echo" in models(found[1]), 120, "the models")


def test_an_upstream_that_no_engine_asks_is_refused(home: RunningCluster) -> None:
    done = home.place.run("worker", "--engine", "exact", "--upstream", home.url + "/v1")

    assert done.returncode == 2
    assert "--upstream is asked by --engine openai, and the engine is exact" in done.stderr


@pytest.mark.parametrize("words", [("queue", "ls"), ("config", "get"), ("doctor",), ("status",)])
def test_every_command_that_looks_at_the_cluster_gets_in(
    home: RunningCluster, words: tuple[str, ...]
) -> None:
    def gets_in() -> bool:
        # Each has a patience of its own, which a busy machine may exceed; to be refused is for ever.
        return home.place.run(*words).returncode == 0

    wait_for(gets_in, 300, f"trinamo {' '.join(words)} is let in")


def test_a_cluster_is_joined_by_the_address_of_its_etcd(home: RunningCluster) -> None:
    _, written = run_file(home)

    done = home.place.run("queue", "ls", "--nats", written["nats"][0])
    assert done.returncode == 0, done.stderr
    done = home.place.run("status", "--etcd", written["etcd"][0])
    assert done.returncode == 0, done.stderr


def test_what_opens_the_cluster_is_told_to_nobody_else(home: RunningCluster) -> None:
    """Not in a command line, not in a log, and in files only for this user."""
    path, written = run_file(home)
    settings = written["settings"]
    token = settings["event_plane.nats.token"]
    secret_file = Path(settings["security.secret_file"])
    secret = secret_file.read_text().strip()

    assert len(token) == len(secret) == 64
    lines = [(each / "cmdline").read_text("utf-8", "replace") for each in home_processes(home)]
    told = [home.place.output, *lines, home.place.run("status", "--json").stdout]
    told.append(home.place.run("worker", "--print-config").stdout)
    assert len(lines) == 5
    assert not any(word in text for word in (token, secret) for text in told)
    assert "token: '***'" in told[-1]
    for private, mode in ((path, 0o600), (path.parent, 0o700), (secret_file, 0o600)):
        assert stat.S_IMODE(private.stat().st_mode) == mode
    assert stat.S_IMODE(secret_file.parent.stat().st_mode) == 0o700


def home_processes(home: RunningCluster) -> list[Path]:
    return [Path("/proc", str(pid)) for pid in (home.process.pid, *home.children)]


def test_a_stranger_gets_no_word_out_of_nats(home: RunningCluster) -> None:
    _, written = run_file(home)
    host, port = written["nats"][0].removeprefix("nats://").split(":")

    with socket.create_connection((host, int(port)), timeout=120) as stranger:
        stranger.sendall(b"CONNECT {}\r\nSUB > 1\r\nPING\r\n")
        answer = b"".join(iter(lambda: stranger.recv(4096), b""))

    assert b"-ERR 'Authorization Violation'" in answer
    assert b"PONG" not in answer


def test_no_port_of_the_cluster_takes_a_key_by_http(home: RunningCluster) -> None:
    """What a page of any origin could send: there is no etcd behind any port."""
    ports = [port for each in home_processes(home) for port in listening_ports(int(each.name))]
    _, written = run_file(home)

    assert all(each.startswith("unix:") for each in written["etcd"])
    assert urlsplit(home.url).port in ports
    for port in ports:
        with socket.create_connection(("127.0.0.1", port), timeout=120) as page:
            body = b'{"key": "YQ==", "value": "YQ=="}'
            page.sendall(
                b"POST /v3/kv/put HTTP/1.1\r\nHost: evil\r\nContent-Type: text/plain\r\n"
                b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            try:
                answer = page.recv(4096)
            except ConnectionResetError:
                continue
        assert b" 200 " not in answer.partition(b"\r\n")[0]
