"""The life of a connection to NATS: opening, losing, closing, and what it leaves behind."""

from __future__ import annotations

import gc
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from msgspec.structs import replace
from nats.aio.client import Client

from tests.certificates import Authority
from tests.leftovers import uncollected
from tests.servers import free_ports
from tests.transports.nats.brokers import (
    PATIENT,
    private_server,
    wait_away,
    wait_back,
)
from trinamo.conformance.control import until
from trinamo.conformance.events import fresh_subject
from trinamo.runtime.config.keys import Secret
from trinamo.runtime.config.planes import NatsConfig
from trinamo.runtime.errors import ConfigError, ConnectError, RequestError, UnavailableError
from trinamo.runtime.planes import EventPlane, Message
from trinamo.transports.nats import NatsEventPlane, open_nats
from trinamo.transports.nats.island import Island
from trinamo.transports.nats.outbox import Interest
from trinamo.transports.nats.queue.streams import PROBE_SUBJECT
from trinamo.transports.servers import open_nats_server
from trinamo.transports.servers.binaries import find_nats_server


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    server_url: str = request.getfixturevalue("nats_server").url
    return server_url


def raises_connect_error(text: str) -> pytest.RaisesExc[ConnectError]:
    return pytest.RaisesExc(
        ConnectError, check=lambda error: text in error.message and error.definite
    )


async def open_and_leave(
    servers: list[str],
    section: NatsConfig = PATIENT,
    tls: ssl.SSLContext | None = None,
) -> None:
    with trio.fail_after(120):
        async with open_nats(servers, section, tls=tls) as plane:
            await plane.check_health()


@contextmanager
def held_port() -> Iterator[int]:
    """A port at which nobody listens, nor any other process comes to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]


async def test_a_plane_is_an_event_plane(url: str) -> None:
    async with open_nats([url], PATIENT) as plane:
        as_interface: EventPlane = plane
        assert "nats-server 2." in await as_interface.check_health()
        assert plane.is_connected
        assert plane.statistics().connections == 1
        assert plane.message_bytes_max == 1_048_576


async def test_a_server_that_is_not_there_is_a_connect_error_without_its_password() -> None:
    with held_port() as port, raises_connect_error(f"at 127.0.0.1:{port}: ") as caught:
        servers = [f"nats://admin:secret@127.0.0.1:{port}"]
        await open_and_leave(servers, NatsConfig(start_timeout_s=0.2))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "servers", [[], "", ["nats://127.0.0.1:70000"], ["nats://[::1"], ["localhost:4222"]]
)
async def test_an_address_that_is_none_is_a_config_error(servers: list[str]) -> None:
    with pytest.raises(ConfigError):
        await open_and_leave(servers)


async def test_a_missing_package_is_a_config_error_that_says_how_to_mend_it(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "seed").write_text("SU" + "A" * 56)
    monkeypatch.setitem(sys.modules, "nkeys", None)
    with pytest.raises(ConfigError, match="pip install"):
        await open_and_leave([url], NatsConfig(nkey_seed_file=str(tmp_path / "seed")))


async def test_one_server_may_be_given_as_text(url: str) -> None:
    async with open_nats(url, PATIENT) as plane:
        await plane.check_health()


async def test_the_next_server_is_tried(url: str) -> None:
    with held_port() as port:
        await open_and_leave([f"nats://127.0.0.1:{port}", url])


async def test_username_and_password_are_checked_by_the_server() -> None:
    with private_server(find_nats_server(), "--user", "u", "--pass", "p") as server:
        await open_and_leave([server.url], NatsConfig(username="u", password=Secret("p")))
        with raises_connect_error("Authorization Violation"):
            await open_and_leave([server.url], NatsConfig(username="u", password=Secret("wrong")))
        with raises_connect_error("Authorization Violation"):
            await open_and_leave([server.url])


async def test_a_token_is_checked_by_the_server() -> None:
    with private_server(find_nats_server(), "--auth", "t") as server:
        await open_and_leave([server.url], NatsConfig(token=Secret("t")))
        with raises_connect_error("Authorization Violation"):
            await open_and_leave([server.url], NatsConfig(token=Secret("wrong")))


async def test_tls_connects_with_the_right_authority_only(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path)
    certificate, key = authority.sign("server")
    arguments = ("--tls", "--tlscert", str(certificate), "--tlskey", str(key))
    with private_server(find_nats_server(), *arguments) as server:
        url = server.url.replace("nats://", "tls://")
        trusting = ssl.create_default_context(cafile=str(authority.ca_file))
        await open_and_leave([url], tls=trusting)
        with raises_connect_error("CERTIFICATE_VERIFY_FAILED"):
            await open_and_leave([url], tls=ssl.create_default_context())


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"INFO {\r\n", b""])
async def test_something_else_at_the_port_is_a_connect_error(greeting: bytes) -> None:
    async def greet(stream: trio.SocketStream) -> None:
        async with stream:
            if greeting:
                await stream.send_all(greeting)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, greet, 0)
        port = listeners[0].socket.getsockname()[1]
        with raises_connect_error("cannot connect to NATS"):
            await open_and_leave([f"nats://127.0.0.1:{port}"], NatsConfig(start_timeout_s=0.2))
        nursery.cancel_scope.cancel()


async def test_a_process_that_starts_before_its_broker_waits_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_nats_server() as server, trio.open_nursery() as nursery:
        await server.kill()
        options = NatsConfig(token=Secret(server.token), start_timeout_s=60)
        nursery.start_soon(open_and_leave, [server.url], options)
        await until(lambda: "trying again" in caplog.text)
        await server.start()


async def say_nothing(stream: trio.SocketStream) -> None:
    await trio.sleep_forever()


async def test_a_server_that_is_silent_is_told_with_a_reason() -> None:
    """What is raised then has no words of its own."""
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, say_nothing, 0)
        place = f"nats://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        section = NatsConfig(connect_timeout_s=0.1, start_timeout_s=0.2)
        with raises_connect_error(f"cannot connect to NATS at {place}: ") as caught:
            await open_and_leave([place], section)
        # Either bound may be first on a busy machine.
        assert caught.value.message.endswith((": TimeoutError", ": no answer within 0.2 s"))
        nursery.cancel_scope.cancel()


async def test_opening_can_be_cancelled_while_the_server_is_silent() -> None:
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, say_nothing, 0)
        port = listeners[0].socket.getsockname()[1]
        with trio.fail_after(120), trio.move_on_after(0.05) as scope:
            async with open_nats([f"nats://127.0.0.1:{port}"], NatsConfig(connect_timeout_s=60)):
                raise AssertionError
        assert scope.cancelled_caught
        nursery.cancel_scope.cancel()


async def test_what_was_published_before_leaving_is_sent(url: str) -> None:
    subject = fresh_subject()
    async with open_nats([url], PATIENT) as other, other.subscribe(subject) as subscription:
        section = replace(PATIENT, drain_timeout_s=60)
        async with open_nats([url], section) as plane:
            for number in range(1000):
                await plane.publish(subject, b"%d" % number)
        with trio.fail_after(120):
            got = [(await anext(subscription)).payload for _ in range(1000)]
    assert got == [b"%d" % number for number in range(1000)]


async def test_an_error_inside_comes_out_as_itself(url: str) -> None:
    with pytest.raises(RequestError, match="mine"):
        async with open_nats([url], PATIENT):
            raise RequestError("mine")


async def test_a_group_of_errors_inside_comes_out_as_it_was(url: str) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(RequestError, match="mine")):
        async with open_nats([url], PATIENT):
            raise ExceptionGroup("", [RequestError("mine")])


async def test_a_bug_in_the_island_reaches_the_owner_and_cancels_what_it_does(url: str) -> None:
    def deliver(message: Message) -> None:
        raise ZeroDivisionError

    subject = fresh_subject()

    async def own() -> None:
        async with open_nats([url], PATIENT) as plane:
            plane._island.add(Interest(subject, "", deliver, lambda: None))
            await plane.publish(subject, b"")
            await trio.sleep_forever()

    with trio.fail_after(120), pytest.raises(ZeroDivisionError):
        await own()


async def test_a_closed_plane_says_so_and_ends_its_readers_and_requests(url: str) -> None:
    subject = fresh_subject()
    ended: list[str] = []

    async def consume(plane: NatsEventPlane, task_status: trio.TaskStatus[None]) -> None:
        async with plane.subscribe(subject) as subscription:
            task_status.started()
            async for _ in subscription:
                pass
            ended.append("reader")

    async def ask(plane: NatsEventPlane) -> None:
        with pytest.raises(ConnectError):
            await plane.request(subject, b"", timeout_s=60)
        ended.append("request")

    async with trio.open_nursery() as nursery:
        async with open_nats([url], PATIENT) as plane:
            await nursery.start(lambda task_status: consume(plane, task_status))
            nursery.start_soon(ask, plane)
            await trio.testing.wait_all_tasks_blocked(0.01)
        with pytest.raises(ConnectError):
            await plane.publish(subject, b"")
        with pytest.raises(ConnectError):
            await plane.check_health()
        with pytest.raises(ConnectError):
            async with plane.subscribe(subject):
                pass
    assert sorted(ended) == ["reader", "request"]


async def test_closing_leaves_no_task_no_thread_and_no_socket(url: str) -> None:
    def count() -> tuple[int, int, int]:
        tasks = trio.lowlevel.current_statistics().tasks_living
        return tasks, threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    await open_and_leave([url])
    # What earlier tests left to the collector is not there, either.
    gc.collect()
    before = count()
    for _ in range(3):
        subject = fresh_subject()
        async with open_nats([url], PATIENT) as plane, plane.subscribe(subject) as subscription:
            await plane.publish(subject, b"x")
            await anext(subscription)
        with trio.move_on_after(0.02):
            async with open_nats([url], PATIENT) as plane:
                await trio.sleep_forever()
    gc.collect()
    # Threads that were idle before may have ended meanwhile.
    assert all(now <= then for now, then in zip(count(), before, strict=True)), before


async def test_attempts_that_fail_leave_no_frames_to_the_collector() -> None:
    """An outage is thousands of them. nats-py's client and its parser are left, as they hold each other."""
    with held_port() as port, uncollected() as left:
        with suppress(ConnectError):
            async with open_nats([f"nats://127.0.0.1:{port}"], NatsConfig(start_timeout_s=0.3)):
                raise AssertionError
        assert left(OSError) == []


async def test_closing_is_bounded_when_the_server_reads_nothing() -> None:
    with private_server(find_nats_server()) as server:
        assert server.child is not None
        with trio.fail_after(120):
            async with open_nats([server.url], NatsConfig(drain_timeout_s=0.3)) as plane:
                server.child.send_signal(signal.SIGSTOP)
                for _ in range(48):
                    await plane.publish("big", b"x" * 1_000_000)
                await trio.testing.wait_all_tasks_blocked(0.1)


async def test_a_server_that_falls_silent_counts_as_gone() -> None:
    with private_server(find_nats_server()) as server:
        assert server.child is not None
        async with open_nats([server.url], NatsConfig(ping_interval_s=0.1)) as plane:
            server.child.send_signal(signal.SIGSTOP)
            await wait_away(plane)
            server.child.send_signal(signal.SIGCONT)
            await wait_back(plane)
            assert plane.statistics().connections >= 2


async def test_a_connection_that_breaks_as_it_is_closed_leaves_no_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """nats-py forgets its tasks then, and what the collector ends asks for a turn wherever that is."""

    flush = Client._flush_pending

    async def breaks(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.is_closed:
            raise ConnectionResetError
        await flush(self, *args, **kwargs)

    with private_server(find_nats_server()) as server, trio.fail_after(120):
        async with (
            open_nats([server.url], PATIENT) as plane,
            plane.subscribe("a"),
            plane.subscribe("b"),
        ):
            await plane.check_health()
            island = plane._island
            assert isinstance(island, Island)
            before = len(island._tasks)
            monkeypatch.setattr(Client, "_flush_pending", breaks)
            for _ in range(3):
                server.kill()
                await wait_away(plane)
                server.start()
                await wait_back(plane)
            monkeypatch.setattr(Client, "_flush_pending", flush)
            # What confirms the subscriptions ends as well.
            await until(lambda: len(island._tasks) <= before)


async def test_a_subject_that_is_no_text_costs_a_connection_but_not_the_plane(url: str) -> None:
    """nats-py cannot decode it, and its reader ends; a peer must not silence us by that."""
    subject = fresh_subject()
    host, _, port = url.removeprefix("nats://").partition(":")
    with trio.fail_after(120):
        async with (
            open_nats([url], PATIENT) as plane,
            plane.subscribe(f"{subject}.>") as subscription,
        ):
            async with await trio.open_tcp_stream(host, int(port)) as raw:
                await raw.receive_some()
                await raw.send_all(
                    b'CONNECT {"verbose":false}\r\nPUB %b.\xff\xfe 1\r\nx\r\nPING\r\n'
                    % subject.encode()
                )
                await raw.receive_some()
            await until(lambda: plane.statistics().connections == 2 and plane.is_connected)
            await plane.publish(f"{subject}.fine", b"y")
            assert (await anext(subscription)).payload == b"y"


async def test_a_server_that_refuses_us_is_asked_again() -> None:
    """A server that turns our credentials away for a while, which nats-py takes as final."""
    with private_server(find_nats_server(), "--auth", "t") as server, trio.fail_after(120):
        async with open_nats([server.url], replace(PATIENT, token=Secret("t"))) as plane:
            server.kill()
            await wait_away(plane)
            server.command[-1] = "changed"
            await trio.to_thread.run_sync(server.start)
            await until(lambda: "Authorization Violation" in plane._island.last_error)
            server.kill()
            server.command[-1] = "t"
            await trio.to_thread.run_sync(server.start)
            await wait_back(plane)


async def test_the_other_members_of_a_cluster_are_learned_and_used() -> None:
    routes = free_ports(2)

    def arguments(mine: int, theirs: int) -> tuple[str, ...]:
        cluster = f"nats://127.0.0.1:{mine}"
        return "--cluster_name", "c", "--cluster", cluster, "--routes", f"nats://127.0.0.1:{theirs}"

    binary = find_nats_server()
    with (
        private_server(binary, *arguments(routes[0], routes[1])) as first,
        private_server(binary, *arguments(routes[1], routes[0])) as second,
        trio.fail_after(120),
    ):
        async with open_nats([first.url], PATIENT) as plane:
            async with open_nats([second.url], PATIENT) as other:
                await until_reachable(plane, other)
            # The list of members is read when a connection is made or lost.
            first.kill()
            await wait_away(plane)
            await wait_back(plane)
            assert second.url.removeprefix("nats://") in await plane.check_health()


async def until_reachable(plane: EventPlane, other: EventPlane) -> None:
    """Wait until the two servers have found each other."""
    subject = fresh_subject()
    got: list[Message] = []
    async with other.subscribe(subject) as subscription, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def receive() -> None:
            got.append(await anext(subscription))

        while not got:
            await plane.publish(subject, b"x")
            await trio.sleep(0.02)


async def test_a_server_without_jetstream_is_refused_where_it_is_needed() -> None:
    with private_server(find_nats_server()) as server:
        async with open_nats([server.url], PATIENT) as plane:
            assert (await plane.check_health()).endswith(" without JetStream")
        with raises_connect_error("runs without JetStream"):
            await open_and_leave([server.url], NatsConfig(jetstream=True))


async def test_a_server_with_jetstream_is_taken_and_keeps_nothing_of_a_trial(url: str) -> None:
    async with open_nats([url], replace(PATIENT, jetstream=True)) as plane:
        await plane.try_write()
        with pytest.raises(UnavailableError, match="nobody is subscribed"):
            await plane.request(PROBE_SUBJECT, b"", timeout_s=60)
