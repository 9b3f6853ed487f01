"""A survey of a cluster for people, as tables, and for programs, as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any, Final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from trinamo.runtime.logs.text import one_line
from trinamo.runtime.view.listing import InstanceLook
from trinamo.runtime.view.survey import FrontendLook, Survey

from .weights import weights_rows

ROWS_MAX: Final = 200
CELL_CHARACTERS_MAX: Final = 200
WIDTH_MAX: Final = 1000
"""Without a terminal, whose reader may be `grep`."""
_NUMBERS: Final = frozenset({"incarnation", "active", "KV blocks", "pid"})


def survey_json(survey: Survey) -> str:
    """The survey as one JSON object."""
    return json.dumps(survey.to_json(), indent=2)


def open_console() -> Console:
    """Where tables go: as wide as the terminal, or as `COLUMNS` says; else as wide as they are."""
    is_free = not (sys.stdout.isatty() or os.environ.get("COLUMNS"))
    return Console(highlight=False, markup=False, width=WIDTH_MAX if is_free else None)


def survey_tables(survey: Survey, width: int = WIDTH_MAX) -> Iterator[RenderableType]:
    """The parts to print, in order, for a terminal of `width` characters."""
    if survey.etcd:
        yield _text(f"control plane: {survey.etcd}")
    for what in survey.away:
        yield _text(what, style="bold yellow")
    if survey.cluster is not None:
        cluster = survey.cluster
        yield _text(f"cluster: `trinamo up`, pid {cluster['pid']}, {cluster['state']}")
    for each in survey.frontends[:ROWS_MAX]:
        yield _frontend(each)
    yield _instances(survey.instances, width)
    if any(_transfers_of(each) for each in survey.instances):
        yield _transfers(survey.instances)
    if survey.instances:
        yield _models(survey)
    yield from _weights(survey)
    for why in survey.refused[:ROWS_MAX]:
        yield _text(f"refused: {why}", style="yellow")
    if len(survey.refused) > ROWS_MAX:
        yield _text(f"{len(survey.refused) - ROWS_MAX} more entries were refused")


def _text(text: str, style: str = "") -> Text:
    """A line in which others may have written."""
    return Text(one_line(text, characters_max=1000), style=style)


def _add(table: Table, *cells: object) -> None:
    """A row in which others may have written."""
    table.add_row(*(Text(one_line(cell, characters_max=CELL_CHARACTERS_MAX)) for cell in cells))


def _bounded(table: Table, rows: int) -> RenderableType:
    if rows <= ROWS_MAX:
        return table
    return Group(table, Text(f"{rows - ROWS_MAX} more are not shown; --json has them all"))


def _frontend(look: FrontendLook) -> Text:
    name = look.name if look.name.startswith("frontend") else f"frontend {look.name}"
    text = f"{name}: {look.url}, {look.status}"
    if look.in_flight is not None:
        text += f", {look.in_flight} requests in flight"
    events = None if look.view is None or look.view.cluster is None else look.view.cluster.events
    if events is not None:
        text += f", {'' if events.is_connected else 'not '}connected to NATS"
    text += f", pid {look.pid}" if look.pid else ""
    text += f", metrics at {look.status_url}" if look.status_url else ""
    if look.wants_key and look.view is None:
        text += "; it wants a key (401): --key-env"
    return _text(text)


def _instances(instances: list[InstanceLook], width: int) -> RenderableType:
    """One row each; no cell wraps, so an id can be copied, and found by `grep`.

    Where not all columns have room, those that can be dispensed with are left out.
    """
    if not instances:
        return Text("instances: none is registered; start one with `trinamo worker`")
    rows = [_cells(each) for each in instances[:ROWS_MAX]]
    columns = [name for name in rows[0] if any(row[name] not in ("", "-") for row in rows)]
    for dispensable in ("lease", "address", "incarnation", "endpoint", "engine"):
        wide = sum(max(len(name), *(len(row[name]) for row in rows)) + 3 for name in columns)
        if wide > width and dispensable in columns:
            columns.remove(dispensable)
    table = Table(box=box.SIMPLE_HEAD, title="Instances", title_justify="left", pad_edge=False)
    for name in columns:
        table.add_column(name, no_wrap=True, justify="right" if name in _NUMBERS else "left")
    for row in rows:
        _add(table, *(row[name] for name in columns))
    return _bounded(table, len(instances))


def _cells(look: InstanceLook) -> dict[str, str]:
    """What each column says of an instance."""
    health, told = look.health or {}, look.metadata
    found = {
        "name": look.name or "-",
        "instance": look.id,
        "endpoint": look.endpoint,
        "model": told.get("model", ""),
        "engine": told.get("engine", ""),
        "role": told.get("role", ""),
        "state": _state(look),
        "lease": look.lease_id or "-",
        "incarnation": str(look.incarnation),
        "active": _active(look, health),
        "KV blocks": _blocks(look, health),
        "pid": told.get("pid", "-"),
        "address": ", ".join(f"{name} {address}" for name, address in look.transports.items()),
    }
    return {
        name: one_line(text, characters_max=CELL_CHARACTERS_MAX) for name, text in found.items()
    }


def _active(instance: InstanceLook, health: dict[str, Any]) -> str:
    """Its requests: by its own word, else by what it told the frontend, else the frontend's own."""
    told = (health.get("active"), instance.active, instance.in_flight)
    return str(next((each for each in told if each is not None), "-"))


def _blocks(instance: InstanceLook, health: dict[str, Any]) -> str:
    """Blocks in use of all that the engine of a model has; a stranger may have said it."""
    if instance.kv_used is not None and not health:
        return f"{instance.kv_used:.0%}"
    model = instance.metadata.get("model", "")
    by_model = health.get("blocks_by_model")
    blocks = by_model.get(model) if isinstance(by_model, dict) else health.get("blocks")
    if not isinstance(blocks, dict) or not blocks.get("total"):
        return "-"
    return f"{blocks.get('used', '?')}/{blocks.get('total', '?')}"


def _state(instance: InstanceLook) -> str:
    if instance.seen:
        return instance.seen
    if instance.is_draining:
        return "draining"
    if instance.problem:
        return "away"
    return str((instance.health or {}).get("status", "registered"))


def _transfers_of(instance: InstanceLook) -> dict[str, Any]:
    """What a worker says of its KV transfers; a stranger may have said it."""
    found = (instance.health or {}).get("transfers")
    return found if isinstance(found, dict) else {}


def _transfers(instances: list[InstanceLook]) -> RenderableType:
    """One line for each backend of each chain, in the order in which they are tried."""
    table = Table(box=box.SIMPLE_HEAD, title="KV transfers", title_justify="left", pad_edge=False)
    for name in ("instance", "backend", "state"):
        table.add_column(name, no_wrap=name == "instance", overflow="fold")
    for name in ("peers", "in flight", "fallbacks", "quarantined"):
        table.add_column(name, justify="right")
    # Once a process, of whatever endpoints.
    for instance in list({each.id: each for each in instances}.values())[:ROWS_MAX]:
        found = _transfers_of(instance)
        chain = found.get("chain")
        chain = chain if isinstance(chain, list) else []
        for number, backend in enumerate(each for each in chain if isinstance(each, dict)):
            counts = ("fallbacks", "quarantined_blocks")
            _add(
                table,
                "" if number else instance.id,
                str(backend.get("backend", "")),
                _backend_state(backend),
                f"{backend.get('usable_peers', 0)} of {backend.get('peers', 0)}",
                str(backend.get("in_flight", 0)),
                *("" if number else str(found.get(count, 0)) for count in counts),
            )
    return table


def _backend_state(backend: dict[str, Any]) -> str:
    state = "open" if backend.get("is_open", True) else "not open"
    problem = backend.get("problem")
    return f"{state}: {problem}" if problem else state


def _models(survey: Survey) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, title="Models", title_justify="left", pad_edge=False)
    for name in ("model", "aliases", "engine", "endpoint"):
        table.add_column(name, overflow="fold")
    for name in ("instances", "context"):
        table.add_column(name, justify="right")
    for each in survey.models[:ROWS_MAX]:
        _add(
            table,
            each.name,
            ", ".join(each.aliases) or "-",
            each.engine,
            each.endpoint,
            f"{each.instances} of {each.registered}"
            + (f", {each.refused} refused" if each.refused else ""),
            f"{each.context_tokens_max} tokens" if each.context_tokens_max else "-",
        )
    return _bounded(table, len(survey.models))


def _weights(survey: Survey) -> Iterator[RenderableType]:
    """One line for each file of each holder; nothing if nobody holds any."""
    rows = list(weights_rows((each.id, each.health) for each in survey.instances))
    if not rows:
        return
    table = Table(box=box.SIMPLE_HEAD, title="Weights", title_justify="left", pad_edge=False)
    for name in ("held by", "model", "sha256"):
        table.add_column(name, no_wrap=name == "held by", overflow="fold")
    table.add_column("size", justify="right")
    table.add_column("taken by", overflow="fold")
    for row in rows[:ROWS_MAX]:
        _add(
            table,
            row.instance_id,
            row.model,
            row.sha256[:16],
            f"{row.byte_count // 1_000_000} MB",
            "; ".join(row.takers) or "-",
        )
    yield _bounded(table, len(rows))
