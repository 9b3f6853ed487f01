"""What the cluster around a frontend is, as `trinamo up` or `trinamo frontend --processes` wrote it.

The files hold secrets, too: none of them is handed on.
"""

from __future__ import annotations

from collections.abc import Sequence

from trinamo.runtime.config.config import Config
from trinamo.runtime.http.dashboard.gathering import Neighbours
from trinamo.runtime.http.survey.frontends import FrontendLook
from trinamo.transports.assembly.run_file import ProcessEntry, RunFile, running

from .frontends_file import find_frontends


def find_neighbours(config: Config) -> Neighbours:
    """Those of the cluster with this etcd that run on this machine. Reads small files, no more."""
    etcd = config.control_plane.etcd.endpoints
    run = next((each for each in running() if each.etcd == etcd), None)
    return Neighbours(
        cluster=None if run is None else about_run(run),
        frontends=frontends_of(etcd, run),
        processes=() if run is None else run.processes,
    )


def about_run(run: RunFile) -> dict[str, object]:
    """What a survey says of a cluster that `trinamo up` runs."""
    return {
        "pid": run.pid,
        "state": run.state,
        "url": run.url,
        "engine": run.engine,
        "nats": list(run.nats),
    }


def frontends_of(etcd: Sequence[str], run: RunFile | None, url: str = "") -> list[FrontendLook]:
    """The frontends that share a port: of `run`, of the cluster with this etcd, or at `url`."""
    groups: list[tuple[str, Sequence[ProcessEntry]]] = [
        (each.url, each.processes)
        for each in find_frontends()
        if each.etcd == tuple(etcd) or each.url == url
    ]
    if run is not None:
        shared = [each for each in run.processes if each.name.startswith("frontend-")]
        groups.insert(0, (run.url, shared))
    return [
        FrontendLook(each.name, each.pid, shared_url, each.url)
        for shared_url, processes in groups
        for each in processes
    ]
