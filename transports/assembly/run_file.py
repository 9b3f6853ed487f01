"""Where a running cluster says what it is: one small JSON file, found by `status`, `chat`, `doctor`.

`trinamo up` gives its servers addresses, tokens and a secret of their own for each run, so somebody
has to tell. The file is for its user alone, because it holds them. It is written whole, belongs to one process (pid and start time, so a pid used again is not mistaken for it) and is
removed at the end; what a killed `up` left behind is swept by the next reader. That may be of another build. Which of several running
clusters a configuration means is said here, too.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs

from trinamo.runtime.config.config import Config, load_config
from trinamo.runtime.config.paths import user_cache
from trinamo.runtime.config.planes import EtcdConfig, NatsConfig
from trinamo.runtime.errors import ConfigError
from trinamo.transports.servers.process import scratch_parent

T = TypeVar("T", bound=attrs.AttrsInstance)
FILE_BYTES_MAX: Final = 256 * 1024
# The only folders that sweeping may remove: what the embedded servers make for themselves.
_OURS: Final = ("trinamo-etcd-", "trinamo-nats-", "trinamo-run-")


@attrs.frozen
class ProcessEntry:
    name: str
    pid: int
    url: str = ""
    """Where it answers HTTP: the frontend's API, or the status port of a worker or of one of several
    frontends."""

    @property
    def is_worker(self) -> bool:
        """Whether it is a worker, of whatever role."""
        return is_worker_name(self.name)


def is_worker_name(name: str) -> bool:
    """Whether `trinamo up` calls a worker so: `worker-1`, `prefill-1`, `decode-1`."""
    return name.startswith(("worker", "prefill", "decode"))


@attrs.frozen
class RunFile:
    """A cluster started by `trinamo up`."""

    pid: int
    started: int
    """When that process started, in the kernel's ticks; with the pid it is unique."""
    state: str
    """`starting`, `ready` or `draining`."""
    url: str = ""
    etcd: tuple[str, ...] = ()
    nats: tuple[str, ...] = ()
    engine: str = ""
    configured: Mapping[str, Any] = attrs.field(factory=dict, repr=False)
    """What its file and its preset said at its start, by key: the file may say another thing by now."""
    settings: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    """What a process needs to belong to the cluster, by key: `cli/up/cluster.py`. Secrets are in it."""
    processes: tuple[ProcessEntry, ...] = ()
    directories: tuple[str, ...] = ()
    """Temporary folders of the embedded servers."""

    @property
    def path(self) -> Path:
        return run_folder() / f"{self.pid}.json"

    @property
    def key_prefix(self) -> str:
        """Where its keys are in etcd, which it may share with other clusters."""
        return self.settings.get("control_plane.etcd.key_prefix", "")

    @property
    def is_alive(self) -> bool:
        return process_started(self.pid) == self.started

    def write(self) -> None:
        """Write it whole, for this user's eyes only; raises `OSError`."""
        write_whole(self.path, attrs.asdict(self))

    def remove(self) -> None:
        """Remove it; one that has gone is no error."""
        self.path.unlink(missing_ok=True)


def write_whole(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file of the run folder for this user's eyes only; raises `OSError`."""
    folder = path.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)  # It may have been there, and open to others.
    handle, name = tempfile.mkstemp(prefix=f"{path.stem}-", suffix=".new", dir=folder)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
    # A rename, so that a reader sees the old file or the new one.
    Path(name).replace(path)


def run_folder() -> Path:
    """`$XDG_RUNTIME_DIR/trinamo` where there is one, else `~/.cache/trinamo/run`."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "trinamo"
    return user_cache() / "run"


def process_started(pid: int) -> int | None:
    """When a process started, in ticks since the machine did; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace")
    except OSError:
        return None
    # The second field is the name in parentheses and may hold anything, also blanks.
    fields = stat.rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 and fields[0] not in "ZX" else None


def find_runs() -> list[RunFile]:
    """The clusters of this user that are running, the newest first. Files left over are swept."""
    for path, run in _read_all():
        if not (run.is_alive if run is not None else is_kept(path)):
            sweep(path, run)
    return running()


def is_kept(path: Path) -> bool:
    """Whether a file of the run folder that nobody here can read may be that of another build's process."""
    pid = path.stem
    return pid.isdecimal() and process_started(int(pid)) is not None


def running() -> list[RunFile]:
    """As `find_runs`, and leaves everything as it is."""
    found = [run for _, run in _read_all() if run is not None and run.is_alive]
    return sorted(found, key=lambda run: run.started, reverse=True)


def sweep(path: Path, run: RunFile | None) -> None:
    """Remove a file whose writer has gone, and the temporary folders it could not remove."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
    for name in run.directories if run is not None else ():
        folder = Path(name)
        if folder.parent == scratch_parent() and folder.name.startswith(_OURS):
            shutil.rmtree(folder, ignore_errors=True)


def _read_all() -> Iterator[tuple[Path, RunFile | None]]:
    for path in sorted(run_folder().glob("*.json")):
        try:
            if path.stat().st_uid != os.getuid():
                continue
            with path.open("rb") as file:
                data = file.read(FILE_BYTES_MAX)
            yield path, _parse(json.loads(data))
        except OSError:
            continue
        except (ValueError, TypeError, KeyError):
            yield path, None


def _parse(value: dict[str, Any]) -> RunFile:
    value["processes"] = tuple(known_fields(ProcessEntry, each) for each in value["processes"])
    for name in ("etcd", "nats", "directories"):
        value[name] = tuple(value[name])
    value["settings"] = {str(key): str(text) for key, text in value["settings"].items()}
    return known_fields(RunFile, value)


def known_fields(kind: type[T], value: Mapping[str, Any]) -> T:
    """A `kind` of those of the values that it has; another build may have written more."""
    return kind(**{each: value[each] for each in attrs.fields_dict(kind) if each in value})


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
    if etcd.key_prefix:
        # Clusters that share an etcd have the same address there.
        runs = [run for run in runs if run.key_prefix == etcd.key_prefix]
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
    return load_config(overrides=run.settings, defaults=run.configured)
