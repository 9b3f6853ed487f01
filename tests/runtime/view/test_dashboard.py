"""The dashboard of a frontend: where it is, who is asked for it and when, and what it tells."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from tests.runtime.small_cluster import MODEL, open_small_cluster
from tests.runtime.view import pages
from trinamo.runtime.config.http import HttpConfig
from trinamo.runtime.process.frontend.dashboard import dashboard_url
from trinamo.runtime.view import dashboard as module
from trinamo.runtime.view.looks import Gatherer
from trinamo.runtime.view.survey import Survey

pytestmark = [
    pytest.mark.usefixtures("patient_looks"),
    # httpx leaves generators of its own to the garbage collector when a stream is left.
    pytest.mark.filterwarnings("ignore:.*(httpx|httpcore|Response.aiter).*"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

KEY = "sk-5ecret-of-a-client"
API, STATUS = "http://10.0.0.1:80", "http://127.0.0.1:81"


@pytest.mark.parametrize(
    ("dashboard", "host", "status_port", "expected"),
    [
        (None, "127.0.0.1", None, f"{API}/dashboard"),
        (None, "::1", 0, f"{API}/dashboard"),
        (None, "0.0.0.0", 0, f"{STATUS}/dashboard"),
        (None, "10.0.0.1", None, ""),
        (True, "10.0.0.1", None, f"{API}/dashboard"),
        (False, "127.0.0.1", 0, ""),
    ],
)
def test_it_faces_a_network_only_if_somebody_says_so(
    dashboard: bool | None, host: str, status_port: int | None, expected: str
) -> None:
    section = HttpConfig(dashboard=dashboard, host=host, status_port=status_port)

    assert dashboard_url(section, API, STATUS) == expected


async def test_it_tells_of_workers_models_and_requests_on_both_ports() -> None:
    async with open_small_cluster(workers=2) as cluster:
        for client in (cluster.http, cluster.status[0]):
            async with pages.page(client) as events:
                snapshot = await anext(events)
                while not all(each["engine_facts"] for each in snapshot["instances"]):
                    snapshot = await anext(events)
            assert len(snapshot["instances"]) == 2
            assert [each["name"] for each in snapshot["models"]] == [MODEL]
            assert {each["state"] for each in snapshot["instances"]} == {"ready"}
            assert snapshot["away"] == []
        answered = await cluster.ask()
        refused = await cluster.ask(model="nobody's")
        assert (answered.status_code, refused.status_code) == (200, 404)
        async with pages.page(cluster.http) as events:
            snapshot = await anext(events)
            while not snapshot["failed"]:
                snapshot = await anext(events)
        (failed,) = snapshot["failed"]
        assert failed["outcome"] == "model_not_found"
        told = await cluster.http.get(f"/dashboard/requests/{answered.headers['x-request-id']}")
    legs = {(each["process"], each["leg"]["name"]) for each in told.json()["legs"]}
    assert ("frontend", "http") in legs
    assert "worker" in {name for _, name in legs}


async def test_a_browser_that_gives_no_path_is_sent_to_the_page() -> None:
    """And a program that has mistaken the address is told so, as ever."""
    async with open_small_cluster() as cluster:
        for client in (cluster.http, cluster.status[0]):
            sent = await client.get("/", headers={"accept": "text/html,*/*;q=0.8"})
            assert (sent.status_code, sent.headers["location"]) == (307, "/dashboard")
            assert (await client.get("/")).json()["error"]["code"] == "path_not_found"
    async with open_small_cluster(http__dashboard=False) as cluster:
        for client in (cluster.http, cluster.status[0]):
            assert (await client.get("/", headers={"accept": "text/html"})).status_code == 404


@pytest.mark.parametrize(("asked", "expected_s"), [(0, 1.0), (64, 1.0), (128, 2.0), (260, 4.0625)])
def test_the_more_are_asked_the_rarer_it_looks(asked: int, expected_s: float) -> None:
    assert module.interval_s(asked) == expected_s


async def test_a_client_s_key_is_told_to_nobody_who_looks(tmp_path: Path) -> None:
    """And where clients need one the page is on the status port alone."""
    keys = tmp_path / "keys"
    keys.write_text(f"alice (operator): {KEY}\n", "ascii")
    keys.chmod(0o600)
    async with open_small_cluster(http__api_keys_file=str(keys)) as cluster:
        assert (await cluster.http.get("/dashboard")).status_code != 200
        cluster.http.headers["authorization"] = f"Bearer {KEY}"
        answered = await cluster.ask()
        refused = await cluster.ask(model="nobody's")
        assert (answered.status_code, refused.status_code) == (200, 404)
        status = cluster.status[0]
        async with pages.page(status) as events:
            snapshot = await anext(events)
            while not snapshot["failed"]:
                snapshot = await anext(events)
        request_id = answered.headers["x-request-id"]
        paths = ("/health", "/metrics", "/requests", f"/traces/{request_id}")
        told = [(await status.get(path)).text for path in paths]
        told.append((await status.get(f"/dashboard/requests/{request_id}")).text)
        told.append((await cluster.http.get("/status")).text)
    assert all(told)
    assert not [text for text in [json.dumps(snapshot), *told] if KEY in text]


async def test_switched_off_it_is_nowhere() -> None:
    async with open_small_cluster(http__dashboard=False) as cluster:
        for client in (cluster.http, cluster.status[0]):
            for path in ("/dashboard", "/dashboard/events", "/dashboard/requests/x"):
                assert (await client.get(path)).status_code == 404


@pytest.mark.parametrize("nonsense", ["a b", "a%2Fb", "%00", "x" * 300, "a%0d%0ab"])
async def test_what_is_no_id_of_a_request_is_asked_of_nobody(nonsense: str) -> None:
    async with open_small_cluster() as cluster:
        answer = await cluster.http.get(f"/dashboard/requests/{nonsense}")
        assert answer.status_code in (400, 404)


async def test_nobody_is_asked_while_no_page_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 0.02)
    monkeypatch.setattr(module, "IDLE_INTERVAL_S", 0.02)
    looks, idle = [], []
    look, observe = Gatherer.look, module.Dashboard._observe_own

    async def looking(self: Gatherer, *where: str) -> Survey:
        looks.append(1)
        return await look(self, *where)

    def observing(self: module.Dashboard, *told: object) -> None:
        idle.append(len(looks))
        observe(self, *told)  # type: ignore[arg-type]

    monkeypatch.setattr(Gatherer, "look", looking)
    monkeypatch.setattr(module.Dashboard, "_observe_own", observing)
    async with open_small_cluster() as cluster:
        await pages.until(lambda: len(idle) >= 3)
        assert looks == []
        async with pages.page(cluster.http) as first, pages.page(cluster.status[0]) as second:
            numbers = [
                {(await anext(each))["number"] for _ in range(20)} for each in (first, second)
            ]
            # Each look is told to both.
            assert numbers[0] & numbers[1]
        await pages.until(lambda: len(idle) > 3 and len(set(idle[-3:])) == 1)


async def test_a_look_that_fails_ends_neither_the_frontend_nor_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look = Gatherer.look
    failures = iter([True])

    async def failing(self: Gatherer, *where: str) -> Survey:
        if next(failures, False):
            raise ZeroDivisionError("a mistake")
        return await look(self, *where)

    monkeypatch.setattr(Gatherer, "look", failing)
    monkeypatch.setattr(module, "INTERVAL_S", 0.02)
    async with open_small_cluster() as cluster:
        async with pages.page(cluster.http) as events:
            assert (await anext(events))["number"] >= 1
        assert (await cluster.ask()).status_code == 200


async def test_a_worker_that_leaves_is_an_event() -> None:
    async with open_small_cluster(workers=2) as cluster, pages.page(cluster.http) as events:
        await anext(events)
        leaving = cluster.workers[0]
        await leaving.shutdown()
        snapshot = await anext(events)
        while not any(each["kind"] == "left" for each in snapshot["events"]):
            snapshot = await anext(events)
    (left,) = [each for each in snapshot["events"] if each["kind"] == "left"]
    assert left["who"] == (leaving.instance_id or "")[:8]


async def test_a_stranger_on_another_origin_may_not_read_it() -> None:
    """No CORS header, and a name that is not ours is refused before."""
    async with open_small_cluster() as cluster:
        url = f"{cluster.http.base_url}/dashboard/requests/abc"
        async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
            told = await client.get(url, headers={"origin": "http://evil.example"})
            rebound = await client.get(url, headers={"host": "evil.example"})
    assert "access-control-allow-origin" not in told.headers
    assert rebound.status_code == 421
