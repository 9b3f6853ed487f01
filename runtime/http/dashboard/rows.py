"""The rows of a snapshot, as they go to the page: what it draws, and nothing that it does not.

What strangers have written was cut before it came here; the page writes it as text alone.
"""

from __future__ import annotations

import msgspec

from ...planes import ControlStatistics, EventStatistics
from ...traces.requests import RequestView
from ..survey.listing import ModelLook
from .facts import EngineFacts, Minute, QueueFacts
from .timeline import Event


class FrontendRow(msgspec.Struct, kw_only=True):
    """One frontend."""

    name: str
    pid: int
    url: str
    status: str
    problem: str = ""
    in_flight: int = 0
    waiting: int = 0
    """Requests that wait for a place."""
    requests_per_s: float = 0.0
    failures_per_s: float = 0.0
    tokens_per_s: float = 0.0
    streams: dict[str, int] = {}
    first_token: dict[str, int] = {}
    gaps: dict[str, int] = {}
    minutes: list[Minute] = []
    is_own: bool = False


class BackendRow(msgspec.Struct, kw_only=True):
    """KV transfers of one worker over one backend."""

    backend: str
    state: str
    in_flight: int = 0
    done: int = 0
    bytes_per_s: float = 0.0


class InstanceRow(msgspec.Struct, kw_only=True):
    """One instance: a worker's endpoint."""

    id: str
    name: str
    endpoint: str
    model: str
    engine: str
    role: str
    pid: str
    state: str
    """`ready`, `draining`, `away`, … in a word."""
    problem: str = ""
    in_flight: int = 0
    """Of all frontends."""
    active: int | None = None
    """What it says itself, or has told a frontend; None if it says nothing."""
    kv_used: float | None = None
    """The fraction of its KV cache in use, of one that tells no blocks."""
    lease_id: str = ""
    incarnation: int = 0
    addresses: list[str] = []
    engine_facts: EngineFacts | None = None
    blocks_used: int | None = None
    blocks_total: int | None = None
    hit_rate: float | None = None
    """Of its prefix cache, over the last looks that saw prompts, else since its start."""
    tokens_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    backends: list[BackendRow] = []
    moves: dict[str, float] = {}
    """Bytes a second from and to each peer that it has moved blocks from or to, by instance id."""
    fallbacks: int = 0
    quarantined_blocks: int = 0


class QueueRow(msgspec.Struct, kw_only=True):
    """One work queue."""

    name: str
    facts: QueueFacts


class Snapshot(msgspec.Struct, kw_only=True):
    """One look, as the page is told of it."""

    number: int
    at: float
    interval_s: float
    """The time to the next look."""
    cluster: str
    """What `trinamo up` says of it; empty for one started otherwise."""
    etcd_text: str
    away: list[str]
    refused: list[str]
    is_last_known: bool
    control: ControlStatistics | None
    """This frontend's connection to etcd; None if it has none."""
    broker: EventStatistics | None
    """And to NATS."""
    addresses: dict[str, list[str]]
    """Of the servers of both, by name."""
    frontends: list[FrontendRow]
    instances: list[InstanceRow]
    instances_left_out: int
    models: list[ModelLook]
    queues: list[QueueRow]
    under_way: list[RequestView]
    under_way_left_out: int
    failed: list[RequestView]
    requests_max: int
    events: list[Event]
