"""Which cluster a command is about: the one configured, else the one `trinamo up` runs here.

If several run, one that is only looked at is the newest; standard error says so, and how to name
each of the others. One that is joined must be named. `--etcd` with the address of a cluster that
runs here names it whole: NATS, tokens and the secret come with it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Final

import attrs
import trio

from trinamo.runtime.config.config import Config
from trinamo.runtime.config.http import HttpConfig
from trinamo.runtime.config.keys import url_of
from trinamo.runtime.errors import ConfigError, UnavailableError
from trinamo.transports.assembly.run_file import (
    RunFile,
    about,
    find_runs,
    joinable,
    meant,
    names_etcd,
)

from ..options import Sources

_LISTENS_S: Final = 1.0
NOTHING_RUNS: Final = (
    "no cluster is running here; start one with `trinamo up`, or name the etcd of another with"
    " --etcd or --config"
)


@attrs.frozen
class Target:
    """A configuration whose addresses are those of the cluster meant."""

    config: Config
    run: RunFile | None
    """The cluster `trinamo up` runs, if that is the one."""
    is_named: bool
    """Whether the configuration names the servers itself."""


def locate(sources: Sources) -> Target:
    """Find the cluster; a running `trinamo up` is meant unless the configuration names another.

    The log of the planes is kept from the terminal: a command says in its own words what matters.
    """
    logging.getLogger().addHandler(logging.NullHandler())
    config = sources.load()
    runs = meant(config, find_runs())
    if not runs:
        return Target(config, None, is_named=names_etcd(config.control_plane.etcd))
    run, *others = runs
    if others:
        sys.stderr.write(
            f"trinamo: {len(runs)} clusters run here; this is the newest, {about(run)}. Others:\n"
            + _list(others)
        )
    return Target(_within(sources, run).load(), run, is_named=False)


def join(sources: Sources) -> tuple[Sources, str]:
    """What a process is told that is started beside a running `trinamo up`, and a line about it.

    Unchanged, without a line, if none runs, if the configuration names an etcd of somebody's own,
    or if the process starts one. Raises `ConfigError` if several run and none is named.
    """
    config = sources.load()
    runs = joinable(config)
    if not runs:
        return sources, ""
    run, *others = runs
    if others:
        raise ConfigError(f"{len(runs)} clusters run here; name the one to join:\n{_list(runs)}")
    found = _within(sources, run)
    if "worker.status_port" not in sources.overrides:
        # What the cluster's file says is for one process.
        found = found.with_overrides(worker__status_port=0)
    return found, f"joins the cluster of `trinamo up`, {about(run)}"


def _within(sources: Sources, run: RunFile) -> Sources:
    """The same as a member of that cluster; what was said on the command line goes first."""
    found = attrs.evolve(sources, overrides={**run.settings, **sources.overrides})
    if sources.file is None:
        return attrs.evolve(found, defaults=run.configured)
    return found


def _list(runs: Sequence[RunFile]) -> str:
    lines = []
    for run in runs:
        prefix = f" --set control_plane.etcd.key_prefix={run.key_prefix}" if run.key_prefix else ""
        how = f"--etcd {','.join(run.etcd)}{prefix}; chat: --url {run.url}"
        lines.append(f"  {about(run)}: {how if run.etcd and run.url else 'still starting'}\n")
    return "".join(lines)


def frontend_url(target: Target) -> str:
    """Where the HTTP API is; raises `UnavailableError` while a cluster is still starting."""
    http, default = target.config.http, HttpConfig()
    is_named = (http.host, http.port) != (default.host, default.port)
    if target.run is not None and (not is_named or target.run.url):
        if not target.run.url:
            raise UnavailableError("the cluster is still starting; try again in a moment")
        return target.run.url
    return reachable(url_of(http.host, http.port, http.scheme))


def reachable(url: str) -> str:
    """The URL of a server on this machine, also if it is bound to every address."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


async def somebody_listens(address: str) -> bool:
    """Whether `host:port`, a URL, or a socket at `unix:/path` takes connections."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    with trio.move_on_after(_LISTENS_S):
        try:
            if address.startswith("unix:"):
                stream = await trio.open_unix_socket(address.removeprefix("unix:"))
            else:
                stream = await trio.open_tcp_stream(host.strip("[]"), int(port))
        except (OSError, ValueError):
            return False
        await stream.aclose()
        return True
    return False
