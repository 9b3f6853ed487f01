"""The options that every command shares, and how they become one `Config`.

Named options (`--port`) and `--set key=value` are the same thing: dotted overrides that win over
environment, file and preset. What `trinamo up` was told travels to its children as `TRINAMO_…`
variables, so that no secret appears in a command line.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import attrs
import typer

from trinamo.runtime.config.models import ENGINES

from .completion import complete_engine
from .failures import show_tracebacks

if TYPE_CHECKING:
    from trinamo.runtime.config.config import Config


_PANEL = "Configuration"

RoleName = Literal["aggregated", "prefill", "decode"]
EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="NAME",
        help=f"What generates the tokens: {', '.join(ENGINES)} (auto: llamacpp if it can run, else"
        " exact); or your own, as module:attribute or file.py:attribute.",
        autocompletion=complete_engine,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]
EngineArgs = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-arg",
        metavar="NAME=VALUE",
        help="An argument of an engine of your own. Repeatable.",
    ),
]
ModelName = Annotated[str | None, typer.Option("--model-name", help="The name clients ask for.")]
ModelPath = Annotated[str | None, typer.Option("--model-path", metavar="FILE", help="A GGUF file.")]
ApiKeysFile = Annotated[
    str | None,
    typer.Option(
        "--api-keys-file",
        metavar="FILE",
        help="Answer only clients with a key of this file, one a line.",
    ),
]
Url = Annotated[
    str | None,
    typer.Option("--url", help="A frontend to ask too, such as http://127.0.0.1:8787."),
]
KeyEnv = Annotated[
    str | None,
    typer.Option(
        "--key-env",
        metavar="NAME",
        help="The environment variable that holds the key which the frontend wants.",
    ),
]
PresetName = Literal["small", "medium", "large"]


def place_of(url: str | None) -> str:
    """The frontend at `url`, as it was typed or as `trinamo up` prints it for clients; empty if none."""
    return (url or "").rstrip("/").removesuffix("/v1")


def key_of(key_env: str | None) -> str:
    """The key that `--key-env` names; empty without."""
    if key_env is None:
        return ""
    if not os.environ.get(key_env):
        raise typer.BadParameter(f"there is no environment variable {key_env}")
    return os.environ[key_env].strip()


def complete_override(incomplete: str) -> list[str]:
    """For tab completion: configuration keys, and behind `=` what a key may be, if that is a list."""
    from trinamo.runtime.config.config import Config
    from trinamo.runtime.config.keys import config_fields

    fields = config_fields(Config)
    key, is_pair, value = incomplete.partition("=")
    if not is_pair:
        return [f"{name}=" for name in fields if name.startswith(key)]
    values = fields[key].choices if key in fields else ()
    return [f"{key}={each}" for each in values if each.startswith(value)]


_OPTIONS: Final[Mapping[str, Any]] = {
    "etcd": Annotated[
        str | None,
        typer.Option(
            "--etcd", metavar="HOST:PORT,…", help="The etcd cluster.", rich_help_panel=_PANEL
        ),
    ],
    "nats": Annotated[
        str | None,
        typer.Option("--nats", metavar="URL,…", help="The NATS cluster.", rich_help_panel=_PANEL),
    ],
    "config": Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            envvar="TRINAMO_CONFIG",
            help="A YAML file with any of the keys that --print-config shows.",
            rich_help_panel=_PANEL,
        ),
    ],
    "preset": Annotated[
        PresetName | None,
        typer.Option(
            "--preset",
            envvar="TRINAMO_PRESET",
            help="Start from a shipped configuration: <10, 10-50 or 50+ GPUs.",
            rich_help_panel=_PANEL,
        ),
    ],
    "settings": Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override one key, such as http.drain_timeout_s=5. Repeatable.",
            autocompletion=complete_override,
            rich_help_panel=_PANEL,
        ),
    ],
    "show": Annotated[
        bool,
        typer.Option(
            "--print-config",
            help="Print the configuration that results (secrets masked) and exit.",
            rich_help_panel=_PANEL,
        ),
    ],
}
"""What commands share, by the name of the parameter."""


def takes_sources(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of every configuration, and the shared ones called `names`.

    It takes them as one argument, `sources`. typer reads options off a signature: so one is made.
    """
    shared = [name for name in _OPTIONS if name in {*names, "config", "preset", "settings"}]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            return command(sources=sources_of({name: given.pop(name) for name in shared}), **given)

        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [each for each in own if each.name != "sources"] + [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=False if name == "show" else None,
                annotation=_OPTIONS[name],
            )
            for name in shared
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def sources_of(given: Mapping[str, Any]) -> Sources:
    """What the shared options among `given` say; others are passed over."""
    overrides = gather(
        given.get("settings"),
        control_plane__etcd__endpoints=given.get("etcd"),
        event_plane__nats__servers=given.get("nats"),
    )
    return Sources(
        given.get("config"), given.get("preset"), overrides, is_shown=given.get("show", False)
    )


def gather(settings: Sequence[str] | None, /, **named: Any) -> dict[str, Any]:
    """Overrides by dotted key. A named option is `http__port=…`; one that is None is left out.

    Raises `ConfigError` for a setting that is not `key=value`.
    """
    found = {key.replace("__", "."): value for key, value in named.items() if value is not None}
    return found | pairs_of("--set", settings or (), "http.port=8080")


def pairs_of(option: str, given: Sequence[str], example: str) -> dict[str, str]:
    """What a repeatable option `key=value` says; raises `ConfigError` for one that is no pair."""
    from trinamo.runtime.errors import ConfigError

    found = {}
    for text in given:
        key, is_pair, value = text.partition("=")
        if not is_pair or not key.strip():
            raise ConfigError(f"{option} {text!r}: write key=value, such as {example}")
        found[key.strip()] = value
    return found


def as_text(value: Any) -> str:
    """A value as it stands in a `TRINAMO_…` variable."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return json.dumps(value)
    if isinstance(value, (list, tuple)):
        has_commas = any("," in str(each) for each in value)
        return json.dumps(value) if has_commas else ",".join(map(str, value))
    return str(value)


def told_settings(config: Config) -> dict[str, str]:
    """By key, as text, what of a configuration differs from the defaults. Secrets are revealed."""
    from trinamo.runtime.config.config import Config
    from trinamo.runtime.config.keys import Secret, config_fields

    found = {}
    for key, field in config_fields(Config).items():
        value: Any = functools.reduce(getattr, key.split("."), config)
        if value != field.default:
            found[key] = value.reveal() if isinstance(value, Secret) else as_text(value)
    return found


@attrs.frozen
class Sources:
    """What one command was told about its configuration."""

    file: Path | None = None
    preset: str | None = None
    overrides: Mapping[str, Any] = attrs.field(factory=dict)
    is_shown: bool = False
    """Whether the configuration is to be printed, and nothing else done (`printed`)."""
    defaults: Mapping[str, Any] = attrs.field(factory=dict)
    """What holds where nobody says anything else."""

    def printed(self) -> bool:
        """Write the configuration to standard output if that was asked for, and say whether.

        It is YAML with every key; secrets are masked.
        """
        if self.is_shown:
            from trinamo.runtime.config.source import dump

            sys.stdout.write(dump(self.load()))
        return self.is_shown

    def load(self, **defaults: Any) -> Config:
        """Read them all; raises `ConfigError` naming the key and where it was written.

        `defaults`, named as in `gather`, hold where nobody says anything else.
        """
        from trinamo.runtime.config.config import load_config

        config = load_config(
            self.file,
            preset=self.preset,
            overrides=self.overrides,
            defaults={**gather(None, **defaults), **self.defaults},
        )
        show_tracebacks(config.log.level == "debug")
        return config

    def read(self) -> Sources:
        """The same with what its file and its preset say now, whatever becomes of the file."""
        from trinamo.runtime.config.config import read_files

        found = {key: each.value for key, each in read_files(self.file, self.preset).items()}
        return attrs.evolve(self, file=None, preset=None, defaults={**self.defaults, **found})

    def with_overrides(self, **named: Any) -> Sources:
        """The same with more overrides, named as in `gather`; those given here win."""
        return attrs.evolve(self, overrides={**self.overrides, **gather(None, **named)})

    def with_engine(self, engine: str | None, args: Sequence[str] | None) -> Sources:
        """The same with `--engine` and `--engine-arg`; `--set` wins."""
        given = pairs_of("--engine-arg", args or (), "path=weights.bin")
        return self.with_options(worker__engine=engine, worker__engine_args=given or None)

    def with_options(self, **named: Any) -> Sources:
        """The same with what the command's own options say, named likewise; `--set` wins."""
        return attrs.evolve(self, overrides={**gather(None, **named), **self.overrides})

    def environ(self) -> dict[str, str]:
        """Our environment for a child process, with this configuration whatever becomes of its file."""
        kept = {
            name: text
            for name, text in os.environ.items()
            if name == "TRINAMO_MODEL" or not name.startswith("TRINAMO_")
        }
        return kept | {
            f"TRINAMO_{key.replace('.', '__').upper()}": text
            for key, text in told_settings(self.load()).items()
        }
