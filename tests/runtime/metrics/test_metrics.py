"""What is counted, under which names, and what it costs to show it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.runtime.caller.requests import NAME, entry, instance
from trinamo.runtime.caller.router import Router
from trinamo.runtime.env import Clock
from trinamo.runtime.http.metrics import FrontendMetrics
from trinamo.runtime.kv.transfer.metrics import PEER_SERIES_MAX, TransferMetrics
from trinamo.runtime.metrics.metrics import CANCELLED, SUCCESS
from trinamo.runtime.planes import Snapshot
from trinamo.runtime.traces.trace import NO_TRACE
from trinamo.runtime.worker.metrics import WorkerMetrics
from trinamo.transports.memory.control import MemoryControlPlane


class HandClock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at

    def wall(self) -> float:
        return self.at


class StillEnv:
    def __init__(self) -> None:
        self.hand = HandClock()
        self.clock: Clock = self.hand
        self.rng = random.Random(0)

    def note(self, kind: str, /, **fields: Any) -> None:
        pass


LABELS = {"model": "m", "endpoint": "chat"}


def test_a_request_is_counted_from_arrival_to_end() -> None:
    env = StillEnv()
    metrics = FrontendMetrics(env)
    with metrics.request("m", "chat") as request:
        assert metrics.value("requests_in_flight", **LABELS) == 1
        request.prompt(7)
        env.hand.at += 0.5
        request.token(1)
        env.hand.at += 0.2
        request.token(2)
        request.token(0)
        request.outcome = SUCCESS
    assert metrics.value("requests_in_flight", **LABELS) == 0
    assert metrics.value("requests_total", **LABELS, outcome="success") == 1
    assert metrics.value("input_tokens_total", **LABELS) == 7
    assert metrics.value("output_tokens_total", **LABELS) == 3
    assert metrics.value("time_to_first_token_seconds_sum", **LABELS) == pytest.approx(0.5)
    # Two tokens came together 0.2 s later: 0.1 s each.
    assert metrics.value("inter_token_latency_seconds_sum", **LABELS) == pytest.approx(0.1)
    assert metrics.value("inter_token_latency_seconds_count", **LABELS) == 1
    assert metrics.value("request_duration_seconds_sum", **LABELS) == pytest.approx(0.7)


def test_a_request_whose_task_is_cancelled_is_counted_as_such() -> None:
    metrics = FrontendMetrics(StillEnv())
    with pytest.raises(KeyboardInterrupt), metrics.request("m", "chat"):
        raise KeyboardInterrupt
    assert metrics.value("requests_total", **LABELS, outcome=CANCELLED) == 1
    assert metrics.value("requests_in_flight", **LABELS) == 0


def test_disconnects_cancellations_and_refusals_are_counted() -> None:
    metrics = FrontendMetrics(StillEnv())
    with metrics.request("m", "chat") as request:
        request.disconnected()
        request.cancelled("client_disconnect")
    metrics.refused("chat", "model_not_found")
    assert metrics.value("client_disconnects_total", **LABELS) == 1
    assert metrics.value("cancellations_total", model="m", reason="client_disconnect") == 1
    assert (
        metrics.value("requests_total", model="unknown", endpoint="chat", outcome="model_not_found")
        == 1
    )


def test_the_live_set_is_shown_until_nobody_watches() -> None:
    """The end of a router does not take away what its successor shows."""
    metrics = FrontendMetrics(StillEnv())
    counts = [(3, {"live": 3, "inhibited": 1, "stale": 2, "gone": 4})]
    metrics.live_set("a/b/c", lambda: (0, {}))
    metrics.live_set("a/b/c", ask := lambda: counts[0])
    metrics.endpoint_gone("a/b/c", lambda: (0, {}))
    assert metrics.value("live_instances", endpoint="a/b/c") == 3
    assert metrics.value("inhibited_instances", endpoint="a/b/c") == 1
    assert metrics.value("stale_instances", endpoint="a/b/c") == 2
    assert metrics.value("instances", endpoint="a/b/c", state="gone") == 4
    counts[0] = (4, {"live": 4})
    assert metrics.value("live_instances", endpoint="a/b/c") == 4
    metrics.endpoint_gone("a/b/c", ask)
    metrics.endpoint_gone("a/b/c", ask)
    assert b"a/b/c" not in metrics.render()


def test_a_worker_s_requests_and_streams_are_counted() -> None:
    env = StillEnv()
    metrics = WorkerMetrics(env)
    unary = metrics.begin("a/b/c", NO_TRACE, is_stream=False)
    request = metrics.begin("a/b/c", NO_TRACE, is_stream=True)
    assert metrics.value("worker_requests_in_flight", endpoint="a/b/c") == 2
    assert metrics.value("worker_streams") == 1
    unary.end()
    request.tally.items.value += 3
    request.cancelled("deadline")
    env.hand.at += 2
    request.outcome = "killed"
    request.end()
    metrics.refused("a/b/c", "draining")
    assert metrics.value("worker_requests_total", endpoint="a/b/c", outcome="cancelled") == 1
    assert metrics.value("worker_requests_in_flight", endpoint="a/b/c") == 0
    assert metrics.value("worker_streams") == 0
    assert metrics.value("worker_items_total", endpoint="a/b/c") == 3
    assert metrics.value("worker_requests_total", endpoint="a/b/c", outcome="killed") == 1
    assert metrics.value("worker_requests_total", endpoint="a/b/c", outcome="draining") == 1
    assert metrics.value("worker_cancellations_total", endpoint="a/b/c", reason="deadline") == 1
    assert metrics.value("worker_request_duration_seconds_sum", endpoint="a/b/c") == 2


def test_what_is_declared_twice_is_one() -> None:
    """A process may have several of a part: two listeners count their connections in one gauge."""
    metrics = WorkerMetrics(StillEnv())
    first = metrics.counts("connections", "Open connections", "kind", may_fall=True)
    again = metrics.counts("connections", "Open connections", "kind", may_fall=True)
    first.tally("http").value += 1
    again.tally("http").value += 1
    assert metrics.value("connections", kind="http") == 2


def test_the_exposition_is_rendered_once_a_second() -> None:
    env = StillEnv()
    metrics = FrontendMetrics(env)
    first = metrics.render()
    metrics.counts("connections", "Open", "kind", may_fall=True).tally("http").value += 1
    env.hand.at += 0.9
    assert metrics.render() is first
    env.hand.at += 0.2
    assert b'trinamo_connections{kind="http"} 1.0' in metrics.render()


def test_every_name_has_the_prefix_and_there_are_no_creation_times() -> None:
    metrics = FrontendMetrics(StillEnv())
    with metrics.request("m", "chat"):
        pass
    lines = [line for line in metrics.render().decode().splitlines() if not line.startswith("#")]
    assert lines
    assert all(line.startswith("trinamo_") for line in lines)
    assert not any("_created" in line for line in lines)


def test_two_runtimes_in_one_process_do_not_share_numbers() -> None:
    first, second = FrontendMetrics(StillEnv()), FrontendMetrics(StillEnv())
    first.counts("connections", "Open", "kind", may_fall=True).tally("http").value += 1
    assert second.value("connections", kind="http") == 0


def test_models_that_are_gone_leave_no_series_behind() -> None:
    """But the last few: how their requests ended is looked for when they have just gone."""
    metrics = FrontendMetrics(StillEnv())

    def serve(model: str) -> None:
        metrics.model_came(model)
        with metrics.request(model, "chat") as record:
            record.token(3)
            record.prompt(2)
            record.disconnected()
            record.cancelled("deadline")
            record.outcome = "success"

    def series_count() -> int:
        return len(list(metrics.samples()))

    for number in range(20):
        serve(f"m{number}")
        metrics.model_gone(f"m{number}")
    before = series_count()
    for number in range(20, 200):
        serve(f"m{number}")
        metrics.model_gone(f"m{number}")
    assert series_count() == before
    assert metrics.value("requests_total", model="m199", endpoint="chat", outcome="success") == 1
    # One that comes back keeps what it has, however many go after it.
    metrics.model_came("m199")
    for number in range(200, 240):
        metrics.model_gone(f"m{number}")
    assert metrics.value("requests_total", model="m199", endpoint="chat", outcome="success") == 1


def test_a_request_that_outlives_its_model_s_series_makes_no_new_ones() -> None:
    metrics = FrontendMetrics(StillEnv())
    with metrics.request("old", "chat") as record:
        for number in range(20):
            metrics.model_gone("old" if not number else f"m{number}")
        record.cancelled("deadline")
        record.token(1)
    assert b'model="old"' not in metrics.render()


def test_a_frontend_s_page_is_as_long_with_a_thousand_instances_as_with_one() -> None:
    """No series is of one instance; the numbers in it may have more digits."""
    pages: list[bytes] = []
    for count in (1, 64, 1000):
        metrics = FrontendMetrics(StillEnv())
        router = Router(MemoryControlPlane(), NAME, StillEnv(), metrics=metrics)
        router.apply(Snapshot(1, [entry(instance(f"{n:x}")) for n in range(count)]))
        pages.append(metrics.render())
        assert metrics.value("live_instances", endpoint=str(NAME)) == count
    assert len({page.count(b"\n") for page in pages}) == 1
    assert len(pages[2]) - len(pages[0]) < 16


def test_a_worker_shows_so_many_peers_and_of_more_those_that_cannot_be_used() -> None:
    """A fleet of n workers has no n² series in Prometheus."""
    metrics = WorkerMetrics(StillEnv())
    transfers = TransferMetrics(metrics)
    for number in range(1000):
        transfers.usable("tcp", f"peer-{number}", is_usable=True)
    transfers.usable("tcp", "peer-900", is_usable=False)
    transfers.usable("tcp", "peer-5", is_usable=False)
    lines = [each for each in metrics.render().splitlines() if b"backend_usable{" in each]
    assert len(lines) == PEER_SERIES_MAX
    broken = sorted(each.split(b'"')[3] for each in lines if each.endswith(b" 0.0"))
    assert broken == [b"peer-5", b"peer-900"]
    transfers.usable("tcp", "peer-900", is_usable=True)
    for number in range(1000):
        transfers.peer_gone("tcp", f"peer-{number}")
    assert b"backend_usable{" not in metrics.page()
