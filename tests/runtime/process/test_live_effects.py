"""Every live setting has an effect in a process that runs, and `--reset` ends it.

One test for each, by name: a setting without a test here is a failure.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import attrs
import pytest
import trio

from tests.runtime.disaggregation.serving import open_workers, prompt
from tests.runtime.http.models.test_migrating import open_house
from tests.runtime.small_cluster import SmallCluster, open_small_cluster
from trinamo.runtime.caller.client import Client
from trinamo.runtime.caller.record import InstanceStatus
from trinamo.runtime.caller.unary import UnaryAttempt
from trinamo.runtime.context import Context
from trinamo.runtime.errors import DisconnectedError
from trinamo.runtime.events.load import LoadReport
from trinamo.runtime.process.runtime import Runtime
from trinamo.runtime.process.settings import (
    PREFILL_TOKENS_LOCAL_MAX,
    QUEUE_DEPTH_MAX,
    SETTINGS,
    reset_setting,
    write_setting,
)
from trinamo.runtime.protocol.discovery.instances import EndpointName, Instance
from trinamo.runtime.protocol.kv.names import RoutingHint
from trinamo.runtime.worker.reports import Reports

Effect = Callable[[pytest.MonkeyPatch], Awaitable[None]]
EFFECTS: dict[str, Effect] = {}
OF_THE_COMMAND = {"log.level", "log.access"}
"""What these do is what `trinamo worker` and `frontend` do with them: tests/cli/test_live_settings.py."""
TIMEOUT_S = 120


def effect_of(name: str) -> Callable[[Effect], Effect]:
    def add(effect: Effect) -> Effect:
        EFFECTS[name] = effect
        return effect

    return add


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    with trio.fail_after(TIMEOUT_S):
        while not await condition():
            await trio.sleep(0.01)


async def put(name: str, text: str | None, *processes: Runtime) -> None:
    """Set it, or reset it, and wait until each of the processes has it."""
    wanted = SETTINGS[name].default if text is None else SETTINGS[name].read(text)
    control = processes[0].control
    await (reset_setting(control, name) if text is None else write_setting(control, name, text))

    async def is_known() -> bool:
        return all(each.settings.get(SETTINGS[name]) == wanted for each in processes)

    await eventually(is_known)


async def answers_with(cluster: SmallCluster, status: int) -> None:
    async def answers() -> bool:
        return (await cluster.ask()).status_code == status

    await eventually(answers)


HELD = EndpointName("a", "b", "hold")


async def hold(_: object, context: Context) -> int:
    await trio.sleep_forever()
    raise AssertionError


@effect_of("worker.requests_max")
async def requests_of_a_worker(_: pytest.MonkeyPatch) -> None:
    async with open_small_cluster(http__queue_max=0) as cluster:
        [worker] = cluster.workers
        await worker.serve_unary(HELD, hold)
        client = await cluster.frontend.client(HELD)
        await client.router.wait_instances()
        assert worker.worker is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.call, None, int)
            while not worker.worker.active_count:
                await trio.sleep(0.005)
            await answers_with(cluster, 200)
            await put("worker.requests_max", "1", worker)
            await answers_with(cluster, 503)
            await put("worker.requests_max", None, worker)
            await answers_with(cluster, 200)
            nursery.cancel_scope.cancel()


@effect_of("http.requests_max")
async def requests_of_a_frontend(_: pytest.MonkeyPatch) -> None:
    async with open_small_cluster(http__queue_max=0) as cluster:
        with cluster.service.admission.begin("a request beside others"):
            await put("http.requests_max", "1", cluster.frontend)
            await answers_with(cluster, 503)
            await put("http.requests_max", None, cluster.frontend)
            await answers_with(cluster, 200)


@effect_of("http.queue_max")
async def requests_that_wait(_: pytest.MonkeyPatch) -> None:
    async with open_small_cluster(
        http__requests_max=1, http__queue_max=0, http__drain_timeout_s=0.1
    ) as cluster:
        queue = cluster.service.admission.queue
        with cluster.service.admission.begin("a request that holds the only place"):
            await answers_with(cluster, 503)
            await put("http.queue_max", "1", cluster.frontend)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cluster.ask)
                with trio.fail_after(TIMEOUT_S):
                    while not queue.length:
                        await trio.sleep(0.005)
                await put("http.queue_max", None, cluster.frontend)
                await answers_with(cluster, 503)
                cluster.service.stop()


@effect_of("http.queue_timeout_s")
async def how_long_requests_wait(_: pytest.MonkeyPatch) -> None:
    async with open_small_cluster(
        http__requests_max=1, http__queue_max=1, http__queue_timeout_s=3600
    ) as cluster:
        with cluster.service.admission.begin("a request that holds the only place"):
            await put("http.queue_timeout_s", "0.01", cluster.frontend)
            await answers_with(cluster, 503)


@effect_of("http.rate_per_s")
async def how_often_requests_may_come(_: pytest.MonkeyPatch) -> None:
    async with open_small_cluster() as cluster:
        await put("http.rate_per_s", "0.001", cluster.frontend)
        await answers_with(cluster, 429)
        await put("http.rate_per_s", None, cluster.frontend)
        await answers_with(cluster, 200)


@effect_of("http.rate_burst")
async def how_many_may_come_at_once(_: pytest.MonkeyPatch) -> None:
    async with open_small_cluster(http__rate_per_s=0.001, http__rate_burst=1000) as cluster:
        await answers_with(cluster, 200)
        await put("http.rate_burst", "1", cluster.frontend)
        await answers_with(cluster, 429)


async def busy_workers(monkeypatch: pytest.MonkeyPatch, *, name: str, value: str) -> None:
    """Under a policy and a configuration by which nobody tells loads before the setting says so."""
    said = LoadReport(active=1, blocks_used=9, blocks_total=10, waiting_tokens=100)
    monkeypatch.setattr(Reports, "_load", lambda *_: said)
    async with open_small_cluster(workers=2, http__queue_max=0) as cluster:
        assert (await cluster.ask()).status_code == 200
        await put(name, value, cluster.frontend, *cluster.workers)
        await answers_with(cluster, 503)
        await put(name, None, cluster.frontend, *cluster.workers)
        await answers_with(cluster, 200)


EFFECTS["http.busy_blocks"] = partial(busy_workers, name="http.busy_blocks", value="0.5")
EFFECTS["http.busy_waiting_tokens"] = partial(
    busy_workers, name="http.busy_waiting_tokens", value="50"
)


@effect_of("router.policy")
async def the_choice(_: pytest.MonkeyPatch) -> None:
    async with open_small_cluster(workers=2) as cluster:
        [client] = cluster.frontend.clients
        busy, idle = client.router.instances
        with client.router.flight(busy, UnaryAttempt(Context("busy"))):
            both = {busy.id, idle.id}
            for policy, chosen in (
                ("least_loaded", {idle.id}),
                ("power_of_two", {idle.id}),
                ("random", both),
                ("round_robin", both),
                (None, both),
            ):
                await put("router.policy", policy, cluster.frontend)
                assert {client.router.choose().id for _ in range(64)} == chosen, policy


@effect_of("router.inhibit_s")
async def how_long_one_is_avoided(_: pytest.MonkeyPatch) -> None:
    async with open_small_cluster(router__inhibit_s=0.001) as cluster:
        [client] = cluster.frontend.clients
        [one] = client.router.instances

        def inhibited_for() -> float:
            [record] = list(client.router._known)
            client.router.restore(one)
            client.router.fail(one, DisconnectedError("gone"), Context("r"))
            return record.faulty_until - trio.current_time()

        assert inhibited_for() < 1
        await put("router.inhibit_s", "3600", cluster.frontend)
        assert inhibited_for() > 3000
        assert [status for *_, status, _count in client.router.statuses()] != [InstanceStatus.LIVE]
        await put("router.inhibit_s", None, cluster.frontend)
        assert inhibited_for() < 1


@effect_of("router.attempts_max")
async def how_many_are_tried(_: pytest.MonkeyPatch) -> None:
    async with open_small_cluster(workers=2, router__inhibit_s=0.001, http__queue_max=0) as cluster:
        refusing = cluster.workers[0].worker
        assert refusing is not None
        refusing.requests_max = 0
        assert {(await cluster.ask()).status_code for _ in range(4)} == {200}
        await put("router.attempts_max", "1", cluster.frontend)
        await answers_with(cluster, 503)
        await put("router.attempts_max", None, cluster.frontend)
        assert {(await cluster.ask()).status_code for _ in range(4)} == {200}


async def replays(_: pytest.MonkeyPatch, *, name: str, value: str) -> None:
    async with open_house() as house:

        async def status_of_one_that_is_cut() -> int:
            house.cut.at = 5
            body = {"prompt": "Say anything.", "model": "exact", "max_tokens": 12}
            return (await house.client.post("/v1/completions", json=body)).status_code

        assert await status_of_one_that_is_cut() == 200
        await put(name, value, house.frontend)
        assert await status_of_one_that_is_cut() == 503
        await put(name, None, house.frontend)
        assert await status_of_one_that_is_cut() == 200


EFFECTS["router.migrations_max"] = partial(replays, name="router.migrations_max", value="0")
EFFECTS["router.migration_tokens_max"] = partial(
    replays, name="router.migration_tokens_max", value="4"
)

BLOCK = 16


def hint_of(keys: Sequence[int], tokens: int | None = None) -> RoutingHint:
    return RoutingHint(keys, len(keys) * BLOCK if tokens is None else tokens, BLOCK, is_exact=False)


@attrs.frozen
class Load:
    """What one of two instances has to do, in blocks."""

    held: int = 0
    """Of the prompt that is asked."""
    waiting: int = 0
    """Of a prompt that it computes."""
    decoding: Sequence[int] = ()
    """Of each sequence under way."""

    def begin(self, client: Client, instance: Instance, first_key: int) -> None:
        router, key = client.router, first_key

        def send(count: int, *, keys: Sequence[int] = (), is_computed: bool) -> UnaryAttempt:
            nonlocal key
            request = UnaryAttempt(Context(f"{instance.id} {key}"))
            router.begin(instance, request, hint_of(keys or range(key, key + count)))
            key += count
            if is_computed:
                router.first_item(request)
            return request

        if self.held:
            router.end(instance, send(self.held, keys=range(self.held), is_computed=True))
        for count in self.decoding:
            send(count, is_computed=True)
        if self.waiting:
            send(self.waiting, is_computed=False)


async def weight(
    _: pytest.MonkeyPatch, *, name: str, value: str, one: Load, other: Load, asked: int
) -> None:
    """Without the setting the first is the cheaper for a prompt of so many blocks, with it the second."""
    async with open_small_cluster(workers=2, router__policy="kv") as cluster:
        [client] = cluster.frontend.clients
        await client.router.wait_instances(2)
        first, second = client.router.instances
        one.begin(client, first, 1000)
        other.begin(client, second, 2000)
        choose = partial(client.router.choose, hint=hint_of(range(asked)))
        assert {choose().id for _ in range(20)} == {first.id}
        await put(name, value, cluster.frontend)
        assert second.id in {choose().id for _ in range(2000)}
        await put(name, None, cluster.frontend)
        assert {choose().id for _ in range(20)} == {first.id}


for _name, _value, _one, _other, _asked in (
    ("overlap_credit", "0", Load(held=10, decoding=[1]), Load(), 10),
    ("overlap_credit_decay", "100", Load(held=10, waiting=10), Load(decoding=[15]), 10),
    ("prefill_load_scale", "0", Load(decoding=[15]), Load(waiting=10), 1),
    ("active_request_weight", "10", Load(decoding=[1, 1, 1]), Load(decoding=[5]), 1),
    ("temperature", "100", Load(), Load(decoding=[5]), 1),
):
    EFFECTS[f"router.kv.{_name}"] = partial(
        weight, name=f"router.kv.{_name}", value=_value, one=_one, other=_other, asked=_asked
    )


async def remote_prefills(_: pytest.MonkeyPatch, *, name: str, value: str, reason: str) -> None:
    async with open_workers("decode", "prefill") as workers:
        decode = workers.of("decode")
        assert decode.runtime is not None
        counted = partial(decode.prefills, mode="decode_first")
        await workers.ask(prompt(100))
        assert counted("remote", "long_prompt") == 1
        await put(name, value, decode.runtime)
        await workers.ask(prompt(100, offset=1))
        assert (counted("remote", "long_prompt"), counted("local", reason)) == (1, 1)
        await put(name, None, decode.runtime)
        await workers.ask(prompt(100, offset=2))
        assert counted("remote", "long_prompt") == 2


for _setting, _text, _reason in (
    (PREFILL_TOKENS_LOCAL_MAX, "1000", "short_prompt"),
    (QUEUE_DEPTH_MAX, "0", "queue_full"),
):
    EFFECTS[_setting.name] = partial(
        remote_prefills, name=_setting.name, value=_text, reason=_reason
    )


@pytest.mark.parametrize("name", EFFECTS)
async def test_it_changes_what_a_process_does_and_changes_it_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trio.fail_after(TIMEOUT_S):
        await EFFECTS[name](monkeypatch)


def test_no_setting_is_without_a_test() -> None:
    assert EFFECTS.keys() | OF_THE_COMMAND == SETTINGS.keys()
