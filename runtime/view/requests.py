"""One request over all processes: its legs, as each of them has kept them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Final, TypeVar
from urllib.parse import urlsplit

import msgspec
import trio

from ..errors import RemoteProtocolError, TrinamoError
from ..http.status import UnauthorizedError
from ..http.transport import Fetch
from ..nurseries import open_nursery
from ..protocol.undecodable import UNDECODABLE, decoding_fault
from ..traces.ring import ID_CHARACTERS_MAX, LegView, ProcessView, TraceView, root_of

ASK_TIMEOUT_S: Final = 1.5
ASKED_AT_ONCE_MAX: Final = 32
ANSWER_BYTES_MAX: Final = 1 << 20
LEGS_MAX: Final = 300
T = TypeVar("T")


class LegRow(msgspec.Struct, kw_only=True):
    """One leg, and whose it is."""

    process: str
    leg: LegView


class LegsView(msgspec.Struct, kw_only=True):
    """One request, its legs in the order in which they began."""

    request_id: str
    legs: list[LegRow]
    away: list[str]
    """Who did not answer, one sentence each."""
    asked: int
    now: float
    """The end of those that are under way, in seconds since the Unix epoch."""


async def ask_places(
    fetch: Fetch,
    path: str,
    kind: type[T],
    places: Mapping[str, str],
    keys: Mapping[str, str] = MappingProxyType({}),
) -> tuple[list[tuple[str, T]], list[str]]:
    """What the processes at `places`, their names by URL, answer there; and who is away.

    `keys` are those of clients, for the places that want one.
    """
    found: list[tuple[str, T]] = []
    away: list[str] = []
    room = trio.CapacityLimiter(ASKED_AT_ONCE_MAX)

    async def ask(url: str, name: str) -> None:
        try:
            async with room:
                found.append((name, await _ask(fetch, url + path, kind, keys.get(url, ""))))
        except TrinamoError as error:
            away.append(f"{name} does not answer: {error.message}")

    async with open_nursery() as nursery:
        for url, name in places.items():
            nursery.start_soon(ask, url, name)
    return found, sorted(away)


async def _ask(fetch: Fetch, url: str, kind: type[T], key: str) -> T:
    status, body = await fetch(url, timeout_s=ASK_TIMEOUT_S, bytes_max=ANSWER_BYTES_MAX, key=key)
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        what = "that key is no operator's" if key else "it wants a key; --key-env names one"
        raise UnauthorizedError(f"{status}: {what}")
    try:
        if status == 200:
            return msgspec.json.decode(body, type=kind)
    except UNDECODABLE as error:
        raise RemoteProtocolError(
            f"{url} is not of this version: {decoding_fault(error)}"
        ) from error
    raise RemoteProtocolError(f"it answers with {status} at {urlsplit(url).path}")


def legs_by_request(traces: Iterable[tuple[str, TraceView]]) -> list[tuple[str, list[LegRow]]]:
    """What processes, by name, have kept: the legs of each request as they began, the newest last.

    A client may have given several requests the same id: inside the cluster theirs differ.
    """
    found: dict[str, list[LegRow]] = {}
    for name, trace in traces:
        if trace.legs:
            rows = [LegRow(process=name, leg=leg) for leg in trace.legs]
            found.setdefault(root_of(trace.request_id), []).extend(rows)
    for rows in found.values():
        rows.sort(key=lambda row: row.leg.start)
    return sorted(found.items(), key=lambda each: each[1][0].leg.start)


def legs_view(
    request_id: str, found: Iterable[tuple[str, ProcessView]], away: list[str], now: float
) -> LegsView:
    told = list(found)
    requests = legs_by_request((name, trace) for name, view in told for trace in view.traces)
    newest, legs = requests[-1] if requests else ("", [])
    return LegsView(
        request_id=newest or request_id[:ID_CHARACTERS_MAX],
        legs=legs[:LEGS_MAX],
        away=away,
        asked=len(told) + len(away),
        now=now,
    )
