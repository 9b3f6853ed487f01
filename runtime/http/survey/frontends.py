"""The frontends of a cluster, each asked for itself: how it is, and how it sees the instances."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

import attrs
import msgspec
import trio

from ...errors import RemoteProtocolError, TrinamoError
from ...nurseries import open_nursery
from ...protocol.discovery.frontends import FrontendEntry
from ...protocol.undecodable import UNDECODABLE
from ...traces.requests import RequestsView
from .http_client import fetch, fetch_json
from .instances import ASKED_AT_ONCE_MAX, Asking
from .overview import FrontendView

ANSWER_BYTES_MAX: Final = 1 << 20


@attrs.define
class FrontendLook:
    """One frontend: found in discovery, written down on this machine, or named by an operator."""

    name: str
    pid: int
    """0 if it is not known, or does not run."""
    url: str
    """Where it answers the API, perhaps on a port that several share."""
    status_url: str
    """Where it alone answers; empty if it has no such port."""
    status: str = "away"
    in_flight: int | None = None
    problem: str = ""
    health: dict[str, Any] | None = None
    """What it says of itself; None if it says nothing."""
    wants_key: bool = False
    """Whether what it knows is only for whoever brings a key."""
    view: FrontendView | None = None
    requests: RequestsView | None = None
    is_named: bool = False
    """Whether an operator has named it, so that a client's key may be sent to `url`."""
    is_own: bool = False
    """Whether it is the process that looks, which asks itself nothing."""


def add_listed(known: list[FrontendLook], listed: Iterable[FrontendEntry]) -> None:
    """Add those that discovery names to those that are known, each once."""
    for entry in listed:
        if any(each.status_url == entry.status for each in known):
            continue
        named = next(
            (e for e in known if not e.status_url and e.url in (entry.url, entry.status)), None
        )
        if named is not None:
            named.status_url = entry.status
        else:
            place = urlsplit(entry.status).netloc or entry.id
            known.append(FrontendLook(place, 0, entry.url, entry.status))


async def ask_frontends(found: Iterable[FrontendLook], asking: Asking) -> None:
    """Ask each how it is, all at once."""
    room = trio.CapacityLimiter(ASKED_AT_ONCE_MAX)

    async def ask(look: FrontendLook) -> None:
        async with room:
            await _ask(look, asking)

    async with open_nursery() as nursery:
        for look in found:
            if not look.is_own:
                nursery.start_soon(ask, look)


async def _ask(look: FrontendLook, asking: Asking) -> None:
    # One that shares its port answers there for any of them.
    places = [look.status_url] if look.status_url else []
    if look.is_named and look.url not in places:
        places.append(look.url)
    look.problem = "" if places else "it is starting"
    for url in places:
        key = asking.key if look.is_named and url == look.url else ""
        try:
            await _ask_at(look, url, asking, key)
        except TrinamoError as error:
            look.problem = look.problem or error.message
        else:
            look.problem = ""
            return


async def _ask_at(look: FrontendLook, url: str, asking: Asking, key: str) -> None:
    ask = partial(fetch, timeout_s=asking.timeout_s, bytes_max=ANSWER_BYTES_MAX, key=key)
    code, body = await ask(f"{url}/status")
    # How it is it tells all, also where what it knows is for those with a key.
    look.wants_key = code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
    health: Any = await fetch_json(f"{url}/health", timeout_s=asking.timeout_s)
    try:
        if code == HTTPStatus.OK:
            look.view = msgspec.json.decode(body, type=FrontendView)
        if asking.wants_requests and look.status_url == url:
            code, body = await ask(f"{url}/requests")
            if code == HTTPStatus.OK:
                look.requests = msgspec.json.decode(body, type=RequestsView)
    except UNDECODABLE as error:
        raise RemoteProtocolError(f"{url} is no frontend of this version: {error}") from error
    if not isinstance(health, dict) or "status" not in health:
        raise RemoteProtocolError(f"{url} is no frontend of this version")
    look.health, look.status = health, str(health["status"])
    in_flight = health.get("in_flight")
    look.in_flight = in_flight if isinstance(in_flight, int) else None
