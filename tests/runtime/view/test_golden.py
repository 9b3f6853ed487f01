"""What is told of a cluster, word for word: `/status`, `/health`, `/sd`, the page, `trinamo status` and `doctor`.

Programs of others read it, so each answer is held in a file of `golden/`; times, ids, ports and pids
are normalised there. `GOLDEN=write pytest tests/runtime/view` writes the files anew: a difference is then a
change of a public form, to be told in `changes/`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import httpx
import msgspec
import pytest
from rich.console import Console

from tests.runtime.one_process import OneProcess, config
from tests.runtime.small_cluster import MODEL, SmallCluster, open_small_cluster
from tests.runtime.view import pages
from trinamo.cli.doctor.discovery import cluster_findings, reach_findings
from trinamo.cli.status.text import survey_json, survey_tables
from trinamo.runtime.errors import ConnectError
from trinamo.runtime.planes import ControlStatistics, EventStatistics, Snapshot
from trinamo.runtime.protocol.discovery.instances import Instance, encode_instance
from trinamo.runtime.traces.ring import RequestsView, RequestView
from trinamo.runtime.view.facts import FrontendFacts, FrontendTotals, QueueFacts
from trinamo.runtime.view.listing import InstanceLook, ModelLook, read_listing
from trinamo.runtime.view.looks import Gatherer, Place
from trinamo.runtime.view.overview import FrontendView, InstanceView, ModelView, Overview
from trinamo.runtime.view.snapshot import Snapshots
from trinamo.runtime.view.survey import Asking, FrontendLook, Neighbours, Survey, survey_around
from trinamo.transports.memory.control import MemoryControlPlane
from trinamo.transports.openai.client import fetch

FOLDER: Final = Path(__file__).with_name("golden")
GENERATE: Final = "trinamo/backend/generate"
KEY: Final = "sk-0123456789"
# What depends on the moment. `facts` of engines depend on what ran before in them.
VARYING: Final = frozenset(
    {"number", "at", "start", "end", "minutes", "created", "duration_s", "since", "build", "builds"}
)
IDS: Final = re.compile(r"(?<![0-9a-f])[0-9a-f]{16,32}(?![0-9a-f])")
PLACES: Final = re.compile(r"127\.0\.0\.1:\d+")


class Normalised:
    """Puts what a program must not rely on out of sight, the same thing always alike."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def value(self, told: Any, key: str = "") -> Any:
        if key in VARYING:
            return "..."
        if isinstance(told, dict):
            return {self.text(name): self.value(each, name) for name, each in told.items()}
        if isinstance(told, list):
            return [self.value(each) for each in told]
        if isinstance(told, str):
            return self.text(told)
        return "pid" if told == os.getpid() else told

    def text(self, told: str) -> str:
        told = PLACES.sub("127.0.0.1:PORT", told).replace(str(os.getpid()), "PID")
        told = IDS.sub(self._name, told)
        for long, name in list(self._names.items()):
            # People are shown the beginning of one that has no name.
            told = told.replace(long[:8], name)
        return re.sub("─+", "─", re.sub(" +", " ", told)).strip()

    def _name(self, match: re.Match[str]) -> str:
        return self._names.setdefault(match[0], f"ID{len(self._names)}")


def check(name: str, told: Any) -> None:
    """Compare `told` with its file."""
    path = FOLDER / f"{name}.json"
    text = json.dumps(Normalised().value(told), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text, "utf-8")
    assert text == path.read_text("utf-8")


def shown(survey: Survey) -> dict[str, Any]:
    """What `trinamo status` and `doctor` make of it."""
    console = Console(width=1000, highlight=False, markup=False)
    with console.capture() as captured:
        for part in survey_tables(survey):
            console.print(part)
    return {
        "json": json.loads(survey_json(survey)),
        "text": captured.get().splitlines(),
        "findings": [
            attrs.asdict(each) for each in (*reach_findings(survey), *cluster_findings(survey))
        ],
    }


async def read(clients: dict[str, httpx.AsyncClient], *paths: str) -> dict[str, Any]:
    """What each client is told at each path."""
    told = {}
    for name, client in clients.items():
        for path in paths:
            answer = await client.get(path)
            told[f"{name} {path}"] = [answer.status_code, answer.json()]
    return told


async def page(client: httpx.AsyncClient, frontends: int) -> Any:
    """The first snapshot that shows all."""
    async with pages.page(client) as events:
        async for snapshot in events:
            is_whole = len(snapshot["frontends"]) == frontends and snapshot["instances"]
            if is_whole and all(each["engine_facts"] for each in snapshot["instances"]):
                return snapshot
    raise AssertionError("the page was told nothing")


async def all_of(cluster: SmallCluster, key: str = "") -> dict[str, Any]:
    """All that a cluster tells, to everybody who may ask."""
    frontends = 1 + len(cluster.others)
    frontend, worker = cluster.status[:2]
    told = await read({"api": cluster.http}, "/status", "/health", "/sd", "/live")
    told |= await read({"status port": frontend}, "/status", "/health", "/sd", "/requests")
    told |= await read({"worker": worker}, "/health", "/requests")
    told["page"] = await page(frontend, frontends)
    control = MemoryControlPlane(cluster.transports.store)
    url, status_url = (str(each.base_url).rstrip("/") for each in (cluster.http, frontend))
    named = FrontendLook("frontend", 0, url, status_url, is_named=True)
    survey = await survey_around(
        await read_listing(control),
        Neighbours(frontends=[named]),
        Asking(fetch, key=key, timeout_s=60.0),
    )
    return told | {"status": shown(survey)}


pytestmark = [
    pytest.mark.usefixtures("patient_looks"),
    # httpx leaves generators of its own to the garbage collector when a stream is left.
    pytest.mark.filterwarnings("ignore:.*(httpx|httpcore|Response.aiter).*"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.mark.parametrize(("workers", "frontends"), [(1, 1), (1, 2)])
async def test_a_cluster_that_is_whole(workers: int, frontends: int) -> None:
    async with open_small_cluster(workers=workers, frontends=frontends) as cluster:
        check(f"whole_{workers}_{frontends}", await all_of(cluster))


async def test_a_cluster_whose_clients_need_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice (operator): {KEY}\n", "ascii")
    keys.chmod(0o600)
    async with open_small_cluster(http__api_keys_file=str(keys)) as cluster:
        without = await read({"api": cluster.http}, "/status", "/health", "/sd")
        cluster.http.headers["authorization"] = f"Bearer {KEY}"
        told = await all_of(cluster, KEY)
    check("keys", {"without": without, "with": told})


class Store(MemoryControlPlane):
    """It may be away."""

    is_away = False

    async def range(self, prefix: str) -> Snapshot:
        if self.is_away:
            raise ConnectError("etcd is away")
        return await super().range(prefix)


def view(*states: str, has_etcd: bool = True, has_nats: bool = True) -> FrontendView:
    """What a frontend knows of an instance in each state."""
    control = ControlStatistics(
        is_connected=has_etcd, watches=1, stream_losses=2, resyncs=1, silence_s=3.0
    )
    events = EventStatistics(
        is_connected=has_nats,
        connections=1,
        waiting_messages=7,
        dropped_outgoing=2,
        dropped_incoming=0,
    )
    instances = [
        InstanceView(
            endpoint=GENERATE,
            id=f"{number:016x}",
            state=state,
            in_flight=number,
            incarnation=1,
            model=MODEL,
            engine="exact",
            active=number + 1,
            kv_used=0.25,
            transports={"tcp": f"10.0.0.{number}:1"},
            metadata={"pid": str(number)},
        )
        for number, state in enumerate(states, 1)
    ]
    known = Overview(control=control, events=events, instances=instances, instances_left_out=3)
    models = [
        ModelView(name=MODEL, aliases=["s"], endpoint=GENERATE, engine="exact", refused_cards=1)
    ]
    return FrontendView(status="ready", in_flight=4, waiting=1, models=models, cluster=known)


def snapshot(survey: Survey, known: Overview | None, facts: FrontendFacts | None = None) -> Any:
    """What the page is told of it."""
    own = next(each for each in survey.frontends if each.is_own)
    own.health = msgspec.to_builtins(facts or FrontendFacts(status="ready", in_flight=4))
    own.requests = RequestsView()
    addresses = {"etcd": ["10.0.0.1:2379"], "NATS": ["nats://10.0.0.1:4222"]}
    made = Snapshots().make(survey, known, addresses, [], interval_s=1.0, now_s=5.0, wall=1000.0)
    return msgspec.to_builtins(made)


STATES: Final = (
    *("live", "draining", "inhibited", "stale", "connection lost", "cannot be reached"),
    *("no common transport", "away"),
)


async def register(control: MemoryControlPlane, numbers: Sequence[int], endpoint: str) -> None:
    for number in numbers:
        each = Instance(
            endpoint=endpoint,
            id=f"{number:016x}",
            transports={"tcp": f"10.0.0.{number}:1"},
            draining=number == 2,
            metadata={"model": MODEL, "engine": "exact", "role": "decode"},
        )
        await control.put(each.key, encode_instance(each))


async def test_an_outage_of_the_control_plane() -> None:
    """Before it, in it, and in it without the event plane, as the frontend sees all states."""
    control, now = Store(OneProcess().store), [view(*STATES)]
    await register(control, range(1, 9), GENERATE)
    await register(control, [11], "trinamo/backend/prefill")
    gatherer = Gatherer(config(), control, lambda: now[-1], Place("frontend", 1), fetch)
    told = {}
    for name, is_away, known in (
        ("before", False, view(*STATES)),
        ("etcd away", True, view(*STATES, has_etcd=False)),
        ("both away", True, view(*STATES, has_etcd=False, has_nats=False)),
        ("etcd away from here", True, view(*STATES, has_nats=False)),
    ):
        control.is_away = is_away
        now.append(known)
        survey = await gatherer.look("http://f:1", "http://f:2")
        told[name] = {"status": shown(survey), "page": snapshot(survey, known.cluster)}
    check("outage", told)


async def test_all_that_processes_may_say_of_themselves() -> None:
    """Engines, queues, transfers, weights, and a frontend that counts; and one that is away."""
    backend = {"backend": "nixl", "is_open": False, "peers": 2, "usable_peers": 1, "in_flight": 1}
    transfers = {
        "chain": [
            {**backend, "done": 3, "done_bytes": 100, "problem": "no peer"},
            {"backend": "tcp"},
        ],
        "moved_bytes": {f"{2:016x}": 1000},
        "fallbacks": 1,
        "quarantined_blocks": 2,
    }
    engine = {
        "running": 1,
        "paused": 2,
        "waiting": 3,
        "waiting_tokens": 4,
        "blocks_used": 5,
        "blocks_free": 6,
        "prompt_tokens": 7,
        "completion_tokens": 8,
        "hit_tokens": 9,
        "sought_tokens": 20,
        "preemptions": 11,
        "failures": 12,
    }
    health = {
        "status": "ready",
        "active": 2,
        "lease_id": "1f",
        "incarnation": 1,
        "blocks": {"used": 5, "total": 11},
        "blocks_by_model": {MODEL: {"used": 5, "total": 11}},
        "engines": {MODEL: engine},
        "queues": {"jobs": {"ready": 1, "leased": 2, "dead": 3, "oldest_age_s": 4.5}},
        "transfers": transfers,
        "weights": {
            "held": [{"model": MODEL, "sha256": "ab" * 32, "byte_count": 10**9}],
            "lent": [{"taker": "worker-9", "sha256": "ab" * 32, "done": 1, "count": 4}],
        },
        "control_connected": False,
        "events_connected": False,
    }
    survey = Survey(
        etcd="etcd 3.5.21, 1 member",
        cluster={"pid": 1, "state": "ready", "url": "http://f:1", "engine": "exact", "nats": []},
        frontend={"url": "http://f:1", "status": "ready", "in_flight": 4},
        away=["something is away"],
        refused=["alias 's' of 'other' is refused: it means 'small'"],
    )
    survey.instances = [
        InstanceLook(
            endpoint=GENERATE,
            id=f"{number:016x}",
            lease_id="1f",
            incarnation=1,
            is_draining=number == 3,
            transports={"tcp": f"10.0.0.{number}:1", "nats": "a.b.c"},
            metadata={"model": MODEL, "engine": "exact", "pid": "7", "role": role},
            health=told,
            problem=problem,
            name=f"worker-{number}",
        )
        for number, role, told, problem in (
            (1, "prefill", health, ""),
            (2, "decode", {"status": ["x"]}, ""),
            (3, "", None, ""),
            (4, "", None, "nobody answers"),
        )
    ]
    survey.models = [ModelLook(MODEL, GENERATE, "exact", 64, 4, 3, 1, ["s"])]
    totals = FrontendTotals(
        requests=9, failures=1, tokens=90, first_token={"0.1": 8, "+Inf": 9}, gaps={"+Inf": 81}
    )
    facts = FrontendFacts(
        status="ready",
        in_flight=4,
        waiting=1,
        totals=totals,
        streams={f"{1:016x}": 4},
        queues={"own": QueueFacts(ready=1)},
    )
    told = msgspec.to_builtins(facts)
    asked = RequestsView(under_way=[RequestView(id="a", start=5.0)], under_way_left_out=2)
    survey.frontends = [
        FrontendLook("frontend-1", 1, "http://f:1", "http://f:2", "ready", 4, is_own=True),
        FrontendLook("frontend-2", 2, "http://f:1", "http://f:3", health=told, requests=asked),
        FrontendLook("frontend-3", 3, "http://f:1", "http://f:4", problem="nobody answers"),
        FrontendLook("10.0.0.9:80", 0, "http://g:1", "", "ready", 1, wants_key=True),
    ]
    check("facts", {"status": shown(survey), "page": snapshot(survey, None, facts)})
