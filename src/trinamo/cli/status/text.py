"""A survey of a cluster for people, as tables, and for programs, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import attrs
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trinamo.runtime.http.survey.instances import InstanceLook
from trinamo.runtime.http.survey.survey import Survey
from trinamo.runtime.logs.text import one_line

from .weights import weights_rows

ROWS_MAX: Final = 200
CELL_CHARACTERS_MAX: Final = 200


def survey_json(survey: Survey) -> str:
    """The survey as one JSON object."""
    return json.dumps(attrs.asdict(survey), indent=2)


def survey_tables(survey: Survey) -> Iterator[RenderableType]:
    """The parts to print, in order."""
    if survey.etcd:
        yield _text(f"control plane: {survey.etcd}")
    for what in survey.away:
        yield _text(what, style="bold yellow")
    if survey.cluster is not None:
        cluster = survey.cluster
        yield _text(f"cluster: `trinamo up`, pid {cluster['pid']}, {cluster['state']}")
    if survey.frontend is not None:
        yield _frontend(survey.frontend)
    for each in survey.frontends[:ROWS_MAX]:
        in_flight = "" if each.in_flight is None else f", {each.in_flight} requests in flight"
        yield _text(
            f"  {each.name} at {each.url}: pid {each.pid}, {each.status}{in_flight},"
            f" metrics at {each.status_url or '-'}"
        )
    yield _instances(survey.instances)
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


def _frontend(frontend: dict[str, Any]) -> Text:
    text = f"frontend: {frontend['url']}, {frontend.get('status', 'unknown')}"
    if "in_flight" in frontend:
        text += f", {frontend['in_flight']} requests in flight"
    events = frontend.get("events")
    if events is not None:
        text += f", {'' if events['is_connected'] else 'not '}connected to NATS"
    return _text(text)


def _instances(instances: list[InstanceLook]) -> RenderableType:
    if not instances:
        return Text("instances: none is registered; start one with `trinamo worker`")
    table = Table(box=box.SIMPLE_HEAD, title="Instances", title_justify="left", pad_edge=False)
    has_names = any(each.name for each in instances)
    if has_names:
        table.add_column("name", overflow="fold")
    for name in ("instance", "endpoint", "model", "engine", "role", "state", "lease"):
        table.add_column(name, overflow="fold")
    for name in ("incarnation", "active", "KV blocks", "pid"):
        table.add_column(name, justify="right")
    table.add_column("address", overflow="fold")
    for each in instances[:ROWS_MAX]:
        health = each.health or {}
        _add(
            table,
            *([each.name or "-"] if has_names else []),
            each.id,
            each.endpoint,
            each.metadata.get("model", ""),
            each.metadata.get("engine", ""),
            each.metadata.get("role", ""),
            _state(each),
            each.lease_id or "-",
            str(each.incarnation),
            _active(each, health),
            _blocks(each, health),
            each.metadata.get("pid", "-"),
            ", ".join(f"{name} {address}" for name, address in each.transports.items()),
        )
    return _bounded(table, len(instances))


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
        table.add_column(name, overflow="fold")
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
        table.add_column(name, overflow="fold")
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
