"""One of several models of a worker, as one line of text: `NAME=ENGINE;key=value;…`.

Text, so that it is the same in a file, in a variable and on the command line. A worker of one model
has keys of its own for all that (`worker.model_name`, …).
"""

from __future__ import annotations

from typing import Final

import attrs

__all__ = ["ENGINES", "ModelLine", "parse_model"]

ENGINES: Final = ("auto", "llamacpp", "exact", "echo", "mocker")


@attrs.frozen
class ModelLine:
    """What one line says."""

    name: str
    engine: str
    path: str | None = None
    sha256: str | None = None
    aliases: tuple[str, ...] = ()
    endpoint: str | None = None


def parse_model(line: str) -> ModelLine:
    """Take `NAME=ENGINE` apart, with `path`, `sha256`, `endpoint` and `alias` (repeatable) after it.

    Raises `ValueError` with a sentence.
    """
    head, *more = (part.strip() for part in line.split(";"))
    name, _, engine = (part.strip() for part in head.rpartition("="))
    if not name:
        raise ValueError(f"{line!r} is no model: write NAME=ENGINE, such as chat=exact")
    if engine not in ENGINES:
        raise ValueError(f"{line!r}: {engine!r} is no engine ({', '.join(ENGINES)})")
    given: dict[str, str] = {}
    aliases: list[str] = []
    for part in filter(None, more):
        key, _, value = (each.strip() for each in part.partition("="))
        if key not in ("path", "sha256", "alias", "endpoint") or not value or key in given:
            raise ValueError(
                f"{line!r}: {part!r} is not path=, sha256= or endpoint=, once, or alias="
            )
        if key == "alias":
            aliases.append(value)
        else:
            given[key] = value
    return ModelLine(name, engine, aliases=tuple(aliases), **given)
