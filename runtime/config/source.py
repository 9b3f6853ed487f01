"""Where settings come from: YAML with line numbers, `TRINAMO_…` variables, command-line overrides.

Each reader turns its source into `{dotted key: ConfigValue}`, where a setting remembers where it
was written; `build_config` checks every value against its key's type and makes the structs. It
knows no key by name: the root section given to it is the list. Peer input never comes here. `dump`
goes the other way.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from operator import and_, eq
from pathlib import Path
from typing import Any, TypeVar

import attrs
import msgspec
import yaml

from ..errors import ConfigError
from .keys import Field, Secret, Section, config_fields, section_types

_Root = TypeVar("_Root", bound=Section)

FILE_BYTES_MAX = 256 * 1024

PREFIX = "TRINAMO_"
# Variables that are read elsewhere and are no configuration keys.
RESERVED_VARIABLES: Mapping[str, str] = {
    "TRINAMO_CONFIG": "the configuration file, as `--config`",
    "TRINAMO_PRESET": "the preset, as `--preset`",
    "TRINAMO_MODEL": "the GGUF file that the llamacpp engine loads",
}

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kKMGT]i?B|B)?")
_SIZE_FACTORS = {
    "": 1, "B": 1,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "kiB": 2**10, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip


@attrs.frozen
class ConfigValue:
    """A value as written, and the words that say where: `file x.yaml, line 3`."""

    value: Any = attrs.field(repr=False)  # It may be a password.
    origin: str
    is_text: bool = False


def parse_size(text: str) -> int:
    """Bytes from `512`, `64KiB` or `2GB` (powers of 1000 without the `i`); raises `ValueError`."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no size; write bytes, or such as 64KiB, 32MiB, 2GB")
    return round(float(found[1]) * _SIZE_FACTORS[found[2] or ""])


# --- YAML ------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """The safe loader with YAML 1.2's plain scalars.

    YAML 1.1 reads `off` as false, `1:30` as 90 and `2024-01-01` as a date; here they are text.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


def _resolve(tag: str, pattern: str, first: Iterable[str]) -> None:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), list(first))


_resolve("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""])
_resolve("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF")
_resolve("int", r"^[-+]?(?:0|[1-9][0-9]*)$", "-+0123456789")
_resolve(
    "float",
    r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][-+]?[0-9]+)?$",
    "-+.0123456789",
)


def read_yaml_file(root: type[Section], path: Path) -> dict[str, ConfigValue]:
    """Read one YAML file; every failure, also of the disk, is a `ConfigError`."""
    if path.is_fifo():
        raise ConfigError(
            f"{path} is a pipe, which can be read only once: write the configuration into a file"
        )
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as exc:
        raise ConfigError(f"cannot read the configuration file {path}: {exc.strerror}") from exc
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"file {path} is larger than {FILE_BYTES_MAX} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise ConfigError(f"file {path} is not UTF-8 text (byte {exc.start})") from exc
    return read_yaml(root, text, f"file {path}")


def read_yaml(root: type[Section], text: str, source: str) -> dict[str, ConfigValue]:
    """Read YAML text into settings that remember their lines."""
    try:
        loader = _Loader(text)
        document = loader.get_single_node()
        return {} if document is None else dict(_settings(root, loader, document, source))
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(exc, "problem", None) or str(exc).splitlines()[0]
        raise ConfigError(f"{source}{line}: not valid YAML: {problem}") from exc
    except (ValueError, LookupError, AttributeError) as exc:
        # A number beyond Python's bounds, or a text behind a tag that it is none of.
        raise ConfigError(f"{source}: a value cannot be read: {exc}") from exc
    except RecursionError:
        raise ConfigError(f"{source}: nested too deep") from None


def _settings(
    root: type[Section], loader: _Loader, node: yaml.Node, source: str, prefix: str = ""
) -> Iterator[tuple[str, ConfigValue]]:
    """The settings of one section of a composed document, and of those in it."""
    fields, sections = config_fields(root), section_types(root)
    if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null":
        return  # A section whose keys are all commented out.
    here = prefix or "the document"
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{here} ({_origin(source, node)}): expected keys and values")
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        origin = _origin(source, key_node)
        word = key_node.value
        # Anything else can be no key of ours, and is not to stand in a message.
        if not isinstance(word, str) or not word.isprintable() or len(word) > 80:
            raise ConfigError(f"{here} ({origin}): a key is one plain word")
        key = f"{prefix}.{word}" if prefix else word
        if key in seen:
            raise ConfigError(f"{key} ({origin}): given twice, first in line {seen[key]}")
        seen[key] = key_node.start_mark.line + 1
        if key in sections:
            yield from _settings(root, loader, value_node, source, key)
        elif key in fields:
            yield key, ConfigValue(loader.construct_object(value_node, deep=True), origin)
        else:
            raise _unknown(key, origin, [*fields, *sections])


def _origin(source: str, node: yaml.Node) -> str:
    return f"{source}, line {node.start_mark.line + 1}"


# --- environment and command line ------------------------------------------------------------


def read_environ(root: type[Section], environ: Mapping[str, str]) -> dict[str, ConfigValue]:
    """Read `TRINAMO_DATA_PLANE__TCP__PORT=…`; an unknown `TRINAMO_…` variable is an error.

    Variables that Kubernetes injects for a service whose name begins with `trinamo` are passed
    over (they are recognised by their `…_SERVICE_HOST`), as are `RESERVED_VARIABLES`.
    """
    fields = config_fields(root)
    names = {PREFIX + key.replace(".", "__").upper(): key for key in fields}
    links = [
        name.removesuffix("_SERVICE_HOST") for name in environ if name.endswith("_SERVICE_HOST")
    ]
    found: dict[str, ConfigValue] = {}
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in RESERVED_VARIABLES:
            continue
        if any(name.startswith((f"{link}_SERVICE_", f"{link}_PORT")) for link in links):
            continue
        if name not in names:
            hint = nearest(name, [*names, *RESERVED_VARIABLES])
            raise ConfigError(f"environment variable {name} is not known{hint}")
        found[names[name]] = ConfigValue(
            environ[name], f"environment variable {name}", is_text=True
        )
    return found


def read_overrides(root: type[Section], overrides: Mapping[str, Any]) -> dict[str, ConfigValue]:
    """Read dotted keys from the command line; text is converted, other values must fit as is."""
    fields = config_fields(root)
    found: dict[str, ConfigValue] = {}
    for key, value in overrides.items():
        if key not in fields:
            raise _unknown(key, "command line", fields)
        found[key] = ConfigValue(value, "command line", is_text=isinstance(value, str))
    return found


# --- checking and building -------------------------------------------------------------------


def build_config(root: type[_Root], settings: Mapping[str, ConfigValue]) -> _Root:
    """Check every setting against its key and build the frozen structs, innermost first."""
    fields = config_fields(root)
    values: dict[str, dict[str, Any]] = {prefix: {} for prefix in section_types(root)}
    for key, setting in settings.items():
        prefix, _, name = key.rpartition(".")
        values[prefix][name] = _checked(fields[key], setting)
    for prefix, section in reversed(list(section_types(root).items())):
        if prefix:
            outer, _, name = prefix.rpartition(".")
            values[outer][name] = _built(section, prefix, values[prefix], settings)
    return _built(root, "", values[""], settings)


def _built(
    section: type[_Root], prefix: str, values: dict[str, Any], settings: Mapping[str, ConfigValue]
) -> _Root:
    try:
        return section(**values)
    except ValueError as exc:
        inside = f"{prefix}." if prefix else ""
        origins = sorted({s.origin for key, s in settings.items() if key.startswith(inside)})
        raise ConfigError(f"{prefix} ({'; '.join(origins)}): {exc}") from exc


_IN_YAML = {"array": "a list", "object": "a mapping"}


def _checked(field: Field, setting: ConfigValue) -> Any:
    value = setting.value
    try:
        if isinstance(value, str):
            value = _from_text(field, value, setting)
        _refuse_nul(value)
        if field.is_mapping and isinstance(value, dict):
            # A number or a truth value as it would be written.
            value = {
                key: str(each).lower() if isinstance(each, (bool, int, float)) else each
                for key, each in value.items()
            }
        return msgspec.convert(
            value, type=field.type, strict=not setting.is_text, dec_hook=_decode_secret
        )
    except ValueError as exc:  # msgspec's ValidationError is one too.
        given = f"{setting.value!r:.80}"
        shown = "" if field.is_secret or given in str(exc) else f"; it is {given}"
        said = re.sub(r"`(array|object)( \| null)?`", lambda it: _IN_YAML[it[1]], str(exc))
        kind = msgspec.json.schema(field.type, schema_hook=lambda _: {"type": "string"})
        options = ", ".join(map(str, kind.get("enum", ())))
        choices = f" (one of {options})" if options else ""
        raise ConfigError(f"{field.key} ({setting.origin}): {said}{shown}{choices}") from exc


def _refuse_nul(value: Any) -> None:
    """No name of a file has one, and no header."""
    if "\0" in "".join(map(str, value if isinstance(value, list) else [value])):
        raise ValueError("text has no NUL")


def _from_text(field: Field, text: str, setting: ConfigValue) -> Any:
    """Sizes may be text in every source; lists and blanks only where there is nothing but text."""
    if field.unit == "bytes":
        return parse_size(text)
    if not setting.is_text:
        return text
    if (field.is_mapping or field.is_list) and text.lstrip().startswith(("{", '["')):
        # JSON, where values have commas.
        return msgspec.json.decode(text)
    if field.is_mapping:
        pairs = [part.partition("=") for part in text.split(",") if part.strip()]
        for name, sign, _ in pairs:
            if not (sign and name.strip()):
                raise ValueError(f"{name.strip()!r} is no name=value")
        return {name.strip(): value.strip() for name, _, value in pairs}
    if field.is_list:
        return [part.strip() for part in text.split(",") if part.strip()]
    if field.is_optional and not field.is_secret and text.strip() == "null":
        return None
    return text.strip()


def _decode_secret(kind: type, value: Any) -> Any:
    if kind is Secret and isinstance(value, str) and value:
        return Secret(value)
    raise ValueError("expected text that is not empty")


def dump(config: Section) -> str:
    """The whole configuration as YAML, every key of it; secrets are masked."""
    # An `enc_hook` is asked about what msgspec does not know: only secrets, whose `str` is a mask.
    return yaml.safe_dump(
        msgspec.to_builtins(config, enc_hook=str), sort_keys=False, allow_unicode=True
    )


def _unknown(key: str, origin: str, known: Iterable[str]) -> ConfigError:
    return ConfigError(f"{key} ({origin}): no such key{nearest(key, known)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The closest known name: first by spelling, then by the last part alone (`port`)."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.75)
    # Of those that are as good as equal, the one that begins alike: people shorten words.
    close.sort(key=lambda each: -sum(accumulate(map(eq, each, name), and_)))
    if not close:
        last = re.split(r"\.|__", name)[-1]
        tails = {re.split(r"\.|__", each)[-1]: each for each in reversed(names)}
        close = [tails[tail] for tail in difflib.get_close_matches(last, list(tails), n=1)]
    return f"; did you mean {close[0]}?" if close else ""
