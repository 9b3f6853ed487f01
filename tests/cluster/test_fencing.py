"""Two processes that claim one instance id, and values that are none, in a real etcd."""

from __future__ import annotations

import pytest
import trio

from tests.servers import SessionEtcd
from trinamo.runtime.caller.router import Router
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import FencedError
from trinamo.runtime.http.metrics import FrontendMetrics
from trinamo.runtime.protocol.discovery.instances import EndpointName, Instance, encode_instance
from trinamo.runtime.worker.metrics import WorkerMetrics
from trinamo.runtime.worker.registration import Registrar
from trinamo.transports.etcd import open_etcd


async def test_an_id_belongs_to_who_claimed_it_first_until_that_one_is_gone(
    etcd_server: SessionEtcd,
) -> None:
    """The second is refused, writes nothing and deletes nothing; after a revoke the id is free."""
    key = "fencing/instances/1"
    metrics = WorkerMetrics(RealEnv())
    with trio.fail_after(120):
        async with (
            open_etcd(etcd_server.endpoint) as one,
            open_etcd(etcd_server.endpoint) as two,
            trio.open_nursery() as nursery,
        ):
            first = Registrar(one, RealEnv())
            second = Registrar(two, RealEnv(), metrics=metrics)
            for registrar in (first, second):
                await nursery.start(registrar.run)
            await first.register(key, lambda _: b"first")
            with pytest.raises(FencedError):
                await second.register(key, lambda _: b"second")
            await second.withdraw(key)
            await first.register(key, lambda _: b"draining")
            held = await two.get(key)
            await first.revoke()
            await second.register(key, lambda _: b"second")
            taken = await two.get(key)
            await second.revoke()
            nursery.cancel_scope.cancel()
    assert held is not None
    assert held.value == b"draining"
    assert taken is not None
    assert taken.value == b"second"
    assert metrics.value("registrations_fenced_total") == 1


async def test_what_others_write_below_the_instances_ends_no_watch(
    etcd_server: SessionEtcd,
) -> None:
    name = EndpointName("fencing", "backend", "generate")
    good = Instance(endpoint=str(name), id="1", transports={})
    metrics = FrontendMetrics(RealEnv())
    with trio.fail_after(120):
        async with open_etcd(etcd_server.endpoint) as plane, trio.open_nursery() as nursery:
            router = Router(plane, name, RealEnv(), metrics=metrics)
            await nursery.start(router.run)
            for key, value in (
                (f"{name.key_prefix}2", b"\xff"),
                (f"{name.key_prefix}3", b'{"x":' + b"[" * 100_000),
                (f"{name.key_prefix}4/5", encode_instance(good)),
                (name.key_prefix, b""),
                (good.key, encode_instance(good)),
            ):
                await plane.put(key, value)
            found = await router.wait_instances()
            await plane.delete_prefix(name.key_prefix)
            nursery.cancel_scope.cancel()
    assert found == [good]
    assert metrics.value("discovery_entries_refused_total", kind="instance") == 4
