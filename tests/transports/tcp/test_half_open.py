"""A link that is cut without a word: two network namespaces, a veth pair, one end set down."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import attrs
import msgspec
import pytest
import trio

from tests import needs
from tests.conformance.requests.collecting import wait_room
from tests.runtime.endpoints import open_cluster
from tests.transports.tcp.children import child
from tests.transports.tcp.ends import PATIENCE_S, lone_client, options
from tests.transports.tcp.processes import NAME, OPTIONS
from tests.transports.tcp.streams.raw_links import RawStream, raw_caller
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.errors import DisconnectedError
from trinamo.runtime.protocol.discovery.instances import Instance, encode_instance

pytestmark = pytest.mark.check

OURS, THEIRS = "10.213.77.1", "10.213.77.2"


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, timeout=120)


@attrs.frozen
class Cable:
    """A namespace at the far end of a veth pair."""

    namespace: str

    @property
    def within(self) -> tuple[str, ...]:
        """How to run a command at the far end."""
        return ("ip", "netns", "exec", self.namespace)

    def cut(self) -> None:
        """From now on nothing passes, and nobody is told."""
        ip("-n", self.namespace, "link", "set", "far", "down")


@pytest.fixture
def cable() -> Iterator[Cable]:
    namespace, near = f"trinamo-{os.getpid()}", f"tri{os.getpid() % 1_000_000}"
    if not needs.can_make_networks():
        needs.NETWORKS.lacking()
    ip("netns", "add", namespace)
    try:
        ip("link", "add", near, "type", "veth", "peer", "name", "far", "netns", namespace)
        ip("addr", "add", f"{OURS}/30", "dev", near)
        ip("link", "set", near, "up")
        ip("-n", namespace, "addr", "add", f"{THEIRS}/30", "dev", "far")
        ip("-n", namespace, "link", "set", "far", "up")
        ip("-n", namespace, "link", "set", "lo", "up")
        yield Cable(namespace)
    finally:
        # Deleted by hand: the kernel would take the near end away too, but some time later.
        subprocess.run(["ip", "link", "del", near], check=False, capture_output=True, timeout=120)
        ip("netns", "del", namespace)


@pytest.mark.parametrize("pause_s", [-1.0, 0.05], ids=["silent", "writing"])
async def test_a_cut_link_ends_the_stream_on_both_sides(cable: Cable, pause_s: float) -> None:
    """Keep-alive notices while nothing is sent, TCP_USER_TIMEOUT while data is unacknowledged."""
    changes = msgspec.structs.asdict(msgspec.structs.replace(OPTIONS, host=OURS))
    async with (
        open_cluster(**changes) as cluster,
        child("worker", THEIRS, within=cable.within) as worker,
    ):
        address = (await worker.hear())["address"]
        instance = Instance(endpoint=str(NAME), id="1", transports={"tcp": address})
        await cluster.control.put(instance.key, encode_instance(instance))
        client = await cluster.client(NAME)
        await client.router.wait_instances()
        async with client.stream(pause_s, int) as stream:
            assert await anext(stream) == 0
            cable.cut()
            with pytest.raises(DisconnectedError) as caught:
                [item async for item in stream]
            assert not caught.value.definite
            assert (await worker.hear(event="ended"))["reason"] == "consumer_dropped"


async def test_a_caller_that_is_stopped_does_not_hold_a_writing_worker_for_ever() -> None:
    """Its kernel acknowledges, but takes nothing more: TCP_USER_TIMEOUT counts that time too."""
    context = Context("r")
    client = lone_client(options(user_timeout_s=0.3))
    held: list[RawStream] = []
    async with raw_caller() as caller:

        async def accept_and_never_read() -> None:
            held.append(await caller.accept())

        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(accept_and_never_read)
                async with client.call_home(
                    caller.connection(window_bytes=1 << 30), context
                ) as sender:
                    sender.open()
                    with context.scope:
                        while True:
                            if not sender.send_nowait(bytes(1 << 16)):
                                await wait_room(sender)
        await held[0].stream.aclose()
    assert context.reason is Reason.CONSUMER_DROPPED
    assert client.open_count == 0
