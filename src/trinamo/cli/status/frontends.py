"""The frontends on this machine that share a port, as those who started them have written down."""

from __future__ import annotations

from collections.abc import Sequence

from trinamo.runtime.http.survey.frontends import FrontendLook
from trinamo.transports.assembly.run_file import ProcessEntry

from ..running.frontends_file import find_frontends
from ..running.locating import Target

__all__ = ["known_frontends"]


def known_frontends(target: Target, url: str) -> list[FrontendLook]:
    """Those that `trinamo up` or `trinamo frontend --processes` has started.

    Of the cluster that is meant, or at `url`.
    """
    etcd, run = target.config.control_plane.etcd.endpoints, target.run
    groups: list[tuple[str, Sequence[ProcessEntry]]] = [
        (each.url, each.processes)
        for each in find_frontends()
        if each.etcd == etcd or each.url == url
    ]
    if run is not None:
        shared = [each for each in run.processes if each.name.startswith("frontend-")]
        groups.insert(0, (run.url, shared))
    return [
        FrontendLook(each.name, each.pid, shared_url, each.url)
        for shared_url, processes in groups
        for each in processes
    ]
