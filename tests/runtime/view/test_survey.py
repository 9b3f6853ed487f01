"""One look: engines alone, every frontend, what routers see before what discovery last said."""

from __future__ import annotations

from pathlib import Path

import httpx
import msgspec
import pytest
import trio

from tests.runtime.one_process import OneProcess, config
from tests.runtime.small_cluster import open_small_cluster
from tests.runtime.view import pages
from trinamo import HttpService
from trinamo.runtime.errors import ConnectError
from trinamo.runtime.planes import ControlStatistics, Snapshot
from trinamo.runtime.protocol.discovery.instances import FrontendEntry, Instance, encode_instance
from trinamo.runtime.traces.ring import ProcessView
from trinamo.runtime.view.listing import read_listing
from trinamo.runtime.view.looks import Gatherer, Place
from trinamo.runtime.view.overview import FrontendView, InstanceView, ModelView, Overview
from trinamo.runtime.view.requests import ask_places
from trinamo.runtime.view.survey import Asking, FrontendLook, Survey, add_listed, ask_instances
from trinamo.transports.memory.control import MemoryControlPlane
from trinamo.transports.openai.client import fetch

pytestmark = pytest.mark.usefixtures("patient_looks")

GENERATE = "a/b/generate"


class Store(MemoryControlPlane):
    """It may be away."""

    is_away = False

    async def range(self, prefix: str) -> Snapshot:
        if self.is_away:
            raise ConnectError("etcd is away")
        return await super().range(prefix)

    async def register(self, endpoint: str, number: int, **metadata: str) -> None:
        each = Instance(
            endpoint=endpoint,
            id=f"{number:x}",
            transports={"tcp": f"10.0.0.{number}:1"},
            metadata=metadata,
        )
        await self.put(each.key, encode_instance(each))


def view(*instances: InstanceView, has_etcd: bool = True) -> FrontendView:
    control = ControlStatistics(
        is_connected=has_etcd, watches=1, stream_losses=0, resyncs=0, silence_s=3.0
    )
    known = Overview(control=control, events=None, instances=list(instances))
    models = [ModelView(name="m", endpoint=GENERATE)]
    return FrontendView(status="ready", in_flight=0, models=models, cluster=known)


def seen(number: int, state: str = "live", in_flight: int = 0) -> InstanceView:
    return InstanceView(
        endpoint=GENERATE,
        id=f"{number:x}",
        state=state,
        in_flight=in_flight,
        incarnation=1,
        model="m",
        transports={"tcp": f"10.0.0.{number}:1"},
    )


async def test_what_an_engine_registers_besides_is_no_engine() -> None:
    """Its weights, or where a decode worker lends blocks: the figures there are the engine's."""
    control = Store(OneProcess().store)
    await control.register(GENERATE, 1, model="m", **{"for": "generate"})
    await control.register("a/b/handoff", 1, model="m", **{"for": "handoff"})
    await control.register("a/weights/lend", 1, **{"for": "weights"})
    await control.register("a/b/prefill", 2, model="m", **{"for": "prefill"})
    await control.register("an/own/service", 3)

    listing = await read_listing(control)
    assert [(each.endpoint, each.id) for each in listing.instances] == [
        ("a/b/generate", "1"),
        ("a/b/prefill", "2"),
        ("an/own/service", "3"),
    ]


async def test_in_an_outage_the_router_s_view_comes_before_the_last_listing() -> None:
    """Workers that were replaced since are not called away; of those nobody asks it is all there is."""
    control, now = Store(OneProcess().store), [view(seen(1))]
    await control.register(GENERATE, 1, model="m")
    await control.register("a/b/prefill", 2, model="m", role="prefill")
    gatherer = Gatherer(config(), control, lambda: now[-1], Place("frontend", 1), fetch)
    before = await gatherer.look("http://f:1", "")
    control.is_away = True
    now.append(view(seen(7), has_etcd=False))
    survey = await gatherer.look("http://f:1", "")

    assert [each.id for each in before.instances] == ["1", "2"]
    assert [(each.id, each.transports["tcp"]) for each in survey.instances] == [
        ("7", "10.0.0.7:1"),
        ("2", "10.0.0.2:1"),
    ]
    assert [(each.registered, each.instances) for each in survey.models] == [(1, 1)]
    (outage,) = survey.away
    assert outage.endswith("this is what the frontend last knew, 3 s ago")
    assert (before.is_whole, survey.is_whole) == (True, False)


async def test_an_instance_is_away_if_a_frontend_does_not_reach_it_whatever_it_says_itself() -> (
    None
):
    survey = Survey(etcd="etcd", cluster=None, frontend=None)
    control = Store(OneProcess().store)
    await control.register(GENERATE, 1, model="m")
    survey.instances = (await read_listing(control)).instances
    survey.instances[0].health = {"status": "ready"}
    views = [
        ("frontend a", view(seen(1, in_flight=2))),
        ("frontend b", view(seen(1, "cannot be reached", 0))),
    ]
    await ask_instances(survey, Asking(fetch), views)

    assert survey.away == [f"instance 1 of {GENERATE}: frontend b cannot reach it at 10.0.0.1:1"]
    assert (survey.instances[0].in_flight, survey.instances[0].seen) == (2, "cannot be reached")


async def test_an_instance_that_left_without_draining_is_named_though_discovery_forgot_it() -> None:
    """What it registered says where it was; nobody asks it, and it serves no model."""
    lost = msgspec.structs.replace(
        seen(2, "gone", 0), gone_s=300.0, metadata={"status": "http://x"}
    )
    survey = Survey(etcd="etcd", cluster=None, frontend=None)
    control = Store(OneProcess().store)
    await control.register(GENERATE, 1, model="m")
    survey.instances = (await read_listing(control)).instances
    await ask_instances(survey, Asking(fetch), [("frontend a", view(seen(1), lost))])

    (told,) = survey.away
    assert told.startswith(f"gone: instance 2 of {GENERATE}: it left 5 min ago without draining")
    assert [(each.id, each.seen) for each in survey.instances] == [("1", "live"), ("2", "gone")]


async def test_who_dials_in_vain_says_where_and_why() -> None:
    async def dial(address: str, instance_id: str) -> str:
        return f"cannot be reached at {address}: Connection refused"

    survey = Survey(etcd="etcd", cluster=None, frontend=None)
    control = Store(OneProcess().store)
    await control.register(GENERATE, 1, model="m")
    survey.instances = (await read_listing(control)).instances
    await ask_instances(survey, Asking(fetch, dial=dial))

    (away,) = survey.away
    assert away.startswith(f"instance 1 of {GENERATE} does not answer: ")
    assert away.endswith("cannot be reached at 10.0.0.1:1: Connection refused")


async def test_who_wants_a_key_is_told_as_one_that_does(tmp_path: Path) -> None:
    """Not as one that keeps no traces; and a key goes to nobody who was not named."""
    (tmp_path / "keys").write_text("operators (operator): sk-0123456789", "utf-8")
    service = HttpService.builder().config(port=0, api_keys_file=str(tmp_path / "keys")).build()
    async with trio.open_nursery() as nursery:
        url = f"http://127.0.0.1:{await nursery.start(service.run)}"
        _, wanted = await ask_places(fetch, "/traces/id", ProcessView, {url: "frontend"})
        _, wrong = await ask_places(
            fetch, "/traces/id", ProcessView, {url: "frontend"}, keys={url: "sk-another-one"}
        )
        found, away = await ask_places(
            fetch, "/traces/id", ProcessView, {url: "frontend"}, keys={url: "sk-0123456789"}
        )
        service.stop()
    assert wanted == ["frontend does not answer: 401: it wants a key; --key-env names one"]
    assert wrong == ["frontend does not answer: 401: that key is no operator's"]
    assert (len(found), away) == (1, [])


def test_a_frontend_that_is_known_by_another_way_is_listed_once() -> None:
    known = [
        FrontendLook("frontend-1", 7, "http://a:80", "http://a:9090"),
        FrontendLook("frontend", 0, "http://b:80", "", is_named=True),
    ]
    entries = [
        ("http://a:80", "http://a:9090"),
        ("http://b:80", "http://b:9090"),
        ("", "http://c:1"),
    ]
    add_listed(known, [FrontendEntry(id="1", url=url, status=status) for url, status in entries])

    assert [(each.name, each.status_url) for each in known] == [
        ("frontend-1", "http://a:9090"),
        ("frontend", "http://b:9090"),
        ("c:1", "http://c:1"),
    ]


@pytest.mark.filterwarnings("ignore:.*(httpx|httpcore|Response.aiter).*")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_the_page_of_one_frontend_shows_all_of_them() -> None:
    """Their requests, their failures, and the legs that they have kept."""
    async with open_small_cluster(frontends=2) as cluster:
        [other] = cluster.others
        body = {"model": "nobody's", "prompt": "x", "max_tokens": 1}
        refused = await other.post("/v1/completions", json=body)
        async with pages.page(cluster.http) as events:
            snapshot = await anext(events)
            while not (snapshot["failed"] and len(snapshot["frontends"]) == 2):
                snapshot = await anext(events)
            request_id = refused.headers["x-request-id"]
            told = await cluster.http.get(f"/dashboard/requests/{request_id}")
        status = httpx.URL(cluster.status[0].base_url)
        full = (await cluster.status[0].get("/status")).json()
        open_to_clients = (await cluster.http.get("/status")).json()
        targets = (await cluster.status[0].get("/sd")).json()
    assert snapshot["away"] == []
    assert [each["is_own"] for each in snapshot["frontends"]] == [True, False]
    assert {each["leg"]["name"] for each in told.json()["legs"]} >= {"http"}
    assert full["cluster"]["instances"][0]["transports"]["tcp"]
    assert open_to_clients["cluster"]["instances"][0]["transports"] == {}
    assert f"{status.host}:{status.port}" in [each["targets"][0] for each in targets]
