"""The page of all fields that a request may have, as the one table says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from trinamo.runtime.protocol.openai.fields import ENDPOINTS, STEERING, Field, Use

_INTRO: Final = """\
# The fields of a request

<!-- Written by `make docs` from `runtime/protocol/openai/fields.py`; edit that. -->

What becomes of each field of a request's body, by endpoint.

* **Obeyed**: it does what it says. Where the table names a feature, the engine needs it (one of them, if
  there are several): `supported_parameters` of a model in `/v1/models` lists what its own does, and anything
  else is refused with 400 and the field's name in `error.param`.
* **Refused**: it would change the answer, and nothing here does it. A value that asks for nothing passes: null,
  and what the table shows, where `nothing` is false, 0 and what is empty.
* **Labels** cannot change the answer, and pass whatever they say.
* A field that is on none of these lists is nobody's. `http.unknown_fields` says what becomes of the request:
  `warn`, the default, answers it and names the field in the header `X-Trinamo-Unknown-Fields`, with the
  nearest one that there is, and in the log; `refuse` is a 400; `ignore` says nothing.

One field at most may say what form the answer has: {forms}.
Models that pass requests through (`worker --engine openai`) get all fields as they are, but for those that direct an
engine's transfers, which are refused at every depth at which an engine reads them: {steering}.
A model's own defaults (`sampling` of its card) stand for fields of sampling that a request leaves out.
"""


def fields_page() -> str:
    """The Markdown of `docs/fields.md`."""
    forms = [name for name, field in next(iter(ENDPOINTS.values())).items() if field.is_form]
    parts = [_INTRO.format(forms=_names(forms), steering=_names(STEERING))]
    parts += [_endpoint(path, fields) for path, fields in ENDPOINTS.items()]
    return "\n".join(parts)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _endpoint(path: str, fields: Mapping[str, Field]) -> str:
    lines = [f"## `{path}`\n", "| obeyed | of | feature | |", "|---|---|---|---|"]
    for name, field in fields.items():
        if field.use is Use.OBEYED:
            asked = ", ".join(f"`{each.value}`" for each in field.features(name))
            lines.append(f"| `{name}` | {field.of} | {asked} | {field.about} |")
    lines += ["", "| refused | of | but for | |", "|---|---|---|---|"]
    for name, field in fields.items():
        if field.use is Use.REFUSED:
            lines.append(f"| `{name}` | {field.of} | {_shown(field)} | {field.about} |")
    labels: dict[str, list[str]] = {}
    for name, field in fields.items():
        if field.use is Use.LABEL:
            labels.setdefault(field.of, []).append(f"`{name}`")
    lines += ["", "Labels:", ""]
    lines += [f"* {of}: {', '.join(names)}" for of, names in labels.items()]
    return "\n".join([*lines, ""])


def _shown(field: Field) -> str:
    """The values that pass; of those that most fields share, what they have in common."""
    if not field.harmless:
        return "null"
    return ", ".join(
        dict.fromkeys(
            f"`{_json(value)}`" if value else "nothing"
            for value in field.harmless
            if not isinstance(value, float)
        )
    )


def _json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace("'", '"')
