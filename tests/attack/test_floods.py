"""What a stranger can do as often as it likes costs a bounded number of lines."""

from __future__ import annotations

import json
import resource
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.cli.places import Place, RunningCluster, cluster, wait_for
from trinamo.runtime.logs.setup import BURST_LINES

CONNECTIONS = 400
LINES_MAX = 2 * BURST_LINES
"""Of one process about one flood: a burst, what comes in the next seconds, and the count."""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningCluster]:
    with cluster(Place(tmp_path), "--engine", "echo", "--workers", "1") as running:
        yield running


def lines_of(running: RunningCluster, name: str) -> list[str]:
    return [line for line in running.place.output.splitlines() if line.startswith(name)]


def is_live(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/live", timeout=120) as response:
        return bool(response.status == 200)
    return False


def talk_nonsense(host: str, port: int) -> None:
    for _ in range(CONNECTIONS):
        with socket.create_connection((host, port), timeout=120) as client, suppress(OSError):
            client.sendall(b"\x1b[2J\r\n\0 nonsense\n" * 4)


def test_nonsense_on_the_ports_is_no_flood_of_lines(running: RunningCluster) -> None:
    """Before: a line for each of 8,000 connections."""
    found = json.loads(running.place.run("status", "--json").stdout)
    host, _, port = found["instances"][0]["transports"]["tcp"].rpartition(":")
    frontend = urlsplit(running.url)
    counts = {name: len(lines_of(running, name)) for name in ("worker-1", "frontend")}

    talk_nonsense(host, int(port))
    talk_nonsense(frontend.hostname or "", frontend.port or 0)

    assert is_live(running.url)
    assert running.end() == 0
    for name, count in counts.items():
        assert len(lines_of(running, name)) - count <= LINES_MAX
    assert "\x1b" not in running.place.output


def test_running_out_of_descriptors_is_told_and_is_no_flood_of_lines(
    running: RunningCluster,
) -> None:
    """Before: a traceback for each try to accept."""
    parts = urlsplit(running.url)
    [pid] = [pid for pid, line in running.children.items() if " frontend " in line]
    is_open = len([*Path(f"/proc/{pid}/fd").iterdir()])
    before = len(lines_of(running, "frontend"))
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (is_open + 10, hard))

    with ExitStack() as held:
        for _ in range(60):
            where = (parts.hostname or "", parts.port or 0)
            held.enter_context(socket.create_connection(where, timeout=120))
        wait_for(lambda: len(lines_of(running, "frontend")) > before, 120, "a word about it")

    wait_for(lambda: is_live(running.url), 120, "an answer after the flood")
    assert running.end() == 0
    assert len(lines_of(running, "frontend")) - before <= LINES_MAX
