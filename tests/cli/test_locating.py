"""Which cluster a command means when none is named."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from trinamo.cli.locating import locate
from trinamo.cli.options import Sources
from trinamo.cli.run_file import RunFile, process_started


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything below a folder of the test's own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def younger() -> Iterator[int]:
    """The pid of a process that started after this one."""
    with subprocess.Popen(["sleep", "60"]) as child:
        yield child.pid
        child.kill()


def write_run(pid: int, port: int) -> RunFile:
    run = RunFile(
        pid=pid,
        started=process_started(pid) or 0,
        state="ready",
        url=f"http://127.0.0.1:{port}",
        etcd=(f"127.0.0.1:{port + 1}",),
        nats=(f"nats://127.0.0.1:{port + 2}",),
    )
    run.write()
    return run


SOURCES = Sources(None, None, {})


def test_the_only_cluster_is_meant_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(os.getpid(), 1000)
    target = locate(SOURCES)
    assert target.run == run
    assert target.config.control_plane.etcd.endpoints == run.etcd
    assert capsys.readouterr() == ("", "")


def test_of_several_the_newest_is_meant_and_the_others_are_named(
    younger: int, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = write_run(os.getpid(), 1000), write_run(younger, 2000)
    assert locate(SOURCES).run == new
    out, told = capsys.readouterr()
    assert out == ""
    assert "2 clusters run here" in told
    assert f"the newest, pid {new.pid}, {new.url}" in told
    assert f"pid {old.pid}, {old.url}: --etcd {old.etcd[0]}; " in told
    assert f"queue: --nats {old.nats[0]}; chat: --url {old.url}\n" in told


def test_a_cluster_that_is_named_is_meant_without_a_word(
    younger: int, capsys: pytest.CaptureFixture[str]
) -> None:
    old, _ = write_run(os.getpid(), 1000), write_run(younger, 2000)
    named = SOURCES.with_overrides(control_plane__etcd__endpoints=old.etcd)
    target = locate(named)
    assert target.is_named
    assert target.config.control_plane.etcd.endpoints == old.etcd
    assert capsys.readouterr().err == ""
