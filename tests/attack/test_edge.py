"""Strangers at the HTTP port of a cluster of real processes: memory, connections, garbage.

Bounded in time and load: a few hundred megabytes over loopback, and two thousand connections.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any, Self
from urllib.parse import urlsplit

import attrs
import pytest

from tests.cli.places import Place, RunningCluster, cluster, rss_bytes

MEGABYTE = 1 << 20
CONNECTIONS_MAX = 512
BODIES_BYTES_MAX = 64 * MEGABYTE
JSON_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n"
)
TOKENS = b'{"prompt":[' + b"1," * (2 * MEGABYTE - 100) + b"1]}"
TEXT = json.dumps({"prompt": "a" * (4 * MEGABYTE - 100)}).encode()


@attrs.define
class Watch:
    """The resident memory of the frontend and the worker: before, at most, and afterwards."""

    pids: list[int]
    before: int = 0
    peak: int = 0
    after: int = 0

    def now(self) -> int:
        return sum(rss_bytes(pid) for pid in self.pids)

    def __enter__(self) -> Self:
        self.before = self.peak = self.now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        deadline = time.monotonic() + 60
        self.after = self.now()
        while self.after > self.before + 30 * MEGABYTE and time.monotonic() < deadline:
            time.sleep(0.1)
            self.after = self.now()

    _stop: threading.Event = attrs.field(init=False)
    _thread: threading.Thread = attrs.field(init=False)

    def _look(self) -> None:
        while not self._stop.wait(0.01):
            self.peak = max(self.peak, self.now())


@attrs.frozen
class Target:
    """The cluster that is attacked, and what its strangers do."""

    running: RunningCluster

    @property
    def where(self) -> tuple[str, int]:
        parts = urlsplit(self.running.url)
        return parts.hostname or "", parts.port or 0

    def connect(self, data: bytes = b"") -> socket.socket:
        stream = socket.create_connection(self.where, timeout=120)
        stream.sendall(data)
        return stream

    def watch(self) -> Watch:
        children = self.running.children.items()
        return Watch([pid for pid, line in children if " frontend " in line or " worker " in line])

    def live(self) -> bool:
        with urllib.request.urlopen(f"{self.running.url}/live", timeout=120) as response:
            return bool(response.status == 200)

    def complete(self) -> bool:
        body = json.dumps({"prompt": "hi", "max_tokens": 2}).encode()
        request = urllib.request.Request(
            f"{self.running.url}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answer: dict[str, Any] = json.load(response)
        return bool(answer["usage"]["completion_tokens"] == 2)

    def post_all(self, body: bytes, count: int) -> list[bytes]:
        """`count` clients send `body` at once; the status each was told."""
        statuses: list[bytes] = []

        def post() -> None:
            with self.connect(JSON_HEAD % len(body)) as stream:
                # Refused in the middle of it, the rest may meet a closed connection.
                with contextlib.suppress(OSError):
                    stream.sendall(body)
                statuses.append(stream.recv(12)[9:])

        threads = [threading.Thread(target=post) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return statuses


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A cluster whose bounds are low, so that an attack on them is cheap."""
    settings = (
        f"http.connections_max={CONNECTIONS_MAX}",
        f"http.bodies_bytes_max={BODIES_BYTES_MAX}",
    )
    options = [word for setting in settings for word in ("--set", setting)]
    place = Place(tmp_path_factory.mktemp("attacked"))
    with cluster(place, "--engine", "exact", "--workers", "1", *options) as running:
        target = Target(running)
        assert target.complete()
        yield target
        assert target.complete()
        assert "Traceback" not in place.output


@pytest.mark.parametrize("clients", [8, 24])
def test_a_burst_of_long_prompts_costs_its_bytes_and_they_come_back(
    target: Target, clients: int
) -> None:
    """Two million token ids each, all refused by their number, or for want of room for so many."""
    with target.watch() as watch:
        statuses = target.post_all(TOKENS, clients)
    assert len(statuses) == clients
    has_room = clients * len(TOKENS) < BODIES_BYTES_MAX
    assert set(statuses) <= ({b"400"} if has_room else {b"400", b"503"})
    assert watch.peak < watch.before + BODIES_BYTES_MAX + 100 * MEGABYTE
    assert watch.after < watch.before + 30 * MEGABYTE


def test_bodies_that_are_held_are_bounded_together(target: Target) -> None:
    """Each is all but complete; who finds no room is told so, and short requests are served."""
    with target.watch() as watch, contextlib.ExitStack() as stack:
        for _ in range(48):
            stream = stack.enter_context(target.connect(JSON_HEAD % len(TEXT)))
            with contextlib.suppress(OSError):
                stream.sendall(TEXT[:-1])
        assert target.complete()
        held = watch.now()
    assert held < watch.before + BODIES_BYTES_MAX + 60 * MEGABYTE
    assert watch.after < watch.before + 40 * MEGABYTE


WAITING = {
    "idle": b"",
    "half a head": b"GET /live HTTP/1.1\r\nHost: loc",
    "an HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
    "half a body": JSON_HEAD % 1000 + b'{"prompt":',
}


@pytest.mark.parametrize("kind", WAITING)
def test_connections_that_wait_keep_nobody_out(target: Target, kind: str) -> None:
    """Half as many again as may be open at once."""
    with contextlib.ExitStack() as stack:
        for number in range(CONNECTIONS_MAX * 3 // 2):
            with contextlib.suppress(ConnectionError):
                stack.enter_context(target.connect(WAITING[kind]))
            if number % 100 == 0:
                assert target.live()
        assert target.live()
        assert target.complete()


def test_http2_floods_hold_nobody_up(target: Target) -> None:
    """SETTINGS without an end over four connections: each is closed at its preface."""
    flood = WAITING["an HTTP/2 preface"] + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" * 100_000
    for _ in range(4):
        with target.connect() as stream:
            with contextlib.suppress(ConnectionError):
                stream.sendall(flood)
            with contextlib.suppress(ConnectionError):
                assert stream.recv(12) in (b"HTTP/1.1 505", b"")
        assert target.live()


def test_garbage_leaves_no_trace_but_its_refusal(target: Target) -> None:
    """Requests broken at random places, from a fixed seed: no 5xx, no traceback, no leak."""
    dice = random.Random(20)
    whole = JSON_HEAD % 30 + b'{"prompt":"hi","max_tokens":1}'
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(dice.randint(1, 6)):
            place = dice.randrange(len(data))
            data[place : place + dice.randint(0, 3)] = dice.randbytes(dice.randint(0, 3))
        with target.connect(bytes(data)) as stream:
            stream.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                answer = stream.recv(12)
                assert answer[:9] in (b"", b"HTTP/1.1 ")
                assert answer[9:10] != b"5" or answer[9:] in (b"501", b"505"), bytes(data)
    assert target.live()
