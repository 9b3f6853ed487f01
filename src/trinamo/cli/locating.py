"""Which cluster a command is about: the one configured, else the one `trinamo up` runs here.

If several run, it is the newest; standard error says so, and how to name each of the others.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs
import trio

from trinamo.runtime.config import Config, EtcdConfig, HttpConfig
from trinamo.runtime.errors import UnavailableError

from .options import Sources
from .run_file import RunFile, find_runs

__all__ = [
    "NOTHING_RUNS",
    "Target",
    "frontend_url",
    "locate",
    "quiet_log",
    "reachable",
    "somebody_listens",
]

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
    """Find the cluster; a running `trinamo up` is meant unless the configuration names an etcd."""
    config = sources.load()
    if config.control_plane.etcd.endpoints != EtcdConfig().endpoints:
        return Target(config, None, is_named=True)
    runs = find_runs()
    if not runs:
        return Target(config, None, is_named=False)
    run, *others = runs
    if others:
        _tell_which(run, others)
    found = sources
    if sources.file is None and run.config_file and Path(run.config_file).is_file():
        # Its credentials are those of the servers.
        found = attrs.evolve(found, file=Path(run.config_file))
    if sources.preset is None and run.preset:
        found = attrs.evolve(found, preset=run.preset)
    found = found.with_overrides(
        control_plane__etcd__endpoints=run.etcd, event_plane__nats__servers=run.nats
    )
    return Target(found.load(), run, is_named=False)


def _tell_which(run: RunFile, others: Sequence[RunFile]) -> None:
    """On standard error, because standard output may be read by a program."""
    lines = [
        f"trinamo: {len(others) + 1} clusters run here; this is the newest, {_about(run)}. Others:",
        *(f"  {_about(each)}: {_how_to_name(each)}" for each in others),
    ]
    sys.stderr.write("\n".join([*lines, ""]))


def _how_to_name(run: RunFile) -> str:
    if not (run.etcd and run.url):
        return "still starting"
    return f"--etcd {','.join(run.etcd)}; queue: --nats {','.join(run.nats)}; chat: --url {run.url}"


def _about(run: RunFile) -> str:
    return f"pid {run.pid}, {run.url or run.state}"


def frontend_url(target: Target) -> str:
    """Where the HTTP API is; raises `UnavailableError` while a cluster is still starting."""
    http, default = target.config.http, HttpConfig()
    is_named = (http.host, http.port) != (default.host, default.port)
    if target.run is not None and (not is_named or target.run.url):
        if not target.run.url:
            raise UnavailableError("the cluster is still starting; try again in a moment")
        return target.run.url
    host = f"[{http.host}]" if ":" in http.host else http.host
    return reachable(f"http://{host}:{http.port}")


def reachable(url: str) -> str:
    """The URL of a server on this machine, also if it is bound to every address."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


async def somebody_listens(address: str, *, timeout_s: float = 1.0) -> bool:
    """Whether `host:port`, or a URL, takes connections."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    with trio.move_on_after(timeout_s):
        try:
            stream = await trio.open_tcp_stream(host.strip("[]"), int(port))
        except (OSError, ValueError):
            return False
        await stream.aclose()
        return True
    return False


def quiet_log() -> None:
    """Keep the planes' log to ourselves: what matters is said in the command's own words."""
    logging.getLogger().addHandler(logging.NullHandler())
