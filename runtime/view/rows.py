"""Instances as an operator is told of them: a row for each, and one for each model and role.

`trinamo status` and the page both make them here, so that both mean the same by a state, a load and a
group. What strangers have written is cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from itertools import islice
from typing import Final

import msgspec

from .facts import (
    ENTRIES_MAX,
    EngineFacts,
    Rates,
    WorkerFacts,
    cut_text,
    read_facts,
)
from .listing import InstanceLook
from .overview import AWAY

INSTANCES_MAX: Final = 256
"""Asked and shown on the page: who looks again and again must not keep a frontend of a large cluster
busy with it."""
SINGLY_MAX: Final = 24
"""Of more instances those of one model and role are shown as one row, until somebody asks for each."""
GROUPS_MAX: Final = 128
RATES_KEPT_S: Final = 60.0
WELL: Final = frozenset(("ready", "live", "registered"))
"""States in which nothing is wrong, as far as anybody has said."""


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
    group: str = ""
    """The key of its `GroupRow`."""
    build: str = ""
    """Of its process; empty if it told none."""
    addresses: list[str] = []
    host: str = ""
    """The name of its machine; empty if it told none."""
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


class GroupRow(msgspec.Struct, kw_only=True):
    """The instances of one model and role: how many, how they are, and sums of their load."""

    key: str
    model: str
    role: str
    instances: int = 0
    states: dict[str, int] = {}
    """How many are in each state, the most frequent first."""
    builds: dict[str, int] = {}
    """Likewise of each build; without those that tell none."""
    active: int = 0
    """Requests, by the word of the instances, else as the frontends see it."""
    running: int = 0
    waiting: int = 0
    """In the engines that tell it."""
    tokens_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    blocks_used: int = 0
    blocks_total: int = 0


def group_of(look: InstanceLook) -> str:
    return f"{cut_text(look.metadata.get('model', ''))} {cut_text(role_of(look))}"


def grouped(rows: Iterable[InstanceRow]) -> list[GroupRow]:
    """A row for each model and role, the largest first, at most `GROUPS_MAX`."""
    groups: dict[str, GroupRow] = {}
    states: dict[str, Counter[str]] = {}
    builds: dict[str, Counter[str]] = {}
    for row in rows:
        key = row.group
        group = groups.setdefault(key, GroupRow(key=key, model=row.model, role=row.role))
        facts = row.engine_facts
        active = row.in_flight if row.active is None else row.active
        group.instances += 1
        group.active += active
        group.running += active if facts is None else facts.running
        group.waiting += 0 if facts is None else facts.waiting
        group.tokens_per_s += row.tokens_per_s
        group.prompt_tokens_per_s += row.prompt_tokens_per_s
        group.blocks_used += row.blocks_used or 0
        group.blocks_total += row.blocks_total or 0
        states.setdefault(key, Counter())[row.state] += 1
        builds.setdefault(key, Counter()).update([row.build] if row.build else ())
    for key, group in groups.items():
        group.states = dict(states[key].most_common(ENTRIES_MAX))
        group.builds = dict(builds[key].most_common(ENTRIES_MAX))
    return sorted(groups.values(), key=lambda each: (-each.instances, each.key))[:GROUPS_MAX]


class InstanceRows:
    """Makes the rows of a look; rates are of the time since the look before."""

    def __init__(self) -> None:
        self._rates = Rates()
        self._hits: dict[str, tuple[int, int, float | None]] = {}

    def make(
        self, looks: Collection[InstanceLook], streams: Counter[str], now_s: float
    ) -> list[InstanceRow]:
        """A row for each; `streams` are the requests of frontends, by instance id."""
        self._rates.forget(now_s - RATES_KEPT_S)
        rows = [self._instance(each, streams, now_s) for each in looks]
        shown = {f"{each.id} {each.endpoint}" for each in rows}
        self._hits = {key: each for key, each in self._hits.items() if key in shown}
        return rows

    def _instance(self, look: InstanceLook, streams: Counter[str], now_s: float) -> InstanceRow:
        metadata = look.metadata
        pid, model = metadata.get("pid", ""), metadata.get("model", "")
        row = InstanceRow(
            id=cut_text(look.id),
            name=cut_text(look.name or look.id[:8]),
            endpoint=cut_text(look.endpoint),
            model=cut_text(model),
            engine=cut_text(metadata.get("engine", "")),
            role=cut_text(role_of(look)),
            pid=cut_text(pid),
            state="away" if look.problem else "draining" if look.is_draining else "registered",
            problem=cut_text(look.problem),
            in_flight=streams.get(look.id, look.in_flight or 0),
            active=look.active,
            kv_used=look.kv_used,
            lease_id=cut_text(look.lease_id),
            incarnation=look.incarnation,
            group=group_of(look),
            build=cut_text(look.build),
            host=cut_text(metadata.get("host", "")),
            addresses=[cut_text(f"{name} {address}") for name, address in look.transports.items()][
                :ENTRIES_MAX
            ],
        )
        facts = read_facts(look.health, WorkerFacts)
        if facts is not None:
            self._add_facts(row, facts, model, now_s)
        elif look.seen and not look.problem:
            row.state = look.seen
        return row

    def _add_facts(self, row: InstanceRow, facts: WorkerFacts, model: str, now_s: float) -> None:
        if row.state == "registered":
            row.state = cut_text(facts.status)
        row.active = facts.active
        key = f"{row.id} {row.endpoint}"
        engine = facts.engines.get(model)
        if engine is not None:
            row.engine_facts = engine
            row.blocks_used = engine.blocks_used
            total = engine.blocks_used + engine.blocks_free
            row.blocks_total = (
                facts.blocks.get("total", total) if len(facts.engines) == 1 else total
            )
            hit_rate = self._hit_rate(key, engine)
            row.hit_rate = hit_rate if total else None
            row.tokens_per_s = self._rate(f"{key} tokens", engine.completion_tokens, now_s)
            row.prompt_tokens_per_s = self._rate(f"{key} prompts", engine.prompt_tokens, now_s)
        if facts.transfers is not None:
            row.fallbacks = facts.transfers.fallbacks
            row.quarantined_blocks = facts.transfers.quarantined_blocks
            row.moves = {
                cut_text(peer): self._rate(f"{key} {peer[:32]}", count, now_s)
                for peer, count in islice(facts.transfers.moved_bytes.items(), INSTANCES_MAX)
                if count
            }
            row.backends = [
                BackendRow(
                    backend=cut_text(each.backend),
                    state=cut_text(each.problem or ("open" if each.is_open else "not open")),
                    in_flight=each.in_flight,
                    done=each.done,
                    bytes_per_s=self._rate(f"{key} {each.backend[:32]}", each.done_bytes, now_s),
                )
                for each in facts.transfers.chain[:ENTRIES_MAX]
            ]

    def _rate(self, key: str, value: float, now_s: float) -> float:
        return round(self._rates.update(key, value, now_s), 1)

    def _hit_rate(self, key: str, engine: EngineFacts) -> float | None:
        # What another worker computed was sought here and is neither found nor computed.
        found = engine.hit_tokens
        asked = engine.sought_tokens or found + engine.prompt_tokens
        asked_before, found_before, before = self._hits.get(key, (0, 0, None))
        if asked > asked_before and found >= found_before:
            before = min(1.0, round((found - found_before) / (asked - asked_before), 4))
        self._hits[key] = (asked, found, before)
        return before


def role_of(look: InstanceLook) -> str:
    """`prefill`, `decode`, `upstream`, or nothing for a plain worker."""
    is_upstream = "upstream" in look.metadata or look.seen == AWAY
    return look.metadata.get("role", "") or ("upstream" if is_upstream else "")
