"""The options that every command shares, and how they become one `Config`.

Named options (`--port`) and `--set key=value` are the same thing: dotted overrides that win over
environment, file and preset. What `trinamo up` was told travels to its children as `TRINAMO_…`
variables, so that no secret appears in a command line.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import attrs
import typer

from .failures import show_tracebacks

if TYPE_CHECKING:
    from trinamo.runtime.config.config import Config

__all__ = [
    "ConfigFile",
    "EngineName",
    "EtcdEndpoints",
    "NatsServers",
    "Preset",
    "PrintConfig",
    "Settings",
    "Sources",
    "as_text",
    "cluster_sources",
    "gather",
]

_PANEL = "Configuration"

EngineName = Literal["auto", "exact", "llamacpp", "echo", "mocker"]
PresetName = Literal["small", "medium", "large"]

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        envvar="TRINAMO_CONFIG",
        help="A YAML file with any of the keys that --print-config shows.",
        rich_help_panel=_PANEL,
    ),
]
Preset = Annotated[
    PresetName | None,
    typer.Option(
        "--preset",
        envvar="TRINAMO_PRESET",
        help="Start from a shipped configuration: <10, 10-50 or 50+ GPUs.",
        rich_help_panel=_PANEL,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one key, such as http.drain_timeout_s=5. Repeatable.",
        rich_help_panel=_PANEL,
    ),
]
PrintConfig = Annotated[
    bool,
    typer.Option(
        "--print-config",
        help="Print the configuration that results (secrets masked) and exit.",
        rich_help_panel=_PANEL,
    ),
]
EtcdEndpoints = Annotated[
    str | None,
    typer.Option("--etcd", metavar="HOST:PORT,…", help="The etcd cluster.", rich_help_panel=_PANEL),
]
NatsServers = Annotated[
    str | None,
    typer.Option("--nats", metavar="URL,…", help="The NATS cluster.", rich_help_panel=_PANEL),
]


def gather(settings: Sequence[str] | None, /, **named: Any) -> dict[str, Any]:
    """Overrides by dotted key. A named option is `http__port=…`; one that is None is left out.

    Raises `ConfigError` for a setting that is not `key=value`.
    """
    from trinamo.runtime.errors import ConfigError

    found = {key.replace("__", "."): value for key, value in named.items() if value is not None}
    for setting in settings or ():
        key, is_pair, value = setting.partition("=")
        if not is_pair or not key.strip():
            raise ConfigError(f"--set {setting!r}: write key=value, such as http.port=8080")
        found[key.strip()] = value
    return found


def _variable(key: str) -> str:
    return "TRINAMO_" + key.replace(".", "__").upper()


def as_text(value: Any) -> str:
    """A value as it stands in a `TRINAMO_…` variable."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value)


@attrs.frozen
class Sources:
    """What one command was told about its configuration."""

    file: Path | None = None
    preset: str | None = None
    overrides: Mapping[str, Any] = attrs.field(factory=dict)

    def load(self) -> Config:
        """Read them all; raises `ConfigError` naming the key and where it was written."""
        from trinamo.runtime.config.config import load_config

        config = load_config(self.file, preset=self.preset, overrides=self.overrides)
        show_tracebacks(config.log.level == "debug")
        return config

    def with_overrides(self, **named: Any) -> Sources:
        """The same with more overrides, named as in `gather`; those given here win."""
        return attrs.evolve(self, overrides={**self.overrides, **gather(None, **named)})

    def environ(self) -> dict[str, str]:
        """The variables that give a child process the same configuration."""
        found = {_variable(key): as_text(value) for key, value in self.overrides.items()}
        if self.file is not None:
            found["TRINAMO_CONFIG"] = str(self.file.absolute())
        if self.preset is not None:
            found["TRINAMO_PRESET"] = self.preset
        return found


def cluster_sources(
    file: Path | None,
    preset: str | None,
    settings: Sequence[str] | None,
    etcd: str | None,
    nats: str | None,
) -> Sources:
    """What a command that looks for a cluster was told: `doctor`, `status`."""
    overrides = gather(
        settings, control_plane__etcd__endpoints=etcd, event_plane__nats__servers=nats
    )
    return Sources(file, preset, overrides)


def print_config(config: Config) -> None:
    """Write the configuration to standard output, as YAML with every key; secrets are masked."""
    from trinamo.runtime.config.source import dump

    sys.stdout.write(dump(config))
