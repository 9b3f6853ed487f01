"""Which of the clusters that `trinamo up` runs on this machine a configuration means."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trinamo.runtime.config.config import Config, load_config
from trinamo.runtime.config.planes import EtcdConfig, NatsConfig
from trinamo.runtime.errors import ConfigError

from .run_file import RunFile, find_runs


def names_etcd(section: EtcdConfig) -> bool:
    """Whether the configuration means an etcd of somebody's own, rather than ours."""
    default = EtcdConfig()
    return (
        section.endpoints != default.endpoints
        or section.username is not None
        or section.tls.enabled
    )


def names_nats(section: NatsConfig) -> bool:
    """Whether the configuration means a NATS of somebody's own, rather than ours."""
    return section.servers != NatsConfig().servers or bool(section.ways) or section.tls.enabled


def meant(config: Config, runs: Sequence[RunFile]) -> list[RunFile]:
    """Those of the running clusters that the configuration may mean, in their order."""
    etcd, nats = config.control_plane.etcd, config.event_plane.nats
    # One that was given the port of the defaults is where they say.
    there = [run for run in runs if _places(run.etcd) == _places(etcd.endpoints)]
    if there or names_etcd(etcd):
        return there
    if names_nats(nats):
        return [run for run in runs if _places(run.nats) == _places(nats.servers)]
    return list(runs)


def _places(addresses: Sequence[str]) -> list[str]:
    """Addresses as they compare: `localhost` is what our servers call 127.0.0.1."""
    return [each.rpartition("//")[2].replace("localhost:", "127.0.0.1:") for each in addresses]


def joinable(config: Config) -> list[RunFile]:
    """The running clusters that a process of this configuration may belong to, the newest first.

    None for one that has a control plane of its own.
    """
    control = config.control_plane
    if control.backend != "etcd" or control.embedded:
        return []
    runs = meant(config, find_runs())
    return [run for run in runs if run.settings and run.state != "draining"]


def about(run: RunFile) -> str:
    """A running cluster in a few words."""
    return f"pid {run.pid}, {run.url or run.state}"


def running_config() -> Config:
    """The configuration of a process that belongs to the cluster that runs here, if one does.

    Otherwise that of the environment. Raises `ConfigError` if several run and none is named.
    """
    config = load_config()
    runs = joinable(config)
    if not runs:
        return config
    run, *others = runs
    if others:
        found = "; ".join(f"{about(each)}: {','.join(each.etcd)}" for each in runs)
        raise ConfigError(
            f"{len(runs)} clusters run here; name the etcd of the one that is meant by"
            f" TRINAMO_CONTROL_PLANE__ETCD__ENDPOINTS: {found}"
        )
    file = Path(run.config_file) if run.config_file and Path(run.config_file).is_file() else None
    return load_config(file, preset=run.preset or None, overrides=run.settings)
