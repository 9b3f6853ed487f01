"""Which link the streams of a worker go over, whatever becomes of the one before."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from trinamo.runtime.context import Context
from trinamo.runtime.env import RealEnv
from trinamo.runtime.protocol.streams.request import Carrier, ConnectionInfo, StreamType
from trinamo.transports.tcp import TcpClient
from trinamo.transports.tcp.sockets import TcpOptions
from trinamo.transports.tcp.streams import client


class StandingLink:
    """A link that stands until it is told."""

    def __init__(self, *_: object, **__: object) -> None:
        self.takes_streams = True
        self.may_end = trio.Event()

    async def run(self) -> None:
        await self.may_end.wait()


async def dialled(*_: object) -> tuple[Any, str]:
    await trio.lowlevel.checkpoint()
    return None, ""


async def test_a_full_link_that_ends_leaves_its_successor_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "dial_member", dialled)
    monkeypatch.setattr(client, "Link", StandingLink)
    shared = ConnectionInfo("caller", "s", StreamType.RESPONSE, Carrier.MULTIPLEXED)
    async with trio.open_nursery() as nursery:
        links = TcpClient(TcpOptions(), RealEnv(), nursery)
        first: Any = await links.wait_ready(shared, Context("1"))
        first.takes_streams = False
        second: Any = await links.wait_ready(shared, Context("2"))
        assert second is not first
        first.may_end.set()
        await trio.testing.wait_all_tasks_blocked()
        assert links.ready(shared) == second
        assert len(links.links) == 1
        second.may_end.set()
    assert links.ready(shared) is None
