"""What processes say of themselves, taken apart: anybody may have registered a status port.

Whatever does not make sense is as if it had not been said; texts are cut.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar

import msgspec

TEXT_CHARACTERS_MAX: Final = 160
ENTRIES_MAX: Final = 64
"""Of a list or a table that a process tells."""
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""JSON has integers of any length, which no rate and no encoder takes."""
Minute = tuple[_Count, _Count, _Count, _Count, _Count]
"""When it began, in seconds since the Unix epoch; its requests, failures and tokens, and the most
requests under way in it."""
MINUTES_MAX: Final = 60
T = TypeVar("T")


class EngineFacts(msgspec.Struct, kw_only=True):
    """An engine's gauges and counters: `EngineStatistics`."""

    running: _Count = 0
    paused: _Count = 0
    waiting: _Count = 0
    waiting_tokens: _Count = 0
    blocks_used: _Count = 0
    blocks_free: _Count = 0
    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0
    hit_tokens: _Count = 0
    sought_tokens: _Count = 0
    preemptions: _Count = 0
    failures: _Count = 0


class QueueFacts(msgspec.Struct, kw_only=True):
    """A work queue as a process last read it."""

    ready: _Count = 0
    leased: _Count = 0
    dead: _Count = 0
    oldest_age_s: float = 0.0


class Backend(msgspec.Struct, kw_only=True):
    """One backend of a chain of KV transfers."""

    backend: str = ""
    is_open: bool = True
    peers: _Count = 0
    usable_peers: _Count = 0
    in_flight: _Count = 0
    done: _Count = 0
    done_bytes: _Count = 0
    problem: str = ""


class Transfers(msgspec.Struct, kw_only=True):
    """The chain in its order."""

    chain: list[Backend] = []
    moved_bytes: dict[str, _Count] = {}
    """By the instance id of the peer: from it and to it, by transfers that were begun here."""
    fallbacks: _Count = 0
    quarantined_blocks: _Count = 0


class WorkerFacts(msgspec.Struct, kw_only=True):
    """What a worker's status port says."""

    status: str = ""
    active: _Count = 0
    lease_id: str = ""
    incarnation: _Count = 0
    blocks: dict[str, _Count] = {}
    engines: dict[str, EngineFacts] = {}
    """By model."""
    queues: dict[str, QueueFacts] = {}
    transfers: Transfers | None = None


class FrontendTotals(msgspec.Struct, kw_only=True):
    """What a frontend has counted since its start."""

    requests: _Count = 0
    failures: _Count = 0
    tokens: _Count = 0
    first_token: dict[str, _Count] = {}
    """How many requests had their first token within so many seconds, by that bound."""
    gaps: dict[str, _Count] = {}
    """Likewise from one token to the next."""


class FrontendFacts(msgspec.Struct, kw_only=True):
    """What a frontend's status port says."""

    status: str = ""
    in_flight: _Count = 0
    waiting: _Count = 0
    """Requests that wait for a place."""
    totals: FrontendTotals = msgspec.field(default_factory=FrontendTotals)
    streams: dict[str, _Count] = {}
    """Its requests under way, by the instance id of the worker that answers."""
    queues: dict[str, QueueFacts] = {}
    minutes: list[Minute] = []
    """The last hour, the oldest first."""


def read_facts(told: Any, of: type[T]) -> T | None:
    """`told` as `of`; None if it is nothing of the kind."""
    try:
        return msgspec.convert(told, of)
    except (msgspec.ValidationError, RecursionError):
        return None


def cut_text(text: object) -> str:
    """At most `TEXT_CHARACTERS_MAX` of it."""
    found = str(text)
    return found if len(found) <= TEXT_CHARACTERS_MAX else f"{found[:TEXT_CHARACTERS_MAX]}…"
