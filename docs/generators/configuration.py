"""The reference page of every configuration key, as the structs of `runtime/config` say."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import msgspec
import yaml

from trinamo.runtime.config.config import PRESETS, Config
from trinamo.runtime.config.keys import Field, Secret, config_fields, section_types
from trinamo.runtime.config.source import RESERVED_VARIABLES

_INTRO = """\
# Configuration

<!-- Written by `make docs`; edit the structs, not this page. -->

One configuration serves every command.
It is read once at the start from five sources; a later one wins key by key:

1. the defaults below,
2. a preset: `{presets}`,
3. a YAML file (`--config FILE`),
4. environment variables,
5. command-line options.

A key's environment variable is `TRINAMO_` and the key in capitals, with two underscores for each
dot: `data_plane.tcp.port` is `TRINAMO_DATA_PLANE__TCP__PORT`.
Lists are written with commas there.
Sizes are bytes; `64KiB` and `32MiB` are powers of 1024, `2GB` is a power of 1000.
Times are seconds.
`null` in YAML means: not set.

An unknown key, an unknown `TRINAMO_…` variable or a value out of bounds stops the start with a
sentence that names the key, the file and line or the variable, and the nearest key that exists.
Passwords and tokens are never printed or logged.
Plain words follow YAML 1.2: `on`, `off`, `yes`, `no` and `12:30` are text.
A file has at most 256 KiB.

These variables are read elsewhere and are no keys:

{variables}

Shutdown goes through its steps in the order of the `shutdown` section; `operations.md` tells it.
"""


def configuration_page() -> str:
    """The Markdown of `docs/configuration.md`."""
    variables = "\n".join(f"* `{name}`: {what}" for name, what in RESERVED_VARIABLES.items())
    parts = [_INTRO.format(presets="`, `".join(PRESETS), variables=variables)]
    fields = config_fields(Config)
    for prefix, section in section_types(Config).items():
        rows = [_row(field) for key, field in fields.items() if key.rpartition(".")[0] == prefix]
        if rows:
            parts.append(f"## `{prefix}`\n\n{inspect.cleandoc(section.__doc__ or '')}\n")
            parts.append("| key | type | default | unit | meaning |\n|---|---|---|---|---|")
            parts[-1] += "".join(f"\n{row}" for row in rows) + "\n"
    return "\n".join(parts)


def _row(field: Field) -> str:
    name = field.key.rpartition(".")[2]
    default = f"`{_shown(_plain(field.default))}`"
    kind = ", ".join(_kinds(field.type))
    bounds = _bounds(field.type)
    return f"| `{name}` | {kind}{bounds} | {default} | {field.unit} | {field.text} |"


def _kinds(kind: Any) -> Iterator[str]:
    origin = get_origin(kind)
    if origin is typing.Annotated:
        yield from _kinds(get_args(kind)[0])
    elif origin in (typing.Union, types.UnionType):
        for part in get_args(kind):
            yield from _kinds(part)
    elif origin is Literal:
        yield from (f"`{value}`" for value in get_args(kind))
    elif origin is tuple:
        yield "list of text"
    elif origin is dict:
        yield "text by name"
    else:
        names = {bool: "true/false", int: "integer", float: "number", str: "text"}
        yield names.get(kind) or ("secret" if kind is Secret else "null")


def _bounds(kind: Any) -> str:
    """The least and greatest value, ` 1…4096`, or nothing for a kind without."""
    low: float | str | None = None
    high: float | None = None
    for part in [kind, *_parts(kind)]:
        if isinstance(part, msgspec.Meta):
            low = part.ge if part.ge is not None else low
            low = f">{part.gt}" if part.gt is not None else low
            high = part.le if part.le is not None else high
    return "" if low is None and high is None else f" {low}…{high}"


def _parts(kind: Any) -> Iterator[Any]:
    for part in get_args(kind):
        yield part
        yield from _parts(part)


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value, enc_hook=str)


def _shown(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")
