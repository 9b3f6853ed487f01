"""One frozen `Config`, read once at the start: defaults < preset < file < environment < command line.

`load_config` is the only door. It starts nothing and connects to nothing; whatever is wrong is a
`ConfigError` that names the key, where it was written, and the nearest key that exists.
`docs/configuration.md` lists every key (`make docs` writes it). The plane sections are in
`planes.py`, the HTTP frontend's in `http.py`, the worker's in `worker.py`, the router's in
`router.py`, the reading in `source.py`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from msgspec import Meta
from msgspec.structs import force_setattr, replace

from ..errors import ConfigError
from .http import HttpConfig
from .keys import (
    Seconds,
    Section,
    Text,
    about,
    config_fields,
    is_name,
    need_together,
)
from .planes import (
    ControlPlaneConfig,
    DataPlaneConfig,
    EventPlaneConfig,
)
from .router import RouterConfig
from .source import (
    ConfigValue,
    build_config,
    read_environ,
    read_overrides,
    read_yaml,
    read_yaml_file,
)
from .worker import DisaggregationConfig, WeightsConfig, WorkerConfig

PRESETS = ("small", "medium", "large")
SECRET_BYTES_MIN: Final = 32
SECRET_BYTES_MAX: Final = 4096


LEAVE_TIMEOUT_S: Final = 2.0
"""To leave discovery, the first step of an orderly end."""
KILL_TIMEOUT_S: Final = 2.0
"""After Kill: for the requests' tasks to end."""
REVOKE_TIMEOUT_S: Final = 2.0
"""To revoke the lease."""
CLOSE_TIMEOUT_S: Final = 3.0
"""To close the planes, the last step."""


class ShutdownConfig(Section, frozen=True, kw_only=True):
    """The deadlines of an orderly end, in the order of the steps, and beside those that are the same for all.

    `trinamo up` kills a process that takes longer over all of them.
    """

    drain_timeout_s: Annotated[
        Seconds, about("Wait for requests in flight while new ones are refused.")
    ] = 10.0
    stop_timeout_s: Annotated[Seconds, about("After Stop: let requests finish early.")] = 5.0
    transfer_timeout_s: Annotated[
        Seconds, about("Wait for KV transfers in flight, so that no block is lost.")
    ] = 5.0

    @property
    def whole_s(self) -> float:
        """How long all the steps may take together."""
        configured = self.drain_timeout_s + self.stop_timeout_s + self.transfer_timeout_s
        constant = LEAVE_TIMEOUT_S + KILL_TIMEOUT_S + REVOKE_TIMEOUT_S + CLOSE_TIMEOUT_S
        return configured + constant


class LogConfig(Section, frozen=True, kw_only=True):
    """The log on standard error."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], about("The least level that is written.")
    ] = "info"
    format: Annotated[
        Literal["auto", "console", "json"],
        about("`auto`: console on a terminal, else one JSON object a line."),
    ] = "auto"
    access: Annotated[
        Literal["all", "failures", "none"],
        about("Which HTTP requests leave a line, on the logger `trinamo.access`, at `info`."),
    ] = "all"


class TracesConfig(Section, frozen=True, kw_only=True):
    """What a process keeps of its last requests, for `trinamo trace`."""

    requests_max: Annotated[
        Annotated[int, Meta(ge=0, le=1_000_000)],
        about("Requests whose legs are kept, about 2 KB each; 0 keeps none."),
    ] = 2048


class TracingConfig(Section, frozen=True, kw_only=True):
    """Spans for OpenTelemetry: the legs of requests, of all processes, sent to a collector."""

    enabled: Annotated[bool, about("Send them; needs the extra `otel`.")] = False
    endpoint: Annotated[
        Text | None,
        about(
            "Where the collector takes OTLP over HTTP, such as `http://collector:4318`; `/v1/traces`"
            " is added. null: what `OTEL_EXPORTER_OTLP_ENDPOINT` says, else port 4318 of this host."
            " Headers it wants, such as a key, are read from `OTEL_EXPORTER_OTLP_HEADERS`."
        ),
    ] = None
    sample_ratio: Annotated[
        Annotated[float, Meta(ge=0, le=1)],
        about(
            "The share of traces that is sent, of those that begin here; others' callers decide."
        ),
    ] = 1.0
    flush_timeout_s: Annotated[
        Seconds, about("How long the end of a process may take to send its last spans.")
    ] = 1.0

    def __post_init__(self) -> None:
        endpoint = self.endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"tracing: endpoint is {endpoint!r}, not a URL with http:// or https://"
            )
        if endpoint is not None and "@" in endpoint:
            raise ValueError("tracing: endpoint holds a password; use OTEL_EXPORTER_OTLP_HEADERS")


class SecurityTlsConfig(Section, frozen=True, kw_only=True):
    """A fleet's own authority, which no process can issue certificates of: roles are told apart."""

    certificate_file: Annotated[
        Text | None,
        about(
            "This process's certificate as PEM, which says its role (`trinamo certs issue` makes one)."
            " It stands in place of what the secret makes on connections between processes, and"
            " under what is written to etcd. Needs the two others. Changed files count for new"
            " connections, without a restart. null: all who have the secret are equal."
        ),
    ] = None
    key_file: Annotated[
        Text | None, about("The key of `certificate_file`, Ed25519, which nobody else should read.")
    ] = None
    authority_file: Annotated[
        Text | None,
        about(
            "Who issues certificates of the fleet, as PEM; two while one takes the other's place."
        ),
    ] = None
    change: Annotated[
        Literal["admit", "show"] | None,
        about(
            "While a cluster that has a secret begins to use certificates, or ceases to: who has either is"
            " let in and asked. `admit` shows what the secret makes, `show` the certificate. null: the"
            " certificate alone counts."
        ),
    ] = None

    def __post_init__(self) -> None:
        need_together(
            "tls",
            certificate_file=self.certificate_file,
            key_file=self.key_file,
            authority_file=self.authority_file,
        )
        if self.change is not None and self.certificate_file is None:
            raise ValueError(
                f"tls.change is {self.change}, but certificate_file is null: name the certificate that"
                " the cluster is to change to, or from"
            )


class SecurityConfig(Section, frozen=True, kw_only=True):
    """Who may speak to the TCP ports of this cluster's processes, and whether others can listen."""

    secret_file: Annotated[
        Text | None,
        about(
            "A file of 32 random bytes or more (`trinamo certs secret` makes one) that is the same on"
            " every machine of the cluster and that not everybody may read. It closes every TCP"
            " connection between processes: TLS 1.3, with certificates that are derived from it; and it"
            " seals requests and jobs on NATS."
            " null: the ports are bound on loopback only."
        ),
    ] = None
    second_secret_file: Annotated[
        Text | None,
        about(
            "A second one, while a cluster changes its secret: who has it is let in and asked, as who"
            " has the first. What this process shows and seals is of the first."
        ),
    ] = None
    tls: SecurityTlsConfig = SecurityTlsConfig()
    clear_tcp: Annotated[
        bool,
        about(
            "Without `secret_file`, bind the TCP ports on other addresses than loopback all the same."
            " Whoever reaches them can read and change prompts and answers, and ask for any; each"
            " start says so."
        ),
    ] = False

    def __post_init__(self) -> None:
        if self.tls.certificate_file is not None and self.secret_file is None:
            raise ValueError(
                "security: tls is set, but secret_file is null: with the secret what passes NATS is"
                " sealed (`trinamo certs secret`)"
            )


class Config(Section, frozen=True, kw_only=True):
    """The whole configuration. `Config()` holds the defaults; `load_config` reads the rest."""

    control_plane: ControlPlaneConfig = ControlPlaneConfig()
    event_plane: EventPlaneConfig = EventPlaneConfig()
    data_plane: DataPlaneConfig = DataPlaneConfig()
    http: HttpConfig = HttpConfig()
    worker: WorkerConfig = WorkerConfig()
    weights: WeightsConfig = WeightsConfig()
    router: RouterConfig = RouterConfig()
    disaggregation: DisaggregationConfig = DisaggregationConfig()
    shutdown: ShutdownConfig = ShutdownConfig()
    security: SecurityConfig = SecurityConfig()
    log: LogConfig = LogConfig()
    traces: TracesConfig = TracesConfig()
    tracing: TracingConfig = TracingConfig()

    def __post_init__(self) -> None:
        """A fleet's authority is that of its etcd and NATS, too, unless they name another."""
        authority_file = self.security.tls.authority_file
        if authority_file is None:
            return
        for name, server in (("control_plane", "etcd"), ("event_plane", "nats")):
            plane = getattr(self, name)
            section = getattr(plane, server)
            if section.tls.enabled and section.tls.ca_file is None:
                tls = replace(section.tls, ca_file=authority_file)
                section = replace(plane, **{server: replace(section, tls=tls)})
                force_setattr(self, name, section)


def check_files(config: Config) -> None:
    """Open each file that a connection to etcd or NATS needs; `ConfigError` names the key of another."""
    for key in config_fields(Config):
        if not (key.endswith("_file") and key.startswith(("control_plane.", "event_plane."))):
            continue
        name: Any = reduce(getattr, key.split("."), config)
        try:
            with Path(name or os.devnull).open("rb"):
                pass
        except OSError as error:
            raise ConfigError(f"{key}: {name}: {error.strerror}") from error


def read_secrets(section: SecurityConfig) -> tuple[bytes, bytes]:
    """The cluster's secret and the second one, each empty if not configured.

    Blocks on the disk, so call it early. Every TCP connection of ours is sealed with what is derived
    from the first (`transports/security/identity.py`). A line end at the end of a file is not part of
    it: an editor that adds one must not shut a machine out. Raises `ConfigError` for a file that
    cannot be read, that every user of the machine can read, or that holds too little or too much, and
    for a second secret without a first.
    """
    if section.second_secret_file and not section.secret_file:
        raise ConfigError(
            "security.second_secret_file is set, and security.secret_file is not: name the secret"
            " that this process shows as security.secret_file"
        )
    return (
        _read_secret("security.secret_file", section.secret_file),
        _read_secret("security.second_secret_file", section.second_secret_file),
    )


def _read_secret(key: str, path: str | None) -> bytes:
    if path is None:
        return b""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 -- its mode is asked of the same open file
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{key}: {path} is not a plain file")
            if mode & stat.S_IROTH:
                raise ConfigError(
                    f"{key}: every user of this machine can read {path}; run chmod o-r on it"
                )
            secret = file.read(SECRET_BYTES_MAX + 1).rstrip(b"\r\n")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{key}: cannot read {path!r}: {why}") from error
    if not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        raise ConfigError(
            f"{key}: {path} holds {len(secret)} bytes; {SECRET_BYTES_MIN} to"
            f" {SECRET_BYTES_MAX} are taken, and they must be random: whoever reaches a port could"
            f" guess a shorter one. `trinamo certs secret FILE` makes a good one"
        )
    return secret


def preset_text(name: str) -> str:
    """The YAML of a shipped preset, comments and all."""
    if name not in PRESETS:
        raise ConfigError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    return Path(__file__).with_name("presets").joinpath(f"{name}.yaml").read_text("utf-8")


def read_files(path: str | os.PathLike[str] | None, preset: str | None) -> dict[str, ConfigValue]:
    """What a preset and a file say, by key; raises as `load_config` does."""
    settings: dict[str, ConfigValue] = {}
    if preset is not None:
        settings |= read_yaml(Config, preset_text(preset), f"preset {preset}")
    if path is not None:
        settings |= read_yaml_file(Config, Path(path))
    return settings


def load_config(
    path: str | os.PathLike[str] | None = None,
    *,
    preset: str | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Config:
    """Read every source and return the one configuration; blocks on the disk, so call it early.

    Args:
        path: A YAML file of at most `config_source.FILE_BYTES_MAX` bytes.
        preset: `small`, `medium` or `large`; the file's keys win over its.
        environ: Where `TRINAMO_…` variables are looked up; `os.environ` unless given.
        overrides: Dotted keys such as `http.port`; text is read as in the environment, and a
            value of None is one (`--port` not given must be left out by the caller).
        defaults: The same, in place of a key's own default where no source names it.

    Raises:
        ConfigError: Names the key, where it was written (file and line, variable or option) and
            the nearest key that exists.
    """
    settings = read_overrides(Config, defaults or {}) | read_files(path, preset)
    settings |= read_environ(Config, os.environ if environ is None else environ)
    settings |= read_overrides(Config, overrides or {})
    return build_config(Config, settings)


def config_notices(config: Config, *, moves_blocks: bool = True) -> list[str]:
    """What is valid but not what it seems, in sentences; of backends only where blocks are moved."""
    found = []
    data = config.data_plane
    mooncake = bool({"mooncake", "mooncake_tcp"} & {*data.backends})
    if moves_blocks and "nixl" in data.backends and data.nixl.rdma_interface is None:
        found.append(
            "data_plane.nixl.rdma_interface is null: NIXL reaches peers on this host only;"
            f" others are reached by {data.backends[data.backends.index('nixl') + 1]}"
        )
    if moves_blocks and mooncake:
        found.append(
            "Mooncake listens on all interfaces without authentication: keep its ports closed to"
            " others"
        )
    leaves = {"NIXL": data.nixl.rdma_interface and "nixl" in data.backends, "Mooncake": mooncake}
    clear = " and ".join(name for name, is_clear in leaves.items() if is_clear)
    if moves_blocks and config.security.secret_file and clear:
        found.append(
            f"KV blocks by {clear} go in clear, whatever security.secret_file closes: keep that network"
            " to the cluster, or let tcp move them (data_plane.transfer.backends: [tcp])"
        )
    if moves_blocks and not data.transfer.enabled and len(data.backends) > 1:
        found.append("data_plane.transfer.enabled is false: no KV block is moved by any backend")
    etcd, nats = config.control_plane.etcd, config.event_plane.nats
    if config.router.silence_grace_s <= etcd.lease_ttl_s / 2:
        found.append(
            f"router.silence_grace_s is {config.router.silence_grace_s:g}, not more than half of"
            f" control_plane.etcd.lease_ttl_s ({etcd.lease_ttl_s:g}): a worker that registers again"
            " after an outage of etcd may lose its streams"
        )
    elif config.router.silence_grace_s < etcd.lease_ttl_s:
        found.append(
            f"router.silence_grace_s is {config.router.silence_grace_s:g}, less than"
            f" control_plane.etcd.lease_ttl_s ({etcd.lease_ttl_s:g}): a worker whose process stalls"
            " may lose its silent requests before its lease"
        )
    stale_grace_s = config.router.stale_grace_s
    if stale_grace_s is not None and stale_grace_s <= etcd.lease_ttl_s / 2:
        found.append(
            f"router.stale_grace_s is {stale_grace_s:g}, not more than half of"
            f" control_plane.etcd.lease_ttl_s ({etcd.lease_ttl_s:g}): a worker that registers again"
            " after an outage of etcd may be dropped for a moment"
        )
    if config.control_plane.embedded is False and not _reaches(etcd.endpoints, etcd.nodes):
        found.append(
            f"control_plane.etcd.nodes is {etcd.nodes}, but there are {len(etcd.endpoints)} endpoints"
        )
    if config.event_plane.embedded is False and not _reaches(nats.servers, nats.nodes):
        found.append(
            f"event_plane.nats.nodes is {nats.nodes}, but there are {len(nats.servers)} servers"
        )
    return found


def _reaches(addresses: tuple[str, ...], nodes: int) -> bool:
    """Whether so many addresses fit so many servers; one name may stand for all of them."""
    return len(addresses) == nodes or (len(addresses) == 1 and is_name(addresses[0]))
