"""SIGTERM to a worker and a frontend that are still starting; real processes."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from tests.cli.places import END_TIMEOUT_S, Place
from tests.servers import SessionNats


@pytest.mark.parametrize(
    "role", [("worker", "--engine", "exact"), ("frontend", "--port", "0")], ids=lambda role: role[0]
)
def test_sigterm_ends_a_start_that_waits_for_etcd(
    tmp_path: Path, nats_server: SessionNats, role: tuple[str, ...]
) -> None:
    """It used to be noted, and nothing more, until etcd answered."""
    place = Place(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        etcd = f"127.0.0.1:{silent.getsockname()[1]}"
        process = place.start(*role, "--etcd", etcd, "--nats", nats_server.url)
        try:
            # It has come so far as to ask etcd, which takes the connection and says nothing.
            connection, _ = silent.accept()
            with connection:
                process.send_signal(signal.SIGTERM)
                code = process.wait(END_TIMEOUT_S)
        finally:
            process.kill()
            process.wait()

    assert code == 0, place.output
    assert "SIGTERM: ending the start" in place.output
    assert "Traceback" not in place.output
