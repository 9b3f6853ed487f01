"""Strangers that take nothing, or send halves of something, from many connections at once.

What one connection may cost is bounded, and so is what all of them may cost together: beside each
crowd a client is served, from the same address, and the frontend stays small.
"""

from __future__ import annotations

import json
import socket
import ssl
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit

import attrs
import pytest

from tests.certificates import Authority
from tests.cli.places import Place, RunningCluster, cluster, rss_bytes
from tests.transports.http.http2.client import DATA, HEADERS, SETTINGS, frame

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
NO_WINDOW = b"\x00\x04\x00\x00\x00\x00"
HEAD = b"\x87\x01\x09localhost"
GET_MODELS = b"\x82\x04\x0a/v1/models" + HEAD
POST = b"\x83\x04\x0f/v1/completions" + HEAD + b"\x0f\x10\x10application/json"
WHOLE, HALF = 5, 4
BOUNDS = {
    "backlogs_bytes_max": 4 << 20,
    "bodies_max": 200,
    "requests_max": 100,
    "queue_max": 0,
    "write_timeout_s": 60,
    "body_timeout_s": 60,
}


@attrs.frozen
class Attacked:
    """A cluster whose frontend speaks TLS, and who attacks it."""

    running: RunningCluster
    trust: ssl.SSLContext
    held: ExitStack

    @property
    def rss(self) -> int:
        [pid] = [pid for pid, line in self.running.children.items() if " frontend " in line]
        return rss_bytes(pid)

    def connect(self, protocol: str) -> ssl.SSLSocket:
        parts = urlsplit(self.running.url)
        plain = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=120)
        self.trust.set_alpn_protocols([protocol])
        return self.held.enter_context(self.trust.wrap_socket(plain, server_hostname="127.0.0.1"))

    def open_http2(self, settings: bytes, frames: bytes) -> ssl.SSLSocket:
        client = self.connect("h2")
        client.sendall(PREFACE + frame(SETTINGS, 0, settings) + frames)
        return client

    def complete(self) -> int:
        """The status of an honest request."""
        self.trust.set_alpn_protocols(["http/1.1"])
        request = urllib.request.Request(
            f"{self.running.url}/v1/completions",
            json.dumps({"prompt": "a b", "max_tokens": 2}).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60, context=self.trust) as response:
                return int(response.status)
        except HTTPError as error:
            return error.code


@pytest.fixture
def attacked(tmp_path: Path) -> Iterator[Attacked]:
    authority = Authority.make(tmp_path / "authority")
    certificate, key = authority.sign("server")
    tls = {"certificate_file": str(certificate), "key_file": str(key)}
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"http": {**BOUNDS, "tls": tls}}))
    place = Place(tmp_path, {"SSL_CERT_FILE": str(authority.ca_file)})
    trust = ssl.create_default_context(cafile=str(authority.ca_file))
    more = ("--engine", "echo", "--workers", "1", "--config", str(config))
    with cluster(place, *more) as running, ExitStack() as held:
        yield Attacked(running, trust, held)


def test_crowds_cost_themselves_and_nobody_else(attacked: Attacked) -> None:
    """Before: 1.5 GB for 250 connections that take nothing, and a 503 for all beside half bodies."""
    assert attacked.complete() == 200
    before = attacked.rss

    gets = b"".join(frame(HEADERS, each, GET_MODELS, WHOLE) for each in range(1, 241, 2))
    for _ in range(30):
        attacked.open_http2(NO_WINDOW, gets)
        assert attacked.complete() == 200
    assert attacked.rss - before < 35 << 20
    attacked.held.close()

    halves = b"".join(
        frame(HEADERS, each, POST, HALF) + frame(DATA, each, b"{") for each in range(1, 241, 2)
    )
    half = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\ncontent-type: application/json\r\n\r\n{"
    for _ in range(5):
        attacked.open_http2(b"", halves)
        for _ in range(50):
            attacked.connect("http/1.1").sendall(half)
        assert attacked.complete() == 200
    assert attacked.rss - before < 60 << 20

    crumbs = frame(HEADERS, 1, GET_MODELS + b"\x40\x01a\x01b" + b"\xbe" * 750, WHOLE)
    told = [attacked.open_http2(b"", crumbs) for _ in range(20)]
    assert attacked.complete() == 200
    for client in told:
        said = b""
        while data := client.recv(65_536):
            said += data
        assert b"more than 100 headers" in said
    # One line for each kind of refusal, and a count: no flood.
    assert attacked.running.place.output.count("more than 100 headers") <= 25
