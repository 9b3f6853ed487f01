"""A survey of a cluster for people, as tables, and for programs, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import attrs
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from .survey import InstanceLook, Survey

__all__ = ["survey_json", "survey_tables"]


def survey_json(survey: Survey) -> str:
    """The survey as one JSON object."""
    return json.dumps(attrs.asdict(survey), indent=2)


def survey_tables(survey: Survey) -> Iterator[RenderableType]:
    """The parts to print, in order."""
    yield Text(f"control plane: {survey.etcd}")
    if survey.cluster is not None:
        cluster = survey.cluster
        yield Text(f"cluster: `trinamo up`, pid {cluster['pid']}, {cluster['state']}")
    if survey.frontend is not None:
        yield _frontend(survey.frontend)
    yield _instances(survey.instances)
    if survey.instances:
        yield _models(survey)
    for why in survey.refused:
        yield Text(f"not understood: {why}", style="yellow")


def _frontend(frontend: dict[str, Any]) -> Text:
    text = f"frontend: {frontend['url']}, {frontend.get('status', 'unknown')}"
    if "in_flight" in frontend:
        text += f", {frontend['in_flight']} requests in flight"
    if "problem" in frontend:
        text += f" ({frontend['problem']})"
    return Text(text)


def _instances(instances: list[InstanceLook]) -> RenderableType:
    if not instances:
        return Text("instances: none is registered; start one with `trinamo worker`")
    table = Table(box=box.SIMPLE_HEAD, title="Instances", title_justify="left", pad_edge=False)
    for name in ("instance", "endpoint", "model", "engine", "state", "lease"):
        table.add_column(name, overflow="fold")
    for name in ("incarnation", "active", "pid"):
        table.add_column(name, justify="right")
    table.add_column("address", overflow="fold")
    for each in instances:
        health = each.health or {}
        table.add_row(
            each.id,
            each.endpoint,
            each.metadata.get("model", ""),
            each.metadata.get("engine", ""),
            _state(each),
            each.lease_id,
            str(each.incarnation),
            str(health.get("active", "-")),
            each.metadata.get("pid", "-"),
            ", ".join(f"{name} {address}" for name, address in each.transports.items()),
        )
    return table


def _state(instance: InstanceLook) -> str:
    if instance.is_draining:
        return "draining"
    if instance.problem:
        return "does not answer"
    return str((instance.health or {}).get("status", "registered"))


def _models(survey: Survey) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, title="Models", title_justify="left", pad_edge=False)
    for name in ("model", "engine", "endpoint"):
        table.add_column(name, overflow="fold")
    for name in ("instances", "context"):
        table.add_column(name, justify="right")
    for each in survey.models:
        table.add_row(
            each.name,
            each.engine,
            each.endpoint,
            str(each.instances),
            f"{each.context_tokens_max} tokens" if each.context_tokens_max else "-",
        )
    return table
