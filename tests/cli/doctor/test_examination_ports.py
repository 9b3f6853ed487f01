"""What `trinamo doctor` says of the HTTP port, beside a frontend of one's own."""

from __future__ import annotations

import socket

import pytest

from trinamo.cli.doctor import examination
from trinamo.cli.doctor.finding import FindingVerdict
from trinamo.cli.running.frontends_file import FrontendsFile
from trinamo.cli.running.locating import Target
from trinamo.runtime.config.config import load_config


def test_a_port_that_an_own_frontend_serves_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        overrides = {"http.host": "127.0.0.1", "http.port": str(port)}
        target = Target(load_config(environ={}, overrides=overrides), None, is_named=False)
        monkeypatch.setattr(examination, "find_frontends", list)
        assert examination._http_port(target).verdict is FindingVerdict.WARNING
        own = FrontendsFile(7, 1, f"http://127.0.0.1:{port}")
        monkeypatch.setattr(examination, "find_frontends", lambda: [own])
        found = examination._http_port(target)

    assert found.verdict is FindingVerdict.GOOD
    assert "pid 7" in found.text
