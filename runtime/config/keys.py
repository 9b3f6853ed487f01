"""What configuration sections are made of: the section class, key types, secrets, the walk over keys.

The structs are the only list of keys. The YAML reader, the `TRINAMO_…` variables, the command line,
the presets and `docs/configuration.md` all walk them with `config_fields`, so a key added to a
struct exists everywhere. Read on in `config.py`, which has the sections, and `source.py`,
which reads them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Self, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import attrs
import msgspec
from msgspec import Meta

LOOPBACK_NAMES: Final = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})


class Secret:
    """A password or token. Only `reveal()` shows it: not `str`, `repr`, logs or `dump`."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """The secret itself, for the one call that needs it."""
        return self._value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return "Secret('***')"

    def __str__(self) -> str:
        return "***"


def about(text: str) -> Meta:
    """The sentence that explains a key wherever keys are listed."""
    return Meta(description=text)


# A day bounds every time, so a misplaced millisecond value cannot wait for a month.
Seconds = Annotated[float, Meta(gt=0, le=86_400, extra={"unit": "s"})]
Bytes = Annotated[int, Meta(ge=1, le=1 << 50, extra={"unit": "bytes"})]
# What fits a frame's u32 length fields and one allocation; less holds no message of any use.
FrameBytes = Annotated[int, Meta(ge=1024, le=1 << 30, extra={"unit": "bytes"})]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Tokens = Annotated[int, Meta(ge=1, le=1 << 20, extra={"unit": "tokens"})]
Port = Annotated[int, Meta(ge=0, le=65_535)]
# Names become parts of keys and subjects: no `/`, `.`, `*`, `>` or blanks.
NAME_PATTERN: Final = r"^[a-z0-9][a-z0-9_-]{0,62}$"
Name = Annotated[str, Meta(pattern=NAME_PATTERN)]
Text = Annotated[str, Meta(min_length=1, max_length=4096)]
Addresses = Annotated[tuple[Text, ...], Meta(min_length=1, max_length=64)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named group of keys; `__post_init__` holds the rules between keys of one section.

    What a transport is told beyond its section, such as a secret, is in a subclass of it.
    """

    @classmethod
    def of(cls, section: Section, **own: Any) -> Self:
        """What `section`, of a base class, says, and `own` beside or instead of it."""
        return cls(**{**msgspec.structs.asdict(section), **own})


def need_together(section: str, **values: object) -> None:
    """Raise `ValueError` if some of `values` are set while others are missing."""
    missing = [name for name, value in values.items() if value is None]
    if missing and len(missing) != len(values):
        given = ", ".join(sorted(set(values) - set(missing)))
        raise ValueError(f"{section}: {given} needs {' and '.join(missing)} beside it")


def need_consent(section: str, secret: str, addresses: tuple[str, ...]) -> None:
    """Raise `ValueError` if `secret`, the name of a key, would travel in clear beyond this machine."""
    # What stays on this machine: loopback, or a socket of the file system.
    away = [
        address
        for address in addresses
        if not address.startswith(("https://", "tls://", "wss://", "unix:"))
        and not is_loopback(_host(address))
    ]
    if away:
        raise ValueError(
            f"{section}: {secret} would travel in clear to {', '.join(away)}; set tls.enabled: true,"
            " or allow_plain_password: true where nobody else is on the network between"
        )


def need_addresses(
    addresses: Iterable[str], schemes: Collection[str], default_port: int, said: str
) -> None:
    """Raise `ValueError` for an address without a host or port, or of a scheme that nobody speaks.

    The scheme of `host:port` is empty, and a `default_port` of 0 is none; `said` is what it should
    be.
    """
    for address in addresses:
        try:
            parts = urlsplit(address if "://" in address else f"//{address}")
            port = default_port if parts.port is None else parts.port
            is_good = bool(parts.scheme in schemes and parts.hostname and port)
        except ValueError:
            is_good = False
        if not is_good:
            raise ValueError(f"{address.rpartition('@')[2]!r} is no {said}")


def is_name(address: str) -> bool:
    """Whether the host of `host:port`, or of a URL, is a name and no number."""
    return address_of(_host(address)) is None


def is_loopback(host: str) -> bool:
    """Whether a host, by name or number and without brackets, is this machine and nobody beyond."""
    address = address_of(host)
    return host.lower() in LOOPBACK_NAMES if address is None else address.is_loopback


def url_of(host: str, port: int | str, scheme: str = "http") -> str:
    """The URL of a server that listens there."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_everywhere(host: str) -> bool:
    """Whether a server that binds `host` binds every address of its machine."""
    address = address_of(host)
    return address is not None and address.is_unspecified


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The number that `host` is; None if it is a name."""
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def _host(address: str) -> str:
    return address.rpartition("//")[2].rpartition(":")[0].strip("[]")


@attrs.frozen
class Field:
    """One key: where it is, what it may hold, and the sentence that explains it."""

    key: str
    type: Any
    default: Any
    unit: str
    text: str

    @property
    def is_secret(self) -> bool:
        """Whether its value must never be shown."""
        return _mentions(self.type, Secret)

    @property
    def is_optional(self) -> bool:
        """Whether `null` is a value of it."""
        return _mentions(self.type, type(None))

    @property
    def choices(self) -> tuple[str, ...]:
        """What it may be, where that is one of some words, a switch or `null`, or may be such a word."""
        switch = ["true", "false"] if _mentions(self.type, bool) else []
        examples = [str(each) for meta in _metas(self.type) for each in meta.examples or ()]
        return (*words_of(self.type), *examples, *switch, *(["null"] if self.is_optional else []))

    @property
    def is_list(self) -> bool:
        """Whether it holds several values; one string stands for them separated by commas."""
        return _mentions(self.type, tuple)

    @property
    def is_mapping(self) -> bool:
        """Whether it holds texts by name; one string stands for them as `name=value,…`, or as JSON."""
        return _mentions(self.type, dict)


def words_of(kind: Any) -> Iterator[str]:
    """The texts that a type takes, where it takes only some."""
    for part in get_args(kind):
        if isinstance(part, str):
            yield part
        yield from words_of(part)


def _mentions(kind: Any, wanted: type) -> bool:
    if kind is wanted or get_origin(kind) is wanted:
        return True
    return any(_mentions(part, wanted) for part in get_args(kind))


def _metas(kind: Any) -> Iterator[Meta]:
    for part in get_args(kind):
        if isinstance(part, Meta):
            yield part
        else:
            yield from _metas(part)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


@cache
def section_types(root: type[Section], prefix: str = "") -> Mapping[str, type[Section]]:
    """Every section under `root` by its dotted key, parents first; the root's own key is empty."""
    found = {prefix: root}
    for name, kind in get_type_hints(root, include_extras=True).items():
        if _is_section(kind):
            found |= section_types(kind, f"{prefix}.{name}" if prefix else name)
    return found


@cache
def config_fields(root: type[Section]) -> Mapping[str, Field]:
    """Every key under `root` by its dotted name, in the order of the structs."""
    found: dict[str, Field] = {}
    for prefix, section in section_types(root).items():
        hints = get_type_hints(section, include_extras=True)
        for field in msgspec.structs.fields(section):
            kind = hints[field.name]
            if _is_section(kind):
                continue
            metas = list(_metas(kind))
            units = [
                str(meta.extra["unit"]) for meta in metas if meta.extra and "unit" in meta.extra
            ]
            texts = [meta.description for meta in metas if meta.description]
            key = f"{prefix}.{field.name}" if prefix else field.name
            is_made = field.default_factory is not msgspec.NODEFAULT
            default = field.default_factory() if is_made else field.default
            found[key] = Field(
                key, kind, default, units[0] if units else "", texts[-1] if texts else ""
            )
    return found


def look_at(*names: str | None) -> tuple[object, ...]:
    """What is another once one of these files is written or replaced, whatever links lead to it."""
    seen: list[object] = []
    for name in names:
        try:
            found = Path(name).stat() if name is not None else None
        except OSError as error:
            seen.append(error.errno)
        else:
            seen.append(found and (found.st_ino, found.st_mtime_ns, found.st_ctime_ns))
    return tuple(seen)
