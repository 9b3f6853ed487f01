"""What the page is told: figures of two looks, bounded, and nothing that makes no sense."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from trinamo.runtime.traces.ring import RequestsView, RequestView
from trinamo.runtime.view.facts import FrontendFacts, FrontendTotals
from trinamo.runtime.view.listing import InstanceLook
from trinamo.runtime.view.rows import INSTANCES_MAX
from trinamo.runtime.view.snapshot import ClusterSnapshot, Snapshots
from trinamo.runtime.view.survey import FrontendLook, Survey

OWN = FrontendLook("frontend-1", 1, "u", "s1", is_own=True)


def instance(health: Any, *, number: int = 1, problem: str = "", **metadata: str) -> InstanceLook:
    return InstanceLook(
        endpoint="a/b/c",
        id=f"{number:016x}",
        lease_id="1f",
        incarnation=1,
        is_draining=False,
        transports={"tcp": "127.0.0.1:1"},
        metadata={"model": "m", "pid": "7", **metadata},
        health=health,
        problem=problem,
    )


def health(**engine: int) -> dict[str, Any]:
    return {"status": "ready", "active": 2, "engines": {"m": engine}}


def look(*instances: InstanceLook, frontends: Sequence[FrontendLook] = (OWN,)) -> Survey:
    survey = Survey(etcd="etcd", cluster=None, frontend=None, instances=list(instances))
    survey.frontends = list(frontends)
    return survey


def make(snapshots: Snapshots, found: Survey, at: float, **totals: Any) -> ClusterSnapshot:
    facts = FrontendFacts(status="ready", in_flight=3, totals=FrontendTotals(**totals))
    facts.streams = {f"{1:016x}": 3}
    OWN.health, OWN.requests = msgspec.to_builtins(facts), RequestsView()
    return snapshots.make(found, None, {}, [], interval_s=1.0, now_s=at, wall=1000.0 + at)


def test_rates_are_of_the_time_between_two_looks() -> None:
    snapshots = Snapshots()
    before = instance(health(completion_tokens=100, prompt_tokens=10, hit_tokens=0))
    after = instance(
        health(completion_tokens=500, prompt_tokens=30, hit_tokens=60, blocks_used=2, blocks_free=6)
    )
    make(snapshots, look(before), 1.0, tokens=1000, requests=5)
    snapshot = make(snapshots, look(after), 3.0, tokens=1400, requests=9)

    (row,) = snapshot.instances
    assert (row.tokens_per_s, row.prompt_tokens_per_s, row.hit_rate) == (200.0, 10.0, 0.75)
    (frontend,) = snapshot.frontends
    assert (frontend.tokens_per_s, frontend.requests_per_s) == (200.0, 2.0)
    assert (row.in_flight, row.active, row.state) == (3, 2, "ready")


def test_what_another_worker_computed_counts_as_sought_and_not_found() -> None:
    snapshots = Snapshots()
    told = {"prompt_tokens": 10, "hit_tokens": 30, "sought_tokens": 100, "blocks_free": 8}
    (row,) = make(snapshots, look(instance(health(**told))), 1.0).instances
    assert row.hit_rate == 0.3


def test_what_moves_between_two_is_known_by_the_peer_s_id() -> None:
    snapshots = Snapshots()

    def moves(at: float, moved: int) -> dict[str, float]:
        transfers = {"chain": [], "moved_bytes": {f"{2:016x}": moved, f"{3:016x}": 0}}
        told = {**health(), "transfers": transfers}
        return make(snapshots, look(instance(told)), at).instances[0].moves

    assert moves(1.0, 1000) == {f"{2:016x}": 0.0}
    assert moves(3.0, 5000) == {f"{2:016x}": 2000.0}


def test_endpoints_that_are_no_models_are_shown_each() -> None:
    one, other = instance(health()), instance(health())
    other.endpoint = "a/another/endpoint"
    for each in (one, other):
        del each.metadata["model"]

    rows = make(Snapshots(), look(one, other), 1.0).instances
    assert [row.endpoint for row in rows] == ["a/another/endpoint", "a/b/c"]


def test_an_upstream_is_as_its_frontend_sees_it() -> None:
    one = instance(None, upstream="http://10.0.0.1:8000/v1")
    one.seen, one.active, one.kv_used, one.name = "live", 7, 0.5, "10.0.0.1:8000"
    gone = instance(None, number=2, problem="it fails its looks")
    gone.seen = "away"
    rows = make(Snapshots(), look(one, gone), 1.0).instances
    assert [(row.role, row.state, row.name) for row in rows] == [
        ("upstream", "away", "00000000"),
        ("upstream", "live", "10.0.0.1:8000"),
    ]
    assert (rows[1].active, rows[1].kv_used) == (7, 0.5)


def test_an_instance_that_does_not_answer_is_away() -> None:
    snapshot = make(Snapshots(), look(instance(None, problem="nobody answers")), 1.0)

    assert (snapshot.instances[0].state, snapshot.instances[0].problem) == (
        "away",
        "nobody answers",
    )


@pytest.mark.parametrize(
    "nonsense",
    [
        {"status": ["x"]},
        {"status": "ready", "engines": {"m": {"running": -1}}},
        {"status": "ready", "engines": [1]},
        {"status": "ready", "transfers": {"chain": {"a": 1}}},
        {"status": "ready", "blocks": {"used": "many"}},
    ],
)
def test_facts_that_make_no_sense_are_as_if_not_said(nonsense: dict[str, Any]) -> None:
    (row,) = make(Snapshots(), look(instance(nonsense)), 1.0).instances

    assert (row.state, row.active, row.engine_facts) == ("registered", None, None)


def test_what_strangers_write_is_cut_and_their_number_bounded() -> None:
    many = [instance(None, number=n, engine="x" * 10_000) for n in range(INSTANCES_MAX + 5)]
    snapshot = make(Snapshots(), look(*many), 1.0)

    assert (len(snapshot.instances), snapshot.instances_left_out) == (INSTANCES_MAX, 5)
    assert len(msgspec.json.encode(snapshot)) < 1000 * INSTANCES_MAX


def test_other_frontends_count_and_one_that_is_away_is_shown() -> None:
    totals = {"requests": 7, "failures": 1, "tokens": 70}
    told = {
        "status": "ready",
        "in_flight": 4,
        "waiting": 2,
        "totals": totals,
        "streams": {f"{1:016x}": 4},
    }
    asked = RequestsView(under_way=[RequestView(id="a", start=5.0)])
    frontends = [
        OWN,
        FrontendLook("frontend-2", 2, "u", "s2", health=told, requests=asked),
        FrontendLook("frontend-3", 3, "u", "s3", problem="nobody answers"),
    ]
    snapshot = make(Snapshots(), look(instance(health()), frontends=frontends), 1.0)

    assert [(each.name, each.status) for each in snapshot.frontends] == [
        ("frontend-1", "ready"),
        ("frontend-2", "ready"),
        ("frontend-3", "away"),
    ]
    assert [(each.in_flight, each.waiting) for each in snapshot.frontends[:2]] == [(3, 0), (4, 2)]
    assert snapshot.instances[0].in_flight == 7
    assert [(each.id, each.process) for each in snapshot.under_way] == [("a", "frontend-2")]


def test_an_instance_that_was_started_again_stays_where_it_was() -> None:
    names = {1: "worker-10", 2: "worker-2", 3: "worker-1"}
    found = look(*(instance(None, number=number) for number in names))
    for each, name in zip(found.instances, names.values(), strict=True):
        each.name = name
    rows = make(Snapshots(), found, 1.0).instances

    assert [row.name for row in rows] == ["worker-1", "worker-2", "worker-10"]
