"""The example of a transport keeps what control planes promise, and the processes of a cluster share it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cli.places import Place, cluster
from tests.shipped.test_docs import blocks
from tests.sources import ROOT
from trinamo import ConfigError, RealEnv, RealTransports, load_config
from trinamo.conformance import ControlPlaneConformance
from trinamo.conformance.control import OpenControl

EXAMPLE = ROOT / "examples" / "sqlite_transport.py"
ENTRY_POINTS = """\
[trinamo.transports]
sqlite = sqlite_transport
broken = no_such_module
empty = math
"""


class TestExample(ControlPlaneConformance):
    """One file is the store of several planes."""

    @pytest.fixture
    def open_plane(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> OpenControl:
        monkeypatch.syspath_prepend(str(EXAMPLE.parent))
        open_control = __import__("sqlite_transport").open_control
        return partial(open_control, {"path": str(tmp_path / "store")}, RealEnv())


def test_the_test_of_the_page_passes(tmp_path: Path) -> None:
    (code,) = blocks(ROOT / "docs" / "write_a_transport.md", "python")
    (tmp_path / "test_sqlite_transport.py").write_text(code)
    shutil.copy(EXAMPLE, tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null"]
    done = subprocess.run(
        [*command, f"--rootdir={tmp_path}", "-k", "health or empty", "test_sqlite_transport.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "3 passed" in done.stdout, done.stdout + done.stderr


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages in which somebody's transports are installed."""
    folder = tmp_path / "packages"
    about = folder / "sqlite_transport-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sqlite-transport\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    shutil.copy(EXAMPLE, folder)
    monkeypatch.syspath_prepend(str(folder))
    return folder


async def opened(plane: str, backend: str) -> str:
    """What opening says."""
    config = load_config(environ={}, overrides={f"{plane}.backend": backend})
    transports: Any = RealTransports()
    opening = transports.open_control if plane == "control_plane" else transports.open_events
    with pytest.raises(ConfigError) as caught:
        async with opening(config, RealEnv()):
            pass
    return caught.value.message


async def test_a_name_that_nobody_offers_is_told_with_those_that_there_are(installed: Path) -> None:
    said = await opened("control_plane", "ectd")

    assert "control_plane.backend is 'ectd'" in said
    assert "etcd, memory, broken, empty, sqlite." in said
    assert "nats, memory, broken, empty, sqlite." in await opened("event_plane", "kafka")


async def test_a_transport_that_cannot_be_used_is_told_with_its_place(installed: Path) -> None:
    assert "no_such_module cannot be loaded" in await opened("control_plane", "broken")
    assert "math has no open_control(options, env)" in await opened("control_plane", "empty")
    assert "sqlite_transport has no open_events" in await opened("event_plane", "sqlite")


def test_processes_find_each_other_through_it(installed: Path, tmp_path: Path) -> None:
    """A worker and a frontend without etcd: one registers, the other finds its model, and asks it."""
    path = f"{installed}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    place = Place(tmp_path, {"PYTHONPATH": path})
    options = f"control_plane.options=path={tmp_path / 'store'}"
    settings = ("control_plane.backend=sqlite", options, "event_plane.backend=memory")
    given = [word for setting in settings for word in ("--set", setting)]

    with cluster(place, "--engine", "echo", "--workers", "2", *given) as running:
        assert len(running.children) == 3, "two workers and a frontend"
        done = place.run("chat", "say it")
        assert "say it" in done.stdout, done.stderr
        assert place.run("config", "set", "log.access", "none").returncode == 0
        told = place.run("status").stdout
        assert told.startswith("control plane: SQLite 3."), told
        assert "2 of 2" in told
        assert running.end() == 0
