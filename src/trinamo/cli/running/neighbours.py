"""What the cluster around a frontend is, as `trinamo up` or `trinamo frontend --processes` wrote it.

The files hold secrets, too: none of them is handed on.
"""

from __future__ import annotations

from collections.abc import Sequence

from trinamo.runtime.config.config import Config
from trinamo.runtime.view.survey import FrontendLook, Neighbours
from trinamo.transports.assembly.run_file import RunFile, running

from .frontends_file import find_frontends


def find_neighbours(config: Config) -> Neighbours:
    """Those of the cluster with this etcd that run on this machine. Reads small files, no more."""
    etcd = config.control_plane.etcd.endpoints
    run = next((each for each in running() if each.etcd == etcd), None)
    return neighbours_of(etcd, run)


def neighbours_of(etcd: Sequence[str], run: RunFile | None, url: str = "") -> Neighbours:
    """What is written down of a cluster, and the frontend that an operator names by `url`."""
    return Neighbours(
        cluster=None if run is None else _about(run),
        frontends=frontends_of(etcd, run, url),
        processes=() if run is None else run.processes,
    )


def _about(run: RunFile) -> dict[str, object]:
    """What a survey says of a cluster that `trinamo up` runs."""
    return {
        "pid": run.pid,
        "state": run.state,
        "url": run.url,
        "engine": run.engine,
        "nats": list(run.nats),
    }


def frontends_of(etcd: Sequence[str], run: RunFile | None, url: str = "") -> list[FrontendLook]:
    """The frontends that were started here: by `run`, for the cluster with this etcd, or at `url`."""
    found: list[FrontendLook] = []
    for each in run.processes if run is not None else ():
        if run is not None and each.name.startswith("frontend") and run.url:
            own = each.url if each.url != run.url else ""
            is_shared = each.name != "frontend"
            look = FrontendLook(each.name, each.pid, run.url, own, is_named=not is_shared)
            found.append(look)
    for file in find_frontends():
        if file.etcd == tuple(etcd) or file.url == url:
            is_alone = len(file.processes) == 1
            found += [
                FrontendLook(each.name, each.pid, file.url, each.url, is_named=is_alone)
                for each in file.processes
            ]
    if url and all(each.url != url for each in found):
        found.insert(0, FrontendLook("frontend", 0, url, "", is_named=True))
    return found
