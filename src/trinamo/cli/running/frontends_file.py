"""Who else of a cluster runs on this machine, as `trinamo up` or the frontends have written down.

Frontends that `trinamo up` has not started say who they are in a small file, for `trinamo status`.
Discovery names those with a status port, while it is there; a port that several share answers for
any. As the run file of a cluster it is for its user alone, is removed at the end, and belongs to
one process. Run files hold secrets, too: none of them is handed on.
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

from trinamo.runtime.config.config import Config
from trinamo.runtime.config.planes import EtcdConfig
from trinamo.runtime.view.survey import FrontendLook, Neighbours
from trinamo.transports.assembly.run_file import (
    FILE_BYTES_MAX,
    ProcessEntry,
    RunFile,
    is_kept,
    known_fields,
    process_started,
    run_folder,
    running,
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
    """Empty if they belong to no cluster, as in front of upstreams."""
    key_prefix: str = ""
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

    def publish(self, url: str, config: Config, processes: Sequence[ProcessEntry]) -> None:
        """Write it, if there is news; without it they serve as well."""
        before = attrs.astuple(self)
        etcd = config.control_plane.etcd
        self.url, self.processes = url, tuple(processes)
        self.etcd = () if config.http.upstreams else tuple(etcd.endpoints)
        self.key_prefix = etcd.key_prefix
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
            elif file is not None or not is_kept(path):
                path.unlink(missing_ok=True)
    return found


def _read(path: Path) -> FrontendsFile | None:
    with path.open("rb") as file:
        data = file.read(FILE_BYTES_MAX)
    try:
        value = json.loads(data)
        value["etcd"] = tuple(value["etcd"])
        value["processes"] = tuple(known_fields(ProcessEntry, each) for each in value["processes"])
        return known_fields(FrontendsFile, value)
    except (ValueError, TypeError, KeyError):
        return None


def find_neighbours(config: Config) -> Neighbours:
    """Those of the cluster with this etcd that run on this machine. Reads small files, no more."""
    etcd = config.control_plane.etcd
    place = etcd.endpoints, etcd.key_prefix
    run = next((each for each in running() if (each.etcd, each.key_prefix) == place), None)
    return neighbours_of(etcd, run)


def neighbours_of(etcd: EtcdConfig | None, run: RunFile | None, url: str = "") -> Neighbours:
    """What is written down of the cluster with this etcd, if any, and the frontend that `url` names."""
    place = None if etcd is None else (tuple(etcd.endpoints), etcd.key_prefix)
    found = Neighbours()
    if run is not None:
        found.processes = run.processes
        found.cluster = {
            "pid": run.pid,
            "state": run.state,
            "url": run.url,
            "engine": run.engine,
            "nats": list(run.nats),
        }
        found.frontends = [
            FrontendLook(
                each.name,
                each.pid,
                run.url,
                each.url if each.url != run.url else "",
                # Several share a port.
                is_named=each.name == "frontend",
            )
            for each in run.processes
            if each.name.startswith("frontend") and run.url
        ]
    for file in find_frontends():
        if (file.etcd, file.key_prefix) == place or (url and file.url == url):
            is_alone = len(file.processes) == 1
            found.frontends += [
                FrontendLook(each.name, each.pid, file.url, each.url, is_named=is_alone)
                for each in file.processes
            ]
    if url and all(each.url != url for each in found.frontends):
        found.frontends.insert(0, FrontendLook("frontend", 0, url, "", is_named=True))
    return found
