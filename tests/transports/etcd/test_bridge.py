"""The way back from gRPC's threads: whoever waits is woken, however the completions fall, and nothing is left."""

from __future__ import annotations

import concurrent.futures
import socket
import threading
from contextlib import suppress

import attrs
import grpc
import trio
import trio.testing

from tests.leftovers import uncollected
from trinamo.runtime.config.planes import TlsConfig
from trinamo.transports.etcd import wire_pb2 as wire
from trinamo.transports.etcd.bridge import GrpcChannel, open_channel
from trinamo.transports.etcd.rpc import StatusError, StreamLostError

CALLS = 400
THREADS = 4


@attrs.frozen
class Method:
    """Calls that end when the test says so: gRPC's futures have the standard library's methods."""

    calls: list[tuple[int, concurrent.futures.Future[int]]] = attrs.field(factory=list)

    def future(
        self, request: int, *, timeout: float, metadata: object, wait_for_ready: bool
    ) -> concurrent.futures.Future[int]:
        made: concurrent.futures.Future[int] = concurrent.futures.Future()
        self.calls.append((request, made))
        return made

    def unary_unary(self, *_: object) -> Method:
        """As a `grpc.Channel` all of whose methods it is."""
        return self


async def ask(channel: GrpcChannel, number: int) -> int:
    reply: int = await channel.call("Range", number, timeout_s=1, metadata=())
    return reply


async def test_every_completion_of_many_threads_wakes_its_own_task() -> None:
    method = Method()
    channel = GrpcChannel(method)
    answers: list[tuple[int, int]] = []

    async def call(number: int) -> None:
        answers.append((number, await ask(channel, number)))

    def complete(first: int) -> None:
        for request, future in method.calls[first::THREADS]:
            future.set_result(-request)

    async with trio.open_nursery() as nursery:
        for number in range(CALLS):
            nursery.start_soon(call, number)
        await trio.testing.wait_all_tasks_blocked()
        for first in range(THREADS):
            nursery.start_soon(trio.to_thread.run_sync, complete, first)

    assert sorted(answers) == [(number, -number) for number in range(CALLS)]


async def test_what_completes_while_trio_is_busy_wakes_it_once() -> None:
    method = Method()
    channel = GrpcChannel(method)
    batches: list[int] = []
    wake_all = channel._wake_all

    def count() -> None:
        batches.append(len(channel._wakes))
        wake_all()

    channel._wake_all = count  # type: ignore[method-assign]

    def complete() -> None:
        for _, future in method.calls:
            future.set_result(0)

    async with trio.open_nursery() as nursery:
        for number in range(CALLS):
            nursery.start_soon(ask, channel, number)
        await trio.testing.wait_all_tasks_blocked()
        # trio's own thread waits here, as it does behind a task that computes.
        thread = threading.Thread(target=complete)
        thread.start()
        thread.join()

    assert batches == [CALLS]


async def test_a_completion_that_crosses_a_cancel_wakes_nobody() -> None:
    method = Method()
    channel = GrpcChannel(method)

    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, channel, 0)
            await trio.testing.wait_all_tasks_blocked()
            ((_, call),) = method.calls
            thread = threading.Thread(target=call.set_result, args=(0,))
            thread.start()
            thread.join()
            # The wake-up is on its way; the cancel comes first.
            scope.cancel()
    await trio.testing.wait_all_tasks_blocked()

    assert scope.cancelled_caught


async def test_calls_that_failed_go_with_their_last_reference() -> None:
    """At the end of a process the collector would wait for ever for a lock of a thread that is gone."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        host, port = nobody.getsockname()
    made = open_channel(f"{host}:{port}", TlsConfig(), uses_tls=False, server_name=None)
    with uncollected() as left:
        channel = GrpcChannel(made)
        with suppress(StatusError):
            await channel.call("Range", wire.RangeRequest(), timeout_s=5, metadata=())
        async with channel.open_stream("Watch", metadata=()) as refused:
            with suppress(StreamLostError):
                await refused.receive()
        async with channel.open_stream("Watch", metadata=()):
            pass
        channel.close()
        del refused
        assert left(grpc.RpcError) == []
