"""What only etcd can show: lost replies, hung members, tokens, TLS, a server that forgot.

The behaviour shared with the other control planes is in `tests/conformance`.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from msgspec.structs import replace

from tests.conformance.control.backends import eventually
from tests.conformance.control.etcd_members import PATIENT
from tests.processes.proxy import Proxy, open_proxy
from tests.servers import SessionEtcd
from trinamo.conformance.control import until
from trinamo.runtime.config.keys import Secret
from trinamo.runtime.config.planes import EtcdConfig
from trinamo.runtime.errors import (
    ConnectError,
    ControlPlaneError,
    DeadlineError,
    LeaseLostError,
    UnknownOutcomeError,
)
from trinamo.runtime.planes import Put, Resync, Snapshot, WatchEvent
from trinamo.transports.etcd import EtcdControlPlane, open_etcd, watching
from trinamo.transports.servers import EmbeddedServer, open_etcd_server
from trinamo.transports.servers.binaries import find_etcd

_numbers = itertools.count(1)


@pytest.fixture
def prefix() -> str:
    return f"etcd-{next(_numbers)}/"


@pytest.fixture
def late_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An etcd that stalls does not have watches listed while it still sends old changes."""
    monkeypatch.setattr(watching, "PROOF_S", 60.0)


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedServer]:
    """An etcd of the test's own, to hurt."""
    async with open_etcd_server() as server:
        yield server


@asynccontextmanager
async def open_muted(endpoint: str) -> AsyncIterator[tuple[EtcdControlPlane, Proxy]]:
    """A connected plane behind a proxy that can swallow replies."""
    async with (
        open_proxy(endpoint) as proxy,
        open_etcd(proxy.address, EtcdConfig(request_timeout_s=60)) as plane,
    ):
        await plane.check_health()
        yield plane, proxy


async def reset_once_written(proxy: Proxy, other: EtcdControlPlane, key: str) -> None:
    """Once a write behind the mute proxy took effect, break its connection and mend the link."""
    with trio.fail_after(120):
        while await other.get(key) is None:
            await trio.sleep(0.01)
    await proxy.cut()
    proxy.is_mute = False
    await proxy.mend()


async def take(events: AsyncIterator[WatchEvent], count: int = 1) -> list[WatchEvent]:
    with trio.fail_after(120):
        return [await anext(events) for _ in range(count)]


# --- lost replies ----------------------------------------------------------------------------


async def test_a_put_whose_reply_is_lost_is_not_sent_again(
    etcd_server: SessionEtcd, prefix: str
) -> None:
    async with (
        open_etcd(etcd_server.endpoint, PATIENT) as other,
        open_muted(etcd_server.endpoint) as (plane, proxy),
        trio.open_nursery() as nursery,
    ):
        proxy.is_mute = True
        nursery.start_soon(reset_once_written, proxy, other, prefix + "a")
        with pytest.raises(UnknownOutcomeError) as caught:
            await plane.put(prefix + "a", b"1")
        assert not caught.value.definite
        entry = await other.get(prefix + "a")
        assert entry is not None
        assert entry.mod_revision == entry.create_revision


async def test_a_guarded_put_recognises_its_own_first_try_by_the_lease(
    etcd_server: SessionEtcd, prefix: str
) -> None:
    async with (
        open_etcd(etcd_server.endpoint, PATIENT) as other,
        open_muted(etcd_server.endpoint) as (plane, proxy),
        trio.open_nursery() as nursery,
    ):
        lease = await plane.grant_lease(60)
        proxy.is_mute = True
        nursery.start_soon(reset_once_written, proxy, other, prefix + "a")
        outcome = await plane.compare_and_put(prefix + "a", b"1", mod_revision=0, lease_id=lease.id)
        entry = await other.get(prefix + "a")
        assert entry is not None
        assert outcome.succeeded
        assert outcome.revision == entry.mod_revision == entry.create_revision


async def test_a_guarded_put_without_a_lease_says_that_it_cannot_know(
    etcd_server: SessionEtcd, prefix: str
) -> None:
    async with (
        open_etcd(etcd_server.endpoint, PATIENT) as other,
        open_muted(etcd_server.endpoint) as (plane, proxy),
        trio.open_nursery() as nursery,
    ):
        proxy.is_mute = True
        nursery.start_soon(reset_once_written, proxy, other, prefix + "a")
        with pytest.raises(UnknownOutcomeError):
            await plane.compare_and_put(prefix + "a", b"1", mod_revision=0)


# --- servers that hang, go and come back -----------------------------------------------------


async def test_a_frozen_server_ends_every_call_at_its_deadline(server: EmbeddedServer) -> None:
    """Those before and after may take as long as a busy machine needs."""
    hurried = EtcdConfig(request_timeout_s=0.6, attempt_timeout_s=0.2)
    async with (
        open_etcd(server.address, PATIENT) as patient,
        open_etcd(server.address, hurried) as plane,
    ):
        lease = await patient.grant_lease(60)
        await eventually(lambda: plane.keep_alive(lease.id))
        server.freeze()
        with pytest.raises(DeadlineError):
            await plane.get("a")
        with pytest.raises(DeadlineError):
            await plane.keep_alive(lease.id)
        with pytest.raises(UnknownOutcomeError):
            await plane.put("a", b"1")
        with pytest.raises(UnknownOutcomeError):
            await plane.compare_and_put("b", b"1", mod_revision=0)
        server.thaw()
        assert await eventually(lambda: plane.keep_alive(lease.id)) > 0


async def test_a_call_in_an_outage_waits_for_its_end(server: EmbeddedServer) -> None:
    """Nothing was sent, so even an unguarded put may try again."""
    async with (
        open_etcd(server.address, EtcdConfig(request_timeout_s=120)) as plane,
        trio.open_nursery() as nursery,
    ):
        await plane.put("a", b"1")
        lease = await plane.grant_lease(60)
        await server.kill()
        with trio.move_on_after(0.3):
            # Whoever is first may have sent something before the end of the connection is heard.
            await plane.get("a")
        nursery.start_soon(plane.put, "a", b"2")
        nursery.start_soon(plane.keep_alive, lease.id)
        nursery.start_soon(plane.get, "a")
        await trio.sleep(0.3)
        await server.restart()


@pytest.mark.usefixtures("late_listing")
async def test_a_silent_stream_is_given_up_and_loses_nothing(server: EmbeddedServer) -> None:
    async with (
        open_etcd(server.address, EtcdConfig(silence_s=0.4)) as plane,
        plane.watch("") as events,
    ):
        await take(events)
        await plane.put("1", b"")
        await take(events)
        server.freeze()
        # Long enough for several streams to be opened and given up.
        await trio.sleep(1.5)
        server.thaw()
        await eventually(lambda: plane.put("2", b""))
        await eventually(lambda: plane.put("3", b""))
        keys = [event.entry.key for event in await take(events, 2) if isinstance(event, Put)]
        assert keys == ["2", "3"]


async def test_a_server_that_forgot_everything_is_noticed(server: EmbeddedServer) -> None:
    """Watching on from a revision that is yet to come would show nothing for a long time."""
    async with open_etcd(server.address) as plane, plane.watch("k/") as events:
        for number in range(20):
            await plane.put(f"k/{number}", b"old")
        lease = await plane.grant_lease(60)
        await take(events, 1)
        await server.kill()
        shutil.rmtree(server.log_path.parent / "data")
        await server.restart()
        await eventually(lambda: plane.put("k/new", b"new"))
        with trio.fail_after(120):
            while not isinstance(event := await anext(events), Resync):
                pass
        assert [entry.key for entry in event.entries] == ["k/new"]
        with pytest.raises(LeaseLostError):
            await plane.keep_alive(lease.id)


async def test_several_endpoints_outlive_one(etcd_server: SessionEtcd, prefix: str) -> None:
    async with (
        open_proxy(etcd_server.endpoint) as one,
        open_proxy(etcd_server.endpoint) as two,
        open_etcd([one.address, two.address]) as plane,
        plane.watch(prefix) as events,
    ):
        lease = await plane.grant_lease(60)
        await take(events)
        for proxy in (one, two):
            await plane.put(prefix + "a", b"before")
            await take(events)
            await proxy.cut()
            assert await plane.get(prefix + "a") is not None
            assert await plane.keep_alive(lease.id) > 0
            await eventually(lambda: plane.put(prefix + "a", b"during"))
            await take(events)
            await proxy.mend()


@pytest.mark.usefixtures("late_listing")
async def test_changes_larger_than_a_message_arrive_in_order(
    etcd_server: SessionEtcd, prefix: str
) -> None:
    """Catching up takes more bytes than gRPC's usual 4 MiB, so they come in parts."""
    async with (
        open_etcd(etcd_server.endpoint, PATIENT) as other,
        open_proxy(etcd_server.endpoint) as proxy,
        open_etcd(proxy.address, PATIENT) as plane,
        plane.watch(prefix) as events,
    ):
        await take(events)
        # By which the watch knows the history again.
        await other.put(prefix, b"")
        await take(events)
        await proxy.cut()
        for number in range(8):
            await other.put(f"{prefix}{number}", bytes([number]) * (1 << 20))
        await proxy.mend()
        found = [event for event in await take(events, 8) if isinstance(event, Put)]
        assert [event.entry.value for event in found] == [
            bytes([number]) * (1 << 20) for number in range(8)
        ]
        snapshot = await plane.range(prefix)
        assert len(snapshot.entries) == 9
        await plane.delete_prefix(prefix)


# --- the plane itself ------------------------------------------------------------------------


async def test_sixty_watches_and_leases_cost_a_handful_of_threads(
    etcd_server: SessionEtcd, prefix: str
) -> None:
    before = threading.active_count()
    async with open_etcd(etcd_server.endpoint, PATIENT) as plane, trio.open_nursery() as nursery:
        ready = []

        async def watch() -> None:
            lease = await plane.grant_lease(60)
            async with plane.watch(prefix) as events:
                await take(events)
                await plane.keep_alive(lease.id)
                ready.append(lease)
                await trio.sleep_forever()

        for _ in range(60):
            nursery.start_soon(watch)
        await until(lambda: len(ready) == 60)
        # Two streams of two threads each, and gRPC's own.
        assert threading.active_count() - before <= 6
        nursery.cancel_scope.cancel()
    await until(lambda: threading.active_count() <= before)


async def test_a_closed_plane_says_so(etcd_server: SessionEtcd) -> None:
    async with open_etcd(etcd_server.endpoint, PATIENT) as plane:
        pass
    with pytest.raises(ConnectError, match="closed"):
        await plane.get("a")


async def test_an_error_of_the_body_leaves_the_plane_as_it_is(etcd_server: SessionEtcd) -> None:
    with pytest.raises(KeyError):
        async with open_etcd(etcd_server.endpoint, PATIENT):
            raise KeyError("mine")


async def test_health_warns_of_a_release_known_to_be_broken(etcd_server: SessionEtcd) -> None:
    async with open_etcd(etcd_server.endpoint, PATIENT) as plane:
        line = await plane.check_health()
    assert etcd_server.endpoint in line
    assert ("3.5.1" in line) == ("warning" in line)


async def test_a_name_works_as_an_endpoint(etcd_server: SessionEtcd) -> None:
    port = etcd_server.endpoint.rpartition(":")[2]
    for given in (
        f"localhost:{port}",
        f"http://localhost:{port}",
        f"localhost:{port},localhost:{port}",
    ):
        async with open_etcd(given, PATIENT) as plane:
            assert await plane.check_health()


# --- access control and TLS ------------------------------------------------------------------


def turn_access_control_on(address: str) -> None:
    tool = find_etcd().with_name("etcdctl")

    def administer(*words: str) -> None:
        endpoint = address.replace("unix:", "unix://")
        subprocess.run(
            [tool, "--endpoints", endpoint, *words], env={"ETCDCTL_API": "3"}, check=True
        )

    for user in ("root", "worker"):
        administer("user", "add", f"{user}:{user}-secret")
        administer("role", "add", user)
        administer("user", "grant-role", user, user)
    administer("role", "grant-permission", "worker", "readwrite", "--prefix=true", "ok/")
    administer("auth", "enable")


async def test_a_user_works_over_a_restart_that_ends_its_token(server: EmbeddedServer) -> None:
    turn_access_control_on(server.address)
    async with (
        open_etcd(
            server.address, replace(PATIENT, username="worker", password=Secret("worker-secret"))
        ) as plane,
        plane.watch("ok/") as events,
    ):
        assert isinstance((await take(events))[0], Snapshot)
        lease = await plane.grant_lease(60)
        await plane.put("ok/a", b"1", lease_id=lease.id)
        await take(events)
        await plane.keep_alive(lease.id)
        await server.kill()
        await server.restart()
        await eventually(lambda: plane.put("ok/b", b"2", lease_id=lease.id))
        event = (await take(events))[0]
        assert isinstance(event, Put)
        assert event.entry.key == "ok/b"
        assert await eventually(lambda: plane.keep_alive(lease.id)) > 0


async def test_what_a_user_may_not_do_is_a_definite_error(server: EmbeddedServer) -> None:
    turn_access_control_on(server.address)
    async with open_etcd(
        server.address, replace(PATIENT, username="worker", password=Secret("worker-secret"))
    ) as plane:
        await plane.put("ok/a", b"1")
        with pytest.raises(ControlPlaneError, match="permission denied") as caught:
            await plane.put("no/a", b"1")
        assert caught.value.definite
        with pytest.raises(ControlPlaneError, match="permission denied"):
            async with plane.watch("no/") as events:
                await take(events)
        await plane.put("ok/a", b"2")
    for section in (replace(PATIENT, username="worker", password=Secret("wrong")), PATIENT):
        async with open_etcd(server.address, section) as plane:
            with pytest.raises(ControlPlaneError) as refused:
                await plane.get("ok/a")
            assert refused.value.definite
