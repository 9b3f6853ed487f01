"""Settings that take the place of configuration keys, in a frontend and a worker that run."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import trio

from tests.runtime.one_process import OneProcess, open_process
from tests.runtime.small_cluster import SmallCluster, open_small_cluster
from trinamo.runtime.caller.router import Router
from trinamo.runtime.caller.unary import UnaryAttempt
from trinamo.runtime.config.config import Config
from trinamo.runtime.context import Context
from trinamo.runtime.errors import RequestError
from trinamo.runtime.process.settings import (
    LIVE_KEYS,
    find_setting,
    reset_setting,
    write_setting,
)
from trinamo.runtime.protocol.discovery.instances import EndpointName


async def put(cluster: SmallCluster, name: str, text: str | None) -> None:
    """Set it, or reset it, and wait until the frontend has it."""
    control, live = cluster.frontend.control, cluster.frontend.live
    before = live.config
    if text is None:
        await reset_setting(control, name)
    else:
        await write_setting(control, name, text)
    with trio.fail_after(120):
        while live.config == before:
            await trio.sleep(0.005)


async def test_the_bound_of_requests_changes_while_a_frontend_runs() -> None:
    async with open_small_cluster(http__queue_max=0) as cluster:
        await put(cluster, "http.requests_max", "1")
        admission = cluster.service.admission
        with admission.begin("a request that holds the only place"):
            assert (await cluster.ask()).status_code == 503
        assert (await cluster.ask()).status_code == 200
        await put(cluster, "http.requests_max", None)
        with admission.begin("a request beside others"):
            assert (await cluster.ask()).status_code == 200


async def test_the_busy_threshold_changes_while_a_frontend_runs() -> None:
    """Workers report where any threshold is configured; which one counts, the setting says."""
    async with open_small_cluster(
        http__busy_waiting_tokens=1 << 20, http__busy_blocks=1
    ) as cluster:
        assert (await cluster.ask()).status_code == 200
        await put(cluster, "http.busy_blocks", "0.5")
        admission = cluster.service.admission
        assert admission.busy is not None
        assert (admission.busy.blocks, admission.busy.waiting_tokens) == (0.5, 1 << 20)
        await put(cluster, "http.busy_blocks", None)
        assert admission.busy.blocks == 1


async def test_the_policy_changes_for_clients_that_are_open_and_for_new_ones() -> None:
    async with open_small_cluster(workers=2) as cluster:
        [client] = cluster.frontend.clients
        assert client.router.policy == "round_robin"
        await put(cluster, "router.policy", "least_loaded")
        assert client.router.policy == "least_loaded"
        # One that has much to do already is not chosen, where turns would choose it; more than what
        # the other one may have reported of a request that has ended since.
        busy, idle = (str(worker.instance_id) for worker in cluster.workers)
        instance = next(each for each in client.router.instances if each.id == busy)
        with ExitStack() as held:
            for number in range(3):
                attempt = UnaryAttempt(Context(f"busy {number}"))
                held.enter_context(client.router.flight(instance, attempt))
            answers = [await cluster.ask() for _ in range(4)]
        assert {each.headers["x-trinamo-worker"] for each in answers} == {idle}

        new = await cluster.frontend.client(EndpointName("a", "b", "c"))
        assert new.router.policy == "least_loaded"
        await put(cluster, "router.policy", None)
        assert {client.router.policy, new.router.policy} == {"round_robin"}
        both = {(await cluster.ask()).headers["x-trinamo-worker"] for _ in range(4)}
        assert both == {busy, idle}


async def test_a_setting_that_changes_while_a_client_is_opened_holds_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, answered = trio.Event(), trio.Event()
    run = Router.run

    async def run_late(router: Router, *, task_status: trio.TaskStatus[None]) -> None:
        asked.set()
        await answered.wait()
        await run(router, task_status=task_status)

    monkeypatch.setattr(Router, "run", run_late)
    async with open_process(OneProcess()) as runtime, trio.open_nursery() as nursery:
        nursery.start_soon(runtime.client, EndpointName("a", "b", "c"))
        with trio.fail_after(120):
            await asked.wait()
            await write_setting(runtime.control, "router.policy", "random")
            while runtime.live.config.router.policy != "random":
                await trio.sleep(0.005)
        answered.set()
        client = await runtime.client(EndpointName("a", "b", "c"))
        assert client.router.policy == "random"


async def test_the_policy_kv_can_be_left_for_another_and_comes_back() -> None:
    async with open_small_cluster(router__policy="kv") as cluster:
        [client] = cluster.frontend.clients
        await put(cluster, "router.kv.overlap_credit", "3")
        assert client.router.kv is not None
        assert client.router.kv._weights.overlap_credit == 3
        await put(cluster, "router.policy", "random")
        assert (await cluster.ask()).status_code == 200
        chosen = client.router.kv.statistics().requests
        await put(cluster, "router.policy", None)
        assert (await cluster.ask()).status_code == 200
        assert client.router.kv.statistics().requests > chosen


async def test_how_often_an_answer_is_replayed_changes_while_a_frontend_runs() -> None:
    async with open_small_cluster(http__queue_max=0) as cluster:
        engine = cluster.service.model_manager().find("small", "completions")[1]  # type: ignore[arg-type]
        policy = engine._migration  # type: ignore[union-attr]
        assert policy.migrations_max == 3
        await put(cluster, "router.migrations_max", "0")
        assert policy.migrations_max == 0
        await put(cluster, "router.migrations_max", None)
        assert policy.migrations_max == 3


@pytest.mark.parametrize("setting", LIVE_KEYS, ids=lambda setting: setting.name)
def test_each_has_the_bounds_of_its_key_and_changes_nothing_while_it_is_not_set(
    setting: object,
) -> None:
    found = find_setting(setting.name)  # type: ignore[attr-defined]

    assert found.default is None
    assert found.decode(b"null") is None
    assert "as each is configured" in found.about
    with pytest.raises(RequestError):
        found.read("no such thing")


def test_text_needs_no_quotes_and_a_key_that_is_not_live_is_told_from_one_that_is_none() -> None:
    assert find_setting("router.policy").read("random") == "random"
    assert find_setting("router.policy").read('"random"') == "random"
    assert set(find_setting("log.access").choices) == {"all", "failures", "none"}
    with pytest.raises(RequestError, match="it takes round_robin, random, least_loaded, power"):
        find_setting("router.policy").read("kv")
    with pytest.raises(RequestError, match="read once, at the start"):
        find_setting("http.port")
    with pytest.raises(RequestError, match="there is no setting 'nothing'; there are: "):
        find_setting("nothing")
    with pytest.raises(RequestError, match=r"'router.polcy'; did you mean router.policy\?$"):
        find_setting("router.polcy")


async def test_a_listener_hears_only_changes_and_at_once_of_those_that_were_before() -> None:
    transports = OneProcess()
    heard: list[Config] = []
    async with open_process(transports) as runtime:
        runtime.live.listen(heard.append)
        assert heard == []
        await write_setting(runtime.control, "log.level", "debug")
        with trio.fail_after(120):
            while not heard:
                await trio.sleep(0.005)
        late: list[Config] = []
        runtime.live.listen(late.append)

    assert [each.log.level for each in (*heard, *late)] == ["debug", "debug"]
