"""Somebody who may write to etcd, or has the token of NATS, and not the cluster's secret: he is nobody.

Each test is an attack that once worked. Store and broker are those of the test's process; what an attacker writes
there he writes as any client of etcd and NATS would.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
import trio
import trio.testing

from tests.attack.attackers import Trap, mislead, open_trap
from tests.cluster.processes import Cluster, chat, open_cluster, until
from tests.runtime.one_process import OneProcess, open_process
from tests.transports.tcp.ends import eventually
from trinamo.cli.up.certs import write_secret
from trinamo.runtime.caller.client import Client
from trinamo.runtime.caller.kv.agreement import Agreement
from trinamo.runtime.caller.kv.loads import ActiveRequest, PredictedLoads
from trinamo.runtime.config.keys import Secret
from trinamo.runtime.config.planes import NatsConfig
from trinamo.runtime.context import Context
from trinamo.runtime.env import RealEnv
from trinamo.runtime.events.load import LOAD_TOPIC, LoadReport, LoadSource
from trinamo.runtime.events.source import event_subject, snapshot_subject, topic_of
from trinamo.runtime.kv.events import KV_TOPIC, KvEventSource
from trinamo.runtime.kv.index import KvIndex
from trinamo.runtime.planes import ControlPlane, Entry, EventPlane, Message
from trinamo.runtime.process.runtime import Runtime
from trinamo.runtime.process.settings import SETTINGS_PREFIX
from trinamo.runtime.protocol.discovery.instances import (
    INSTANCE_PREFIX,
    EndpointName,
    FrontendEntry,
    Instance,
    encode_frontend,
    encode_instance,
    frontend_key,
)
from trinamo.runtime.protocol.discovery.model_cards import MODEL_PREFIX, encode_card, model_key
from trinamo.runtime.protocol.events.sequence import (
    SequencedEvent,
    SnapshotRequest,
    encode_event,
    encode_request,
)
from trinamo.runtime.protocol.kv.events import Stored
from trinamo.runtime.protocol.openai.generate import ModelCard
from trinamo.runtime.view.listing import read_listing
from trinamo.transports.etcd import open_etcd
from trinamo.transports.memory.control import MemoryControlPlane
from trinamo.transports.memory.events import MemoryBroker, MemoryEventPlane
from trinamo.transports.nats import open_nats
from trinamo.transports.security.sealing import Sealer, sealed_events

SECRET = b"a secret of these tests, and no other"
NAME = EndpointName("attack", "backend", "generate")


async def told(request: str, _: Context) -> AsyncGenerator[str, None]:
    yield request


@attrs.define
class Attacked:
    """Two workers and a caller, and what somebody without the secret reaches."""

    transports: OneProcess
    workers: list[Runtime]
    caller: Runtime
    client: Client
    store: ControlPlane
    """As any client of etcd has it."""
    trap: Trap
    """The attacker's port."""

    async def ask(self, times: int) -> None:
        for _ in range(times):
            async with self.client.stream("mine", str) as stream:
                assert [item async for item in stream] == ["mine"]

    def own(self, instance_id: str, **fields: Any) -> Instance:
        """An instance of the attacker's address."""
        transports = {"tcp": self.trap.address}
        made = Instance(endpoint=str(NAME), id=instance_id, transports=transports)
        return msgspec.structs.replace(made, **fields)

    @property
    def dropped(self) -> float:
        return self.caller.metrics.value("unsigned_dropped_total")


@asynccontextmanager
async def attacked(**overrides: Any) -> AsyncIterator[Attacked]:
    transports = OneProcess(SECRET)
    async with (
        open_process(transports, serving=True, **overrides) as one,
        open_process(transports, serving=True, **overrides) as other,
        open_process(transports, **overrides) as caller,
        open_trap() as trap,
    ):
        for worker in (one, other):
            await worker.serve(NAME, told, request_type=str)
        client = await caller.client(NAME)
        await client.router.wait_instances(2)
        store = MemoryControlPlane(transports.store)
        yield Attacked(transports, [one, other], caller, client, store, trap)


# --- who may write to etcd -------------------------------------------------------------------------


async def test_an_address_that_was_overwritten_gets_no_prompt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """77 of 83 prompts went there."""
    async with attacked() as attack:
        for _ in range(5):
            for worker in attack.workers:
                instance = attack.own(str(worker.instance_id), incarnation=99)
                await attack.store.put(instance.key, encode_instance(instance))
            await attack.ask(4)
        assert attack.trap.calls == 0
        assert attack.dropped >= 2
        # Nobody is known by what the attacker wrote, and the workers are there again in a moment.
        async with open_process(attack.transports) as fresh:
            attack.client = await fresh.client(NAME)
            await attack.client.router.wait_instances(2)
            await attack.ask(4)
        assert attack.trap.calls == 0
    told = [each for each in caplog.messages if "it has no signature" in each]
    by_worker = [[each for each in told if str(w.instance_id) in each] for w in attack.workers]
    # Once in each process that reads it: the worker, its peers that call, and the two callers.
    assert all(1 <= len(each) <= 4 for each in by_worker), told


async def test_a_worker_that_no_member_is_is_neither_listed_nor_asked() -> None:
    async with attacked() as attack:
        instance = attack.own("ab" * 8, metadata={"status": f"http://{attack.trap.address}"})
        card = ModelCard(name="m", endpoint=str(NAME))
        frontend = FrontendEntry(
            id="cd" * 8, url=f"http://{attack.trap.address}", status=f"http://{attack.trap.address}"
        )
        await attack.store.put(instance.key, encode_instance(instance))
        await attack.store.put(model_key("m", instance.id), encode_card(card))
        await attack.store.put(frontend_key(frontend.id), encode_frontend(frontend))
        await attack.ask(8)
        assert len(list(attack.client.router.statuses())) == 2
        listing = await read_listing(attack.caller.control)
        assert (len(listing.instances), listing.frontends, listing.models) == (2, [], [])
        assert sum("secret_file" in each for each in listing.refused) == 3
        assert attack.trap.calls == 0


@pytest.mark.parametrize("way", ["another key", "another lease", "no lease", "a byte changed"])
async def test_a_copy_of_a_signed_entry_counts_for_nothing(way: str) -> None:
    async with attacked() as attack:
        real = attack.own(str(attack.workers[0].instance_id))
        held = await attack.store.get(real.key)
        assert held is not None
        key, value, lease_id = held.key, held.value, held.lease_id
        match way:
            case "another key":
                key = attack.own("ab" * 8).key
            case "another lease":
                lease_id = (await attack.store.grant_lease(60.0)).id
            case "no lease":
                lease_id = 0
            case _:
                value = value.replace(
                    b'"transports":{"tcp":"127.0.0.1', b'"transports":{"tcp":"127.0.0.2'
                )
                assert value != held.value
        await attack.store.put(key, value, lease_id=lease_id)
        read = await attack.caller.control.get(key)
        assert read is not None
        assert read.value == b""
        await attack.ask(4)
        # What was its own is put back, whoever's lease lay on it.
        with trio.fail_after(120):
            while (read := await attack.caller.control.get(real.key)) is None or not read.value:
                await trio.sleep(0.01)


async def test_a_setting_that_no_member_wrote_changes_nothing() -> None:
    async with attacked() as attack:
        await attack.store.put(f"{SETTINGS_PREFIX}worker.requests_max", b"1")
        await eventually(lambda: attack.dropped == 1)
        assert attack.caller.metrics.value("unsigned_dropped_total") == 1
        for worker in attack.workers:
            assert worker.worker is not None
            assert worker.worker.requests_max == worker.config.worker.requests_max
        await attack.ask(2)


# --- who has the token of NATS -----------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["kv", "least_loaded"])
async def test_who_is_no_member_drains_nobody(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Two messages drained a cluster."""
    async with attacked(router__policy=policy) as attack:
        stranger = MemoryEventPlane(attack.transports.broker)
        with caplog.at_level(logging.WARNING):
            for number in range(1, 4):
                for worker in attack.workers:
                    told = SequencedEvent(
                        str(worker.instance_id), 2**50, number, msgspec.msgpack.encode("draining")
                    )
                    subject = event_subject(topic_of("status", NAME), told.publisher)
                    await stranger.publish(subject, encode_event(told))
        await eventually(lambda: attack.dropped == 6)
        await attack.ask(8)
        assert {str(status) for _, status, _ in attack.client.router.statuses()} == {"live"}
    lines = [each for each in caplog.messages if "told by no member" in each]
    assert len(lines) == 1


async def test_a_report_that_was_heard_counts_on_no_other_subject() -> None:
    """Nor with a byte changed; the one it was made for brings nothing that is not known."""
    async with attacked(router__policy="least_loaded") as attack:
        stranger = MemoryEventPlane(attack.transports.broker)
        one, other = (str(each.instance_id) for each in attack.workers)
        topic = topic_of("load", NAME)
        async with stranger.subscribe(event_subject(topic, one)) as heard:
            with trio.fail_after(120):
                message = await anext(heard)
        await stranger.publish(event_subject(topic, other), message.payload)
        await stranger.publish(event_subject(topic_of("status", NAME), one), message.payload)
        changed = bytes([message.payload[0] ^ 1]) + message.payload[1:]
        await stranger.publish(message.subject, changed)
        await eventually(lambda: attack.dropped == 3)
        await attack.ask(4)


def told_by(broker: MemoryBroker) -> EventPlane:
    """The event plane as a process of the cluster has it."""
    return sealed_events(MemoryEventPlane(broker), Sealer([SECRET], RealEnv().rng))


@asynccontextmanager
async def tapped(broker: MemoryBroker) -> AsyncIterator[list[Message]]:
    """What a stranger has heard so far."""
    heard: list[Message] = []

    async def listen(*, task_status: trio.TaskStatus[None]) -> None:
        async with MemoryEventPlane(broker).subscribe(">") as messages:
            task_status.started()
            async for message in messages:
                heard.append(message)  # noqa: PERF401 -- live

    async with trio.open_nursery() as nursery:
        await nursery.start(listen)
        yield heard
        nursery.cancel_scope.cancel()


async def test_what_a_router_that_has_ended_once_said_counts_no_more(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Before: its first message, said again every four seconds, held a worker for busy for ever."""
    broker = MemoryBroker()
    async with tapped(broker) as heard:
        async with trio.open_nursery() as life:
            router = Agreement(told_by(broker), NAME, "ended", PredictedLoads())
            await life.start(router.run)
            router.began(1, ActiveRequest("a worker", (1, 2, 3), 100_000))
            await trio.sleep(1)
            router.ended(1)
            await trio.sleep(1)
            life.cancel_scope.cancel()
        said = [each for each in heard if ".event." in each.subject]
        loads = PredictedLoads()
        async with trio.open_nursery() as nursery:
            await nursery.start(Agreement(told_by(broker), NAME, "new", loads).run)
            for _ in range(5):
                for each in said[:1]:
                    await MemoryEventPlane(broker).publish(each.subject, each.payload)
                await trio.sleep(2)
                assert loads.totals == (0, 0)
            # One that lives is believed.
            other = Agreement(told_by(broker), NAME, "living", PredictedLoads())
            await nursery.start(other.run)
            other.began(1, ActiveRequest("a worker", (1, 2, 3), 100))
            await trio.sleep(1)
            assert loads.totals == (100, 3)
            nursery.cancel_scope.cancel()


async def test_what_a_member_said_is_heard_once(autojump_clock: trio.testing.MockClock) -> None:
    """Before: an old report, said again all the time, kept a worker's blocks unknown; and the last word of
    a router that was killed, said again every four seconds, kept its requests under way."""
    broker = MemoryBroker()
    async with tapped(broker) as heard, trio.open_nursery() as nursery:
        blocks = KvEventSource(told_by(broker), NAME, instance_id="w", incarnation=1)
        await nursery.start(blocks.run)
        index, loads = KvIndex(told_by(broker), NAME), PredictedLoads()
        index.join("w")
        await nursery.start(index.run)
        await nursery.start(Agreement(told_by(broker), NAME, "living", loads).run)
        async with trio.open_nursery() as life:
            killed = Agreement(told_by(broker), NAME, "killed", PredictedLoads())
            await life.start(killed.run)
            killed.began(1, ActiveRequest("w", (1, 2, 3), 100_000))
            for number in range(5):
                blocks.tell([Stored((bytes([number]) * 16,))])
                await trio.sleep(1)
            assert (loads.totals, index.statistics()["blocks"]) == ((100_000, 3), 5)
            life.cancel_scope.cancel()
        old = next(each for each in heard if each.subject.endswith("event.w"))
        last = [each for each in heard if each.subject.endswith("event.killed")][-1]
        for _ in range(100):
            for each in (old, last):
                await MemoryEventPlane(broker).publish(each.subject, each.payload)
            await trio.sleep(0.1)
            assert index.statistics()["blocks"] == 5
        assert (loads.totals, index.statistics()["backwards"]) == ((0, 0), 0)
        nursery.cancel_scope.cancel()


async def test_an_answer_that_is_wanted_on_a_topic_is_not_given(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Before: one request for a snapshot, said again with an event's subject to answer to, was a
    report of that worker with a number far ahead: its blocks were unknown to all until it ended."""
    broker = MemoryBroker()
    async with tapped(broker) as heard, trio.open_nursery() as nursery:
        worker = told_by(broker)
        load = LoadSource(
            worker, NAME, instance_id="w", incarnation=1, read=lambda: LoadReport(0), interval_s=0.1
        )
        blocks = KvEventSource(worker, NAME, instance_id="w", incarnation=1)
        await nursery.start(load.run)
        await nursery.start(blocks.run)
        index = KvIndex(told_by(broker), NAME)
        index.join("w")
        await nursery.start(index.run)
        blocks.tell([Stored((bytes(16),))])
        await trio.sleep(5)
        asked = snapshot_subject(topic_of(LOAD_TOPIC, NAME), "w")
        await told_by(broker).request(asked, encode_request(SnapshotRequest()), timeout_s=1)
        question = next(each for each in heard if each.subject == asked)
        wanted = event_subject(topic_of(KV_TOPIC, NAME), "w")
        await MemoryEventPlane(broker).publish(asked, question.payload, reply=wanted)
        await trio.sleep(10)
        told = index.statistics()
        assert (told["lost"], told["blocks"], told["gaps"]) == (0, 1, 0)
        nursery.cancel_scope.cancel()


# --- who has both, of real servers and processes ------------------------------------------------------

REQUESTS = 40


async def test_who_has_the_servers_and_no_secret_gets_and_changes_nothing(tmp_path: Path) -> None:
    """77 of 83 prompts went to another address, and two messages drained a cluster."""
    secret = tmp_path / "secret"
    write_secret(secret)
    settings = {"security.secret_file": secret, "router.policy": "kv"}
    async with open_cluster(tmp_path, settings=settings) as cluster, open_trap() as trap:
        await cluster.wait_live(2)
        nats = NatsConfig(token=Secret(cluster.nats.token))
        async with (
            open_etcd([cluster.etcd.endpoint]) as store,
            open_nats([cluster.nats.url], nats) as events,
        ):
            for number in range(1, REQUESTS + 1):
                await mislead(store, events, trap.address, number)
                body = chat("mine", max_tokens=4)
                answer = await cluster.client.post(f"{cluster.url}/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text

        async def are_counted() -> bool:
            return await cluster.metric(cluster.url, "unsigned_dropped_total") >= 2 * REQUESTS

        await until(are_counted, "all that he wrote and said is counted")
        health = (await cluster.client.get(f"{cluster.url}/health")).json()
        assert "ab" * 8 not in json.dumps(health)
    assert trap.calls == 0


# --- keys of a cluster without a secret ---------------------------------------------------------------


async def registered(store: ControlPlane) -> dict[str, Entry]:
    found = [
        *(await store.range(INSTANCE_PREFIX)).entries,
        *(await store.range(MODEL_PREFIX)).entries,
    ]
    return {each.key: each for each in found}


async def is_answered(cluster: Cluster) -> bool:
    body = chat("hi", model="echo", max_tokens=4)
    response = await cluster.client.post(f"{cluster.url}/v1/chat/completions", json=body)
    return response.status_code == 200


@pytest.mark.parametrize("value", [None, b"", b"\xff\x00 no card"], ids=["gone", "empty", "junk"])
async def test_keys_that_a_stranger_takes_away_come_back_and_requests_are_answered(
    value: bytes | None, tmp_path: Path
) -> None:
    """Before: 404 or 503 for good, though the lease lived and nothing else was wrong."""
    async with (
        open_cluster(tmp_path, workers=1, engine="echo") as cluster,
        open_etcd([cluster.etcd.endpoint]) as store,
    ):
        before = await registered(store)
        assert len(before) == 2
        for key in before:
            if value is None:
                await store.delete(key)
            else:
                await store.put(key, value)

        async def are_back() -> bool:
            now = await registered(store)
            return [(e.key, e.value, e.lease_id) for e in now.values()] == [
                (e.key, e.value, e.lease_id) for e in before.values()
            ]

        await until(are_back, "the keys are back, under the same lease")
        await until(lambda: is_answered(cluster), "a request is answered")
