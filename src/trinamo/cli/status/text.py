"""A survey of a cluster for people, as tables, and for programs, as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from typing import Any, Final, Literal

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from trinamo.runtime.kv.transfer.routes import TransferStatistics
from trinamo.runtime.logs.text import one_line
from trinamo.runtime.view.facts import read_facts, weights_rows
from trinamo.runtime.view.listing import InstanceLook, refusals
from trinamo.runtime.view.rows import SINGLY_MAX, WELL, InstanceRow, InstanceRows, grouped
from trinamo.runtime.view.survey import FrontendLook, Survey

ROWS_MAX: Final = 200
SINGLE_ROWS_MAX: Final = 4096
"""Of instances, where somebody asks for each."""
CELL_CHARACTERS_MAX: Final = 200
WIDTH_MAX: Final = 1000
"""Without a terminal, whose reader may be `grep`."""
_NUMBERS: Final = frozenset(
    (
        *("incarnation", "active", "KV blocks", "pid", "peers", "in flight", "fallbacks"),
        *("quarantined", "instances", "context", "size", "waiting"),
    )
)


def survey_json(survey: Survey) -> str:
    """The survey as one JSON object."""
    return json.dumps(survey.to_json(), indent=2)


def open_console() -> Console:
    """Where tables go: as wide as the terminal, or as `COLUMNS` says; else as wide as they are."""
    is_free = not (sys.stdout.isatty() or os.environ.get("COLUMNS"))
    return Console(highlight=False, markup=False, width=WIDTH_MAX if is_free else None)


def survey_tables(
    survey: Survey, width: int = WIDTH_MAX, *, each: bool = False
) -> Iterator[RenderableType]:
    """The parts to print, in order, for a terminal of `width` characters.

    Of more than `SINGLY_MAX` instances a row for each model and role, and of the instances only those
    with which something is wrong, unless `each` is asked for.
    """
    if survey.etcd:
        yield _text(f"control plane: {survey.etcd}")
    for what in survey.away:
        yield _text(what, style="bold yellow")
    if survey.cluster is not None:
        cluster = survey.cluster
        yield _text(f"cluster: `trinamo up`, pid {cluster['pid']}, {cluster['state']}")
    for look in survey.frontends[:ROWS_MAX]:
        yield _frontend(look)
    shown, count = survey.instances, len(survey.instances)
    if count > SINGLY_MAX and not each:
        rows = InstanceRows().make(shown, Counter(), 0.0)
        yield _groups(rows)
        wrong = [pair for pair in zip(rows, shown, strict=True) if pair[0].state not in WELL]
        wrong.sort(key=lambda pair: pair[0].state == "draining")
        shown = [look for _, look in wrong[:SINGLY_MAX]]
        yield _text(f"{count - len(shown)} instances are not shown one by one: --instances does")
    if shown or not count:
        yield _instances(shown, width)
    yield from _transfers(shown)
    if count:
        yield _models(survey)
    yield from _weights(shown)
    refused = survey.refused if each else refusals(survey.refused)
    for why in refused[:ROWS_MAX]:
        yield _text(f"refused: {why}", style="yellow")
    if len(refused) > ROWS_MAX:
        yield _text(f"{len(refused) - ROWS_MAX} more entries were refused")


def _text(text: str, style: str = "") -> Text:
    """A line in which others may have written."""
    return Text(one_line(text, characters_max=1000), style=style)


def _table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    whole: Container[str],
    rows_max: int = ROWS_MAX,
) -> RenderableType:
    """A row each, in which others may have written; no cell of the columns `whole` wraps."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for name in columns:
        justify: Literal["left", "right"] = "right" if name in _NUMBERS else "left"
        is_whole = name in whole
        overflow: Literal["ellipsis", "fold"] = "ellipsis" if is_whole else "fold"
        table.add_column(name, no_wrap=is_whole, justify=justify, overflow=overflow)
    for row in rows[:rows_max]:
        table.add_row(*(Text(one_line(cell, characters_max=CELL_CHARACTERS_MAX)) for cell in row))
    if len(rows) <= rows_max:
        return table
    return Group(table, Text(f"{len(rows) - rows_max} more are not shown; --json has them all"))


def _frontend(look: FrontendLook) -> Text:
    name = look.name if look.name.startswith("frontend") else f"frontend {look.name}"
    where = f" on {look.host}" if look.host else ""
    text = f"{name}{where}: {look.api_url or look.url}, {look.status}"
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


def _groups(instances: list[InstanceRow]) -> RenderableType:
    """One row for each model and role; sums of what its instances say of their load."""
    rows = [
        [
            each.model or "-",
            each.role or "-",
            each.instances,
            ", ".join(f"{count} {state}" for state, count in each.states.items()),
            each.active,
            each.waiting,
            f"{each.blocks_used}/{each.blocks_total}" if each.blocks_total else "-",
            ", ".join(f"{count} of {build}" for build, count in each.builds.items()) or "-",
        ]
        for each in grouped(instances)
    ]
    columns = ("model", "role", "instances", "state", "active", "waiting", "KV blocks", "build")
    return _table("Instances by model and role", columns, rows, whole=("instances",))


def _instances(instances: list[InstanceLook], width: int) -> RenderableType:
    """One row each; no cell wraps, so an id can be copied, and found by `grep`.

    Where not all columns have room, those that can be dispensed with are left out.
    """
    if not instances:
        return Text("instances: none is registered; start one with `trinamo worker`")
    is_mixed = len({each.build for each in instances if each.build}) > 1
    rows = [_cells(each, is_mixed=is_mixed) for each in instances]
    if len({row["host"] for row in rows}) == 1:
        # On one machine it is in the lines of the frontends.
        rows = [{**row, "host": ""} for row in rows]
    columns = [name for name in rows[0] if any(row[name] not in ("", "-") for row in rows)]
    for dispensable in ("lease", "address", "incarnation", "endpoint", "engine"):
        wide = sum(max(len(name), *(len(row[name]) for row in rows)) + 3 for name in columns)
        if wide > width and dispensable in columns:
            columns.remove(dispensable)
    cells = [[row[name] for name in columns] for row in rows]
    return _table("Instances", columns, cells, whole=columns, rows_max=SINGLE_ROWS_MAX)


def _cells(look: InstanceLook, *, is_mixed: bool) -> dict[str, str]:
    """What each column says of an instance, its build if not all have one; a stranger may have said it."""
    health, told = look.health or {}, look.metadata
    # Its requests: by its own word, else by what it told the frontend, else the frontend's own.
    requests = (health.get("active"), look.active, look.in_flight)
    state = "draining" if look.is_draining else "away" if look.problem else ""
    found = {
        "name": look.name or "-",
        "instance": look.id,
        "host": told.get("host", ""),
        "endpoint": look.endpoint,
        "model": told.get("model", ""),
        "engine": told.get("engine", ""),
        "role": told.get("role", ""),
        "state": look.seen or state or str(health.get("status", "registered")),
        "lease": look.lease_id or "-",
        "incarnation": str(look.incarnation),
        "active": str(next((each for each in requests if each is not None), "-")),
        "KV blocks": _blocks(look, health),
        "pid": told.get("pid", "-"),
        "build": look.build if is_mixed else "",
        "address": ", ".join(f"{name} {address}" for name, address in look.transports.items()),
    }
    return {
        name: one_line(text, characters_max=CELL_CHARACTERS_MAX) for name, text in found.items()
    }


def _blocks(look: InstanceLook, health: dict[str, Any]) -> str:
    """Blocks in use of all that the engine of a model has."""
    if look.kv_used is not None and not health:
        return f"{look.kv_used:.0%}"
    by_model = health.get("blocks_by_model")
    model = look.metadata.get("model", "")
    blocks = by_model.get(model) if isinstance(by_model, dict) else health.get("blocks")
    if not isinstance(blocks, dict) or not blocks.get("total"):
        return "-"
    return f"{blocks.get('used', '?')}/{blocks.get('total', '?')}"


def _transfers(instances: list[InstanceLook]) -> Iterator[RenderableType]:
    """One line for each backend of each chain, in the order in which they are tried."""
    rows: list[list[object]] = []
    # Once a process, of whatever endpoints.
    for look in {each.id: each for each in instances}.values():
        found = read_facts((look.health or {}).get("transfers"), TransferStatistics)
        found = found or TransferStatistics()
        for number, each in enumerate(found.chain):
            state = "open" if each.is_open else "not open"
            counts = ("", "") if number else (found.fallbacks, found.quarantined_blocks)
            rows.append(
                [
                    "" if number else look.id,
                    each.backend,
                    f"{state}: {each.problem}" if each.problem else state,
                    f"{each.usable_peers} of {each.peers}",
                    each.in_flight,
                    *counts,
                ]
            )
    columns = ("instance", "backend", "state", "peers", "in flight", "fallbacks", "quarantined")
    if rows:
        yield _table("KV transfers", columns, rows, whole=("instance",))


def _models(survey: Survey) -> RenderableType:
    rows = [
        [
            each.name,
            ", ".join(each.aliases) or "-",
            each.engine,
            each.endpoint,
            f"{each.instances} of {each.registered}"
            + (f", {each.refused} refused" if each.refused else ""),
            f"{each.context_tokens_max} tokens" if each.context_tokens_max else "-",
        ]
        for each in survey.models
    ]
    columns = ("model", "aliases", "engine", "endpoint", "instances", "context")
    return _table("Models", columns, rows, whole=())


def _weights(instances: list[InstanceLook]) -> Iterator[RenderableType]:
    rows = [
        [
            row.instance_id,
            row.model,
            row.sha256[:16],
            f"{row.byte_count // 1_000_000} MB",
            "; ".join(row.takers) or "-",
        ]
        for row in weights_rows((each.id, each.health) for each in instances)
    ]
    if rows:
        columns = ("held by", "model", "sha256", "size", "taken by")
        yield _table("Weights", columns, rows, whole=("held by",))
