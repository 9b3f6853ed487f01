"""The run file: found while its writer lives, swept when it has gone."""

from __future__ import annotations

import json
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from trinamo.transports.assembly.run_file import (
    ProcessEntry,
    RunFile,
    find_runs,
    process_started,
    run_folder,
)


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Everything below a folder of the test's own, whose path leaves room for that of a socket."""
    with tempfile.TemporaryDirectory(prefix="trinamo-test-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def run_file(pid: int = 0, started: int | None = None) -> RunFile:
    pid = pid or os.getpid()
    return RunFile(
        pid=pid,
        started=(process_started(pid) or 0) if started is None else started,
        state="ready",
        url="http://127.0.0.1:1",
        etcd=("127.0.0.1:2",),
        processes=(ProcessEntry("worker-1", 7, "http://127.0.0.1:3"),),
    )


def test_what_was_written_is_found_again() -> None:
    run = run_file()

    run.write()

    assert find_runs() == [run]


def test_it_is_for_its_user_alone() -> None:
    run = run_file()

    run.write()

    assert stat.S_IMODE(run.path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o600


def test_writing_again_replaces_the_file_and_leaves_no_other() -> None:
    run_file().write()
    later = attrs.evolve(run_file(), state="draining")

    later.write()

    assert find_runs() == [later]
    assert [path.name for path in run_folder().iterdir()] == [f"{os.getpid()}.json"]


def test_removing_it_twice_is_no_error() -> None:
    run = run_file()
    run.write()

    run.remove()
    run.remove()

    assert find_runs() == []


def test_a_pid_that_was_used_again_is_not_its_writer() -> None:
    """The pid is alive, but the process is another one: it started at another time."""
    run_file(started=1).write()

    assert find_runs() == []
    assert list(run_folder().iterdir()) == []


def test_the_folders_of_a_killed_cluster_are_swept(folders: Path) -> None:
    left = folders / "trinamo-etcd-abc"
    (left / "data").mkdir(parents=True)
    attrs.evolve(run_file(started=1), directories=(str(left),)).write()

    find_runs()

    assert not left.exists()


def test_only_folders_of_the_embedded_servers_are_swept(folders: Path) -> None:
    """A file is not trusted with the name of anything else."""
    others = [folders / "precious", folders / "deeper" / "trinamo-etcd-abc"]
    for other in others:
        other.mkdir(parents=True)
    attrs.evolve(run_file(started=1), directories=tuple(map(str, others))).write()

    find_runs()

    assert all(other.exists() for other in others)


GARBAGE = ["", "{", "[]", "{}", json.dumps({"pid": "x"}), "\x00"]


@pytest.mark.parametrize("text", GARBAGE)
def test_a_file_that_is_none_of_ours_is_swept(text: str) -> None:
    run_folder().mkdir()
    (run_folder() / "none.json").write_text(text)

    assert find_runs() == []
    assert list(run_folder().iterdir()) == []


@pytest.mark.parametrize("text", GARBAGE)
def test_a_file_that_cannot_be_read_is_left_to_the_process_that_it_is_called_after(
    text: str,
) -> None:
    """Another build may have written it, and its own commands need it."""
    path = run_folder() / f"{os.getpid()}.json"
    path.parent.mkdir()
    path.write_text(text)

    assert find_runs() == []
    assert path.exists()


def test_a_cluster_of_another_build_is_found() -> None:
    """It has written more, of itself and of each process, and less."""
    run = run_file()
    written = attrs.asdict(run)
    del written["configured"]
    written["processes"][0]["later"] = written["later"] = 1
    run.write()
    run.path.write_text(json.dumps(written))

    assert find_runs() == [run]


def test_without_a_runtime_folder_the_cache_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    run_file().write()

    assert run_folder() == tmp_path / "cache" / "trinamo" / "run"
    assert len(find_runs()) == 1


def test_who_has_no_home_has_that_of_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is found there, and what cannot be written is said; nobody is shown a traceback."""

    def nobody(_: int) -> object:
        raise KeyError

    for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)

    assert run_folder() == Path("/.cache/trinamo/run")
    assert find_runs() == []
