"""One of several models of a worker, as one line of text: `NAME=ENGINE;key=value;…`.

Text, so that it is the same in a file, in a variable and on the command line. A worker of one model
has keys of its own for all that (`worker.model_name`, …).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import attrs

ENGINES: Final = ("auto", "llamacpp", "exact", "echo", "mocker", "openai")
_KEYS: Final = ("path", "sha256", "alias", "endpoint", "arg")
_OWN_ENGINE: Final = re.compile(r"[^\s:;,]+:[A-Za-z_][\w.]*")


def is_own_engine(engine: str) -> bool:
    """Whether it is a name in a module or in a file of the user, rather than one of ours."""
    return ":" in engine


def check_engine(engine: str) -> None:
    """Raise `ValueError` with a sentence for what can be no engine; nothing is imported."""
    if engine not in ENGINES and not _OWN_ENGINE.fullmatch(engine):
        raise ValueError(
            f"{engine!r} is no engine: {', '.join(ENGINES)}, or one of your own as"
            " module:attribute or path/to/file.py:attribute"
        )


@attrs.frozen
class ModelLine:
    """What one line says."""

    name: str
    engine: str
    path: str | None = None
    sha256: str | None = None
    aliases: tuple[str, ...] = ()
    endpoint: str | None = None
    engine_args: Mapping[str, str] = attrs.field(factory=dict)


def parse_model(line: str) -> ModelLine:
    """Take `NAME=ENGINE` apart, with `path`, `sha256`, `endpoint`, and repeatably `alias` and `arg`.

    Raises `ValueError` with a sentence.
    """
    head, *more = (part.strip() for part in line.split(";"))
    name, _, engine = (part.strip() for part in head.rpartition("="))
    if not name:
        raise ValueError(f"{line!r} is no model: write NAME=ENGINE, such as chat=exact")
    try:
        check_engine(engine)
    except ValueError as error:
        raise ValueError(f"{line!r}: {error}") from None
    given: dict[str, str] = {}
    aliases: list[str] = []
    engine_args: dict[str, str] = {}
    for part in filter(None, more):
        key, _, value = (each.strip() for each in part.partition("="))
        if key not in _KEYS or not value or key in given:
            raise ValueError(
                f"{line!r}: {part!r} is not path=, sha256= or endpoint=, once, or alias= or"
                " arg=NAME=VALUE"
            )
        if key == "alias":
            aliases.append(value)
        elif key == "arg":
            parameter, _, text = value.partition("=")
            engine_args[parameter.strip()] = text.strip()
        else:
            given[key] = value
    return ModelLine(name, engine, aliases=tuple(aliases), engine_args=engine_args, **given)
