"""`/sd`: which ports Prometheus should scrape, in the form of its `http_sd_configs`.

Every worker and frontend of the cluster with a status port is a target, as the control plane names
them; a frontend that has none names itself by the address that it was asked at. The control plane
is read at most once in `READ_INTERVAL_S`, however many ask; while it is away the last list holds,
and without one the answer is an error, which lets Prometheus keep what it has.
https://prometheus.io/docs/prometheus/latest/http_sd/
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

import attrs
import msgspec
import trio

from ..config.keys import is_everywhere
from ..env import Clock
from ..errors import TrinamoError, UnavailableError
from ..planes import ControlPlane
from .listing import Listing, read_listing

READ_INTERVAL_S: Final = 2.0
READ_TIMEOUT_S: Final = 5.0
TARGETS_MAX: Final = 4096
LABEL_CHARACTERS_MAX: Final = 128
ADDRESS: Final = re.compile(r"(\[[0-9a-fA-F:.%]{2,64}\]|[A-Za-z0-9._-]{1,253}):\d{1,5}")
LABEL: Final = "__meta_trinamo_"


class TargetGroup(msgspec.Struct, frozen=True):
    """One process."""

    targets: list[str]
    """Its `host:port`."""
    labels: dict[str, str]
    """`__meta_trinamo_…`: role, instance id, models, engine, endpoints."""


@attrs.define
class _Found:
    """What is known of one address."""

    role: str
    id: str
    models: list[str] = attrs.field(factory=list)
    engines: list[str] = attrs.field(factory=list)
    endpoints: list[str] = attrs.field(factory=list)

    def group(self, address: str) -> TargetGroup:
        told = {
            "role": self.role,
            "instance_id": self.id,
            "model": _joined(self.models),
            "engine": _joined(self.engines),
            "endpoint": _joined(self.endpoints),
        }
        return TargetGroup([address], {LABEL + name: text for name, text in told.items() if text})


class ScrapeTargets:
    """The targets of one cluster."""

    def __init__(self, control: ControlPlane, clock: Clock) -> None:
        self._control, self._clock = control, clock
        self._known: dict[str, _Found] | None = None
        self._read_at: float | None = None
        self._reading = trio.Lock()

    async def groups(self, own_address: str) -> Sequence[TargetGroup]:
        """All of them, at most `TARGETS_MAX`, workers first, in the order of their keys.

        `own_address` stands for the frontends if none has a status port. Raises `UnavailableError`
        while nothing is known, because the control plane is away. Safe to cancel.
        """
        async with self._reading:
            if self._read_at is None or self._clock.now() - self._read_at >= READ_INTERVAL_S:
                with trio.move_on_after(READ_TIMEOUT_S), suppress(TrinamoError):
                    self._known = _look(await read_listing(self._control))
                # Also after a failure: an outage must not make each question wait.
                self._read_at = self._clock.now()
        if self._known is None:
            raise UnavailableError("the control plane does not say who there is")
        groups = [found.group(address) for address, found in self._known.items()]
        has_frontend = any(found.role == "frontend" for found in self._known.values())
        if not has_frontend and ADDRESS.fullmatch(own_address):
            groups.append(_Found("frontend", "").group(own_address))
        return groups[:TARGETS_MAX]


def _look(listing: Listing) -> dict[str, _Found]:
    found: dict[str, _Found] = {}
    for instance in listing.instances:
        told = instance.metadata
        for address in _address(told.get("status", "")):
            role = told.get("role", "")
            role = role if role in ("prefill", "decode") else "worker"
            each = found.setdefault(address, _Found(role, instance.id))
            each.models.append(told.get("model", ""))
            each.engines.append(told.get("engine", ""))
            each.endpoints.append(instance.endpoint)
    for frontend in listing.frontends:
        for address in _address(frontend.status):
            found.setdefault(address, _Found("frontend", frontend.id))
    return found


def _address(url: str) -> Iterator[str]:
    """`host:port` of a status port's URL, if that is one which others can ask."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    is_one = parts.scheme == "http" and port and not is_everywhere(host)
    if is_one and ADDRESS.fullmatch(address):
        yield address


def _joined(texts: Sequence[str]) -> str:
    named: Any = dict.fromkeys(text for text in texts if text)
    return ",".join(named)[:LABEL_CHARACTERS_MAX]
