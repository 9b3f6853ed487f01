"""Nobody reads what `trinamo up` says, or it is stopped: the cluster serves, and signals are heard.

Each test floods the log with refused requests, more than any pipe holds.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tests.cli.places import COMMAND, END_TIMEOUT_S, Place, cluster, is_running, terminal, wait_for
from trinamo.transports.assembly.run_file import RunFile, _parse

ANSWER_TIMEOUT_S = 120


def flood(url: str, model: str, *, status: bytes, count: int = 1000) -> None:
    """So many requests over one connection; each has an answer of this status."""
    parts = urlsplit(url)
    body = json.dumps({"prompt": "x", "model": model, "max_tokens": 1}).encode()
    request = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: {len(body)}\r\n"
        "Content-Type: application/json\r\n\r\n"
    ).encode() + body
    where = (parts.hostname or "", parts.port or 0)
    with socket.create_connection(where, timeout=ANSWER_TIMEOUT_S) as client:
        answers = client.makefile("rb")
        for _ in range(count):
            client.sendall(request)
            line = answers.readline()
            assert line.split()[1] == status, line
            length = 0
            while (line := answers.readline()) != b"\r\n":
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            answers.read(length)


NASTY = "m" * 200 + "\n\x1b[2J"


def assert_serves(url: str) -> None:
    with urllib.request.urlopen(f"{url}/live", timeout=ANSWER_TIMEOUT_S) as response:
        assert response.status == 200
    body = json.dumps({"prompt": "still here", "max_tokens": 8}).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:
        assert json.load(response)["choices"][0]["text"]


def run_file(place: Place) -> RunFile | None:
    """What a cluster that cannot be heard has written about itself."""
    for path in (place.root / "run").rglob("*.json"):
        run = _parse(json.loads(path.read_text()))
        if run.state == "ready":
            return run
    return None


@contextmanager
def unread_cluster(place: Place) -> Iterator[tuple[subprocess.Popen[bytes], RunFile]]:
    """`trinamo up` at `debug`, its output a pipe of one page that nobody reads."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    process = subprocess.Popen(
        [
            *COMMAND,
            "up",
            "--port",
            "0",
            "--engine",
            "echo",
            "--workers",
            "1",
            "--set",
            "log.level=debug",
        ],
        env=place.environ,
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=writer,
        process_group=0,
        cwd=place.root,
    )
    os.close(writer)
    try:
        wait_for(lambda: run_file(place) is not None, 300, "the cluster's start")
        run = run_file(place)
        assert run is not None
        yield process, run
    finally:
        process.kill()
        process.wait()
        os.close(reader)


def test_a_cluster_whose_output_is_not_read_serves_and_ends(tmp_path: Path) -> None:
    """Before: everything hung after 524 bad requests, and SIGINT was not heard for a minute."""
    place = Place(tmp_path)
    with unread_cluster(place) as (process, run):
        flood(run.url, NASTY, status=b"404")
        assert_serves(run.url)

        process.send_signal(signal.SIGINT)
        assert process.wait(END_TIMEOUT_S) == 0

        wait_for(
            lambda: not any(is_running(p.pid) for p in run.processes), 120, "the children's end"
        )
    assert place.leftovers == []


def test_a_cluster_whose_up_is_stopped_serves_and_then_tells_what_it_dropped(
    tmp_path: Path,
) -> None:
    """Before: nothing answered after 274 bad requests, until somebody typed `fg`."""
    place = Place(tmp_path)
    with cluster(
        place, "--engine", "echo", "--workers", "1", "--set", "log.level=debug"
    ) as running:
        url = running.url
        running.process.send_signal(signal.SIGSTOP)
        flood(url, NASTY, status=b"404", count=100)
        # At `debug` each has a line, and no line at `debug` is held back.
        flood(url, "echo", status=b"200", count=2000)
        assert_serves(url)
        running.process.send_signal(signal.SIGCONT)

        wait_for(lambda: "lines were dropped" in place.output, 120, "the line about the losses")
        assert lost_lines(url) > 0
        assert running.end() == 0
    assert "\x1b" not in place.output


def test_a_cluster_whose_terminal_is_not_read_serves_and_ends(tmp_path: Path) -> None:
    """The live table draws eight times a second; a terminal takes some kilobytes.

    Each line above it draws it anew, which takes `up` 12 ms of a processor: few are more than enough.
    """
    place = Place(tmp_path)
    arguments = ("up", "--engine", "echo", "--workers", "1", "--port", "0")
    with terminal(place, *arguments) as (process, shown, _):
        wait_for(lambda: run_file(place) is not None, 300, "the cluster's start")
        run = run_file(place)
        assert run is not None
        flood(run.url, NASTY, status=b"404", count=200)
        assert_serves(run.url)

        process.send_signal(signal.SIGINT)
        assert process.wait(END_TIMEOUT_S) == 0
        assert shown()
    assert place.leftovers == []


def lost_lines(url: str) -> float:
    # The exposition may be a second old.
    time.sleep(1.1)
    with urllib.request.urlopen(f"{url}/metrics", timeout=ANSWER_TIMEOUT_S) as response:
        text = response.read().decode()
    line = next(
        each for each in text.splitlines() if 'log_lines_lost_total{reason="unread"}' in each
    )
    return float(line.rpartition(" ")[2])
