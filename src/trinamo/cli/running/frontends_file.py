"""Where frontends that `trinamo up` has not started say who they are: a small file, for `trinamo status`.

Discovery names those with a status port, while it is there; a port that several share answers for any.
As the run file of a cluster it is for its user alone, is removed at the end, and belongs to one
process.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Self

import attrs

from trinamo.transports.assembly.run_file import (
    FILE_BYTES_MAX,
    ProcessEntry,
    process_started,
    run_folder,
    write_whole,
)

_SUFFIX: Final = ".frontends"
_log = logging.getLogger("trinamo.cli")


@attrs.define
class FrontendsFile:
    """The frontends that one process has started, or is."""

    pid: int
    started: int
    url: str = ""
    etcd: tuple[str, ...] = ()
    processes: tuple[ProcessEntry, ...] = ()

    @classmethod
    @contextmanager
    def kept(cls) -> Iterator[Self]:
        """The file of this process, removed on leaving."""
        file = cls(os.getpid(), process_started(os.getpid()) or 0)
        try:
            yield file
        finally:
            with suppress(OSError):
                file.path.unlink(missing_ok=True)

    @property
    def path(self) -> Path:
        """Where it is written."""
        return run_folder() / f"{self.pid}{_SUFFIX}"

    def publish(self, url: str, etcd: Sequence[str], processes: Sequence[ProcessEntry]) -> None:
        """Write it, if there is news; without it they serve as well."""
        before = attrs.astuple(self)
        self.url, self.etcd, self.processes = url, tuple(etcd), tuple(processes)
        if attrs.astuple(self) == before:
            return
        try:
            write_whole(self.path, attrs.asdict(self))
        except OSError as error:
            _log.info("cannot write %s: %s", self.path, error.strerror)


def find_frontends() -> list[FrontendsFile]:
    """Those of this user that run; what killed processes left behind is removed."""
    found = []
    for path in sorted(run_folder().glob(f"*{_SUFFIX}")):
        with suppress(OSError):
            if path.stat().st_uid != os.getuid():
                continue
            file = _read(path)
            if file is not None and process_started(file.pid) == file.started:
                found.append(file)
            else:
                path.unlink(missing_ok=True)
    return found


def _read(path: Path) -> FrontendsFile | None:
    with path.open("rb") as file:
        data = file.read(FILE_BYTES_MAX)
    try:
        value = json.loads(data)
        value["etcd"] = tuple(value["etcd"])
        value["processes"] = tuple(ProcessEntry(**each) for each in value["processes"])
        return FrontendsFile(**value)
    except (ValueError, TypeError, KeyError):
        return None
