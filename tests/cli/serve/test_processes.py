"""`trinamo frontend --processes`: real processes on one port, as clients and operators see them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import attrs
import pytest

from tests.cli.places import (
    END_TIMEOUT_S,
    START_TIMEOUT_S,
    Place,
    Running,
    children_of,
    cluster,
    is_running,
    wait_for,
)

COUNT = 3


@attrs.frozen
class Frontends:
    """Three frontends on one port, beside the cluster of `trinamo up`."""

    place: Place
    process: Running

    @property
    def url(self) -> str:
        (found,) = re.findall(r"frontend is ready: url (\S+), processes 3", self.place.output)
        return str(found)

    @property
    def pids(self) -> set[int]:
        return set(children_of(self.process.pid))

    def answering(self) -> int:
        """The pid of whoever answers on a new connection to the port."""
        return whose(self.url)

    def stream(self, tokens: int) -> socket.socket:
        """A connection on which an answer has begun to arrive."""
        parts = urlsplit(self.url)
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": "hi"}],
                "stream": True,
                "max_tokens": tokens,
                "ignore_eos": True,
            }
        )
        client = socket.create_connection((parts.hostname, parts.port), timeout=END_TIMEOUT_S)
        client.sendall(
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
        )
        seen = b""
        while b"data: " not in seen:
            piece = client.recv(65_536)
            assert piece, seen
            seen += piece
        assert b"[DONE]" not in seen
        return client


def whose(url: str) -> int:
    with urllib.request.urlopen(f"{url}/metrics", timeout=120) as response:
        page = response.read().decode()
    (pid,) = re.findall(r'trinamo_process_info{pid="(\d+)",process="frontend-\d"} 1\.0', page)
    return int(pid)


def rest_of(client: socket.socket) -> bytes:
    """All that still comes, to the end of the answer or of the connection."""
    seen = b""
    try:
        while not seen.endswith(b"0\r\n\r\n") and (piece := client.recv(65_536)):
            seen += piece
    except ConnectionResetError:
        pass
    return seen


@contextmanager
def frontends(place: Place, *arguments: str) -> Iterator[Frontends]:
    """Ready; killed at the end if the test has not ended them."""
    process = place.start("frontend", "--port", "0", "--processes", str(COUNT), *arguments)
    try:
        wait_for(
            lambda: "frontend is ready" in place.output or process.poll() is not None,
            START_TIMEOUT_S,
            "the frontends' start",
        )
        assert process.poll() is None, place.output
        yield Frontends(place, process)
    finally:
        pids = children_of(process.pid)
        process.kill()
        process.wait()
        wait_for(lambda: not any(map(is_running, pids)), END_TIMEOUT_S, "the children's end")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Where a cluster runs whose engine takes its time: some 10 ms a token."""
    here = Place(tmp_path_factory.mktemp("cluster"))
    with cluster(here, "--engine", "mocker", "--workers", "1", "--frontend-processes", "2"):
        yield here


@pytest.fixture
def three(place: Place, tmp_path: Path) -> Iterator[Frontends]:
    """Three more frontends of that cluster."""
    beside = Beside(tmp_path, place)
    with frontends(beside) as found:
        for pid in found.pids:
            wait_for(partial(is_ready, beside, pid), 120, "the models' arrival")
        yield found


class Beside(Place):
    """A place with output of its own, in which the cluster of another runs."""

    def __init__(self, root: Path, other: Place) -> None:
        super().__init__(
            root, {name: other.environ[name] for name in ("TMPDIR", "XDG_RUNTIME_DIR")}
        )


def looks(place: Place) -> dict[int, dict[str, object]]:
    """What `trinamo status` knows of frontends that share a port, by pid."""
    told = place.run("status", "--json")
    if not told.stdout:
        # A busy etcd did not answer it in time.
        assert told.returncode, told.stderr
        return {}
    return {each["pid"]: each for each in json.loads(told.stdout)["frontends"]}


def is_ready(place: Place, pid: int) -> bool:
    return looks(place).get(pid, {}).get("status") == "ready"


def test_requests_spread_and_each_process_shows_its_own_numbers(three: Frontends) -> None:
    """Within 200 connections all three have answered, unless a coin of three sides is bent."""
    answered = {three.answering() for _ in range(200)}
    assert answered == three.pids
    assert len(answered) == COUNT
    wait_for(lambda: answered <= looks(three.place).keys(), 300, "all of them in the status")
    found = looks(three.place)
    mine = {pid: found[pid] for pid in answered}
    assert {each["name"] for each in mine.values()} == {"frontend-1", "frontend-2", "frontend-3"}
    assert {each["url"] for each in mine.values()} == {three.url}
    for pid, each in mine.items():
        assert whose(str(each["status_url"])) == pid
    # Those of `trinamo up` beside them.
    assert len(found) == COUNT + 2


def test_one_that_is_killed_takes_its_clients_along_and_nobody_else(three: Frontends) -> None:
    before = three.pids
    with three.stream(100_000) as client:
        busy = [pid for pid, each in looks(three.place).items() if each["in_flight"]]
        (victim,) = set(busy) & three.pids
        os.kill(victim, signal.SIGKILL)
        assert b"[DONE]" not in rest_of(client)
    wait_for(lambda: "starting it again" in three.place.output, 120, "the word of it")
    # The port is never nobody's: the others answer all the while.
    assert all(three.answering() != victim for _ in range(20))
    wait_for(lambda: "is back" in three.place.output, 120, "its return")
    (newcomer,) = three.pids - before
    assert three.pids == before - {victim} | {newcomer}
    wait_for(lambda: three.answering() == newcomer, 120, "its part of the work")
    # Its file names it, though nobody looks at it from time to time.
    wait_for(lambda: newcomer in looks(three.place), 120, "its place in the file")


def test_sigterm_drains_what_is_under_way_and_leaves_nothing(three: Frontends) -> None:
    pids, url = three.pids, urlsplit(three.url)
    with three.stream(100) as client:
        three.process.send_signal(signal.SIGTERM)
        rest = rest_of(client)
    assert b"data: [DONE]" in rest, rest[-300:]
    assert three.process.wait(END_TIMEOUT_S) == 0, three.place.output
    assert not any(map(is_running, pids))
    assert not looks(three.place).keys() & pids
    assert "Traceback" not in three.place.output
    with socket.socket() as probe:
        assert probe.connect_ex((url.hostname, url.port)) != 0


def test_a_port_that_others_share_is_not_joined_by_mistake(
    three: Frontends, tmp_path: Path
) -> None:
    """Else two clusters on one machine would answer each other's requests."""
    (tmp_path / "other").mkdir()
    refused = Beside(tmp_path / "other", three.place).run(
        "frontend", "--port", str(urlsplit(three.url).port), "--processes", "2"
    )
    assert refused.returncode == 2
    assert "cannot listen on 127.0.0.1" in refused.stderr


def test_both_signals_end_everything_at_once(three: Frontends) -> None:
    pids = three.pids
    with three.stream(100_000):
        three.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "shutting down in order" in three.place.output, 120, "the first signal")
        three.process.send_signal(signal.SIGTERM)
        three.process.wait(END_TIMEOUT_S)
    wait_for(lambda: not any(map(is_running, pids)), 120, "the children's end")
