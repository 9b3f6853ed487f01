"""Attackers of a cluster on two machines, from a third one: between them, with etcd's rights, with NATS's token.

Each test is an attack that once worked, on real servers and processes that only share a secret.
"""

from __future__ import annotations

import itertools
import re
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
import trio

from tests.attack.attackers import HIS, Meddler, Swapper, mislead, open_trap, stranger
from tests.cluster.processes import until
from tests.cluster.test_disaggregation import PROMPTS, alone
from tests.machines.between import Segment, socket_in
from tests.machines.machines import Machine, ip
from tests.machines.site import ETCD, HTTP, NATS, STATUS, TOKEN, WORKER, Site, open_site
from trinamo.runtime.config.keys import Secret
from trinamo.runtime.config.planes import NatsConfig
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.planes import EventPlane, Message
from trinamo.runtime.protocol.streams.membership import Purpose
from trinamo.transports.etcd import open_etcd
from trinamo.transports.nats import open_nats
from trinamo.transports.sockets.wire import open_wire
from trinamo.transports.tcp.greeting import welcome
from trinamo.transports.tcp.sockets import TcpOptions

OPEN: Final = (ETCD, NATS, HTTP, STATUS, STATUS + 1)
"""Ports at which others speak in clear, and say no prompt and no answer."""
CLEAR: Final = {"secret_file": None, "clear_tcp": True}
PROMPT, OTHER = b"abcdefgh", b"hgfedcba"


async def test_who_is_between_two_machines_in_clear_reads_and_changes_prompts(
    tmp_path: Path,
) -> None:
    """So the tests below are of somebody who can: without a secret, it takes a consent to be here."""
    async with open_site(tmp_path, workers=[("two", WORKER)], security=CLEAR) as site:
        right = await alone(PROMPTS)
        assert await site.answers() == right
        assert site.between.has_heard(PROMPTS[0].encode())
        assert site.between.has_heard(PROMPT)
        site.between.change = lambda each: each.payload.replace(PROMPT, OTHER)
        others = [each.replace(PROMPT.decode(), OTHER.decode()) for each in PROMPTS]
        assert await site.answers() == await alone(others) != right
        assert site.between.counts["changed"] >= len(PROMPTS)


async def test_who_is_between_two_machines_reads_and_changes_nothing(tmp_path: Path) -> None:
    """Not by a bit that he changes, and not at the address of a worker that he takes for his own."""
    right = await alone(PROMPTS)
    async with open_site(tmp_path) as site:
        assert await site.answers() == right
        count = itertools.count(1)

        def flip(segment: Segment) -> bytes:
            if segment.is_of(*OPEN) or len(segment.payload) < 40 or next(count) % 7:
                return segment.payload
            return segment.payload[:-1] + bytes([segment.payload[-1] ^ 1])

        site.between.change = flip
        for _ in range(3):
            assert await site.answers() == right
        assert site.between.counts["changed"] >= 3
        site.between.change = lambda each: each.payload
        await at_the_address_of_a_worker(site, right)
        assert await site.answers() == right
        await site.wait_asked(1)
        for word in (PROMPT, *(each.encode() for each in right)):
            assert not site.between.has_heard(word)


async def at_the_address_of_a_worker(site: Site, right: list[str]) -> None:
    """He has its address and its port, and a certificate in its name, but of an authority of his own."""
    said = await site.workers[1].ready(b"worker is ready")
    found = re.search(r"instance_id (\w+).* address [\d.]+:(\d+)", said)
    assert found is not None, said
    impostor = Impostor(found[1], site.two.address, int(found[2]))
    address = (f"{site.two.address}/32", "dev", "lo")
    ip("-n", site.between.machine.namespace, "addr", "add", *address)
    # What came before goes nowhere; who dials again gets him.
    site.between.change = lambda each: each.payload if each.is_of(*OPEN) else None
    async with impostor.listening(site.between.machine):
        while impostor.calls < 2:
            assert await site.answers() == right
        await site.frontend.ready(b"security.secret_file is another")
    ip("-n", site.between.machine.namespace, "addr", "del", *address)
    site.between.change = lambda each: each.payload
    assert impostor.believed == 0


@attrs.define
class Impostor:
    """Listens in the name of a worker, with a certificate that another secret has made."""

    instance_id: str
    host: str
    port: int
    calls: int = 0
    believed: int = 0

    @asynccontextmanager
    async def listening(self, machine: Machine) -> AsyncIterator[None]:
        options = TcpOptions(secret=b"a secret that is his, and nobody else has")

        async def take(stream: trio.SocketStream) -> None:
            self.calls += 1
            wire = open_wire(stream)
            with closing(wire.socket), suppress(OSError, TrinamoError):
                await welcome(wire, options, RealEnv(), Purpose.REQUESTS, self.instance_id)
                self.believed += 1

        made = socket_in(machine, lambda: socket.create_server((self.host, self.port)))
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(made))
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, take, [listener])
            yield
            nursery.cancel_scope.cancel()


CARRIED: Final[Mapping[str, dict[str, Any]]] = {
    "tcp": {},
    "nats": {
        "data_plane": {"requests": "nats"},
        "disaggregation": {"mode": "decode_first", "prefill_tokens_local_max": 32},
        "workers": [
            ("one", f"{WORKER} --set worker.role=decode"),
            ("two", f"{WORKER} --set worker.role=decode"),
            ("two", f"{WORKER} --set worker.role=prefill"),
        ],
    },
}


@pytest.mark.parametrize("way", CARRIED)
async def test_who_has_the_brokers_gets_and_changes_nothing(tmp_path: Path, way: str) -> None:
    """Etcd's rights, and NATS's token, which he has read on the way: these two are in clear here."""
    right = await alone(PROMPTS)
    more = {"router": {"policy": "kv"}, **CARRIED[way]}
    async with open_site(tmp_path, **more) as site, open_trap(site.here) as trap:
        assert site.between.has_heard(TOKEN.encode())
        meddler, swapper = Meddler(trap.address), Swapper()

        async def say(events: EventPlane, message: Message) -> None:
            await meddler.say(events, message)
            await swapper.say(events, message)

        url = f"nats://{site.one.address}:{NATS}"
        section = NatsConfig(token=Secret(TOKEN), allow_plain_password=True)
        async with (
            open_etcd([f"{site.one.address}:{ETCD}"]) as store,
            open_nats(url, section) as events,
            stranger(url, TOKEN, say) as him,
        ):
            for number in range(1, 5):
                await mislead(store, events, trap.address, number)
                assert await site.answers() == right

        async def are_counted() -> bool:
            return await site.metric(None, "unsigned_dropped_total") >= 2

        await until(are_counted, "what he wrote is counted")
        said = b"".join(each.payload for each in him.heard)
        for word in (PROMPT, *(each.encode() for each in right)):
            assert not site.between.has_heard(word)
            assert word not in said
        assert (meddler.attacked > 0) is (len(swapper.jobs) > 0) is (way == "nats")
        assert not [each for each in him.heard if each.subject == HIS]
        assert meddler.failed == trap.calls == 0
